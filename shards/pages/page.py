"""HTML pages: one frame around all of them, one style sheet and one way to show names.

A page loads nothing from elsewhere. It runs at most one script, which its content security policy names by hash. Names
are only ever text, whatever they contain.
"""

import base64
import hashlib
import re
import unicodedata
from collections.abc import Mapping
from importlib import resources

import jinja2
from markupsafe import Markup

from shards.output.quantities import duration, number, plural, share, size

FRAME, STYLE = "page.html.j2", "page.css"
NAME_CHARACTERS = 90
# Without \b, every character of a long word would be tried as the first of a scheme.
_USER_AND_PASSWORD = re.compile(r"\b(\w+://)[^/\s]*@")
_QUERY = re.compile(r"\b(\w+://[^\s?#]*)[?#]\S*")
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
_JOINERS = "\u200c\u200d"  # of Persian words and of emoji


def page(package: str, template: str, values: Mapping[str, object], *, script: str = "") -> bytes:
    """The page in UTF-8 that a template of a package makes of these values; equal values give equal bytes. `template`
    and `script` are names of files in the package. The template extends page.html.j2."""
    own, frame = resources.files(package), resources.files("shards.pages")
    texts = {template: own.joinpath(template).read_text("utf-8"), FRAME: frame.joinpath(FRAME).read_text("utf-8")}
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(texts),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shown": shown, "paragraphs": paragraphs, "data_uri": data_uri}
    environment.filters |= {"duration": duration, "number": number, "plural": plural, "share": share, "size": size}
    code = own.joinpath(script).read_text("utf-8") if script else ""
    text = environment.get_template(template).render(
        values,
        style=style_sheet(),
        script=Markup(code),  # noqa: S704 - a file of one of our packages
        script_hash=base64.b64encode(hashlib.sha256(code.encode()).digest()).decode("ascii"),
    )
    return text.encode("utf-8", "backslashreplace")


def style_sheet() -> Markup:
    """The style of all pages: light and dark, wide and narrow, on paper."""
    return Markup(resources.files("shards.pages").joinpath(STYLE).read_text("utf-8"))  # noqa: S704 - our own


def shown(text: str, most: int = NAME_CHARACTERS) -> str:
    """`text` for display: no password, no control or direction-changing characters, the middle of long ones
    left out."""
    plain = _visible(without_secrets(text))
    return plain if len(plain) <= most else f"{plain[: most // 2]}…{plain[-(most // 2) :]}"


def paragraphs(text: str) -> list[str]:
    """The lines of a description that are not empty. Their author meant them to be read: URLs stay whole."""
    return [_visible(line, kept=_JOINERS) for line in text.split("\n") if line.strip()]


def without_secrets(text: str) -> str:
    """The text without what could be a password: users and queries of URLs."""
    return _QUERY.sub(r"\1", _USER_AND_PASSWORD.sub(r"\1", text))


def data_uri(image: bytes, kind: str) -> str:
    """The URI that an image is inside its page by; `kind`: jpeg or png."""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"


def _visible(text: str, kept: str = "") -> str:
    """The text with escapes for characters that are invisible or change how others look."""
    return "".join(
        _escaped(character) if unicodedata.category(character) in _UNSEEN and character not in kept else character
        for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")

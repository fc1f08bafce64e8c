"""Renders HTML pages with a common frame and style sheet, and draws plots as inline SVG.

A page loads nothing from elsewhere. It runs at most one script, which its content security policy names by hash. Names
are always inserted as text, even if they contain markup. There are two kinds of plots: a matrix of shares, and a frame
with two axes, which pages fill with lines, bars and marks. They take numbers and return markup; their colours come from
the page's CSS classes.
"""

import base64
import hashlib
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from markupsafe import Markup, escape

from shards.output.quantities import duration, number, plural, share, size

FRAME, STYLE = "page.html.j2", "page.css"
NAME_CHARACTERS = 90
# Without \b, a search would try a scheme at every character of a long word.
_USER_AND_PASSWORD = re.compile(r"\b(\w+://)[^/\s]*@")
_QUERY = re.compile(r"\b(\w+://[^\s?#]*)[?#]\S*")
# A picture, a tag, or a flag between tags.
_FLAG = re.compile(r"<svg\b.*?</svg>|<[^>]*>|(--[a-z][\w.-]*\w)", re.DOTALL)
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
_JOINERS = "\u200c\u200d"  # used in Persian words and in emoji
WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 76, 14, 34, 44
_MOST_TICKS, _MOST_LOG_TICKS = 5, 7
_LEAST_LEFT, _LEAST_TOP, _LEAST_RIGHT = 60, 60, 8
_TURN = 55  # the rotation of column names, in degrees
_TEXT_SIZE = 12.5  # pixels, as in page.css
_CELL, _NARROW_CELL = 28, 17  # pixels, for few and for many names
_MOST_WIDE = 20
# Values on an axis, with their labels.
Ticks = Sequence[tuple[float, str]]


def page(package: str, template: str, values: Mapping[str, object], *, script: str = "") -> bytes:
    """Renders a template of a package as a page in UTF-8. Equal values give equal bytes. `template` and `script` are
    names of files in the package. The template extends page.html.j2."""
    import jinja2  # noqa: PLC0415 - plots alone do not need it

    own, frame = resources.files(package), resources.files("shards.pages")
    texts = {template: own.joinpath(template).read_text("utf-8"), FRAME: frame.joinpath(FRAME).read_text("utf-8")}
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(texts),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shown": shown, "paragraphs": paragraphs, "data_uri": data_uri, "whole_flags": whole_flags}
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
    """Returns the style sheet of all pages, for light, dark, wide and narrow screens and for paper."""
    return Markup(resources.files("shards.pages").joinpath(STYLE).read_text("utf-8"))  # noqa: S704 - our own


def shown(text: str, most: int = NAME_CHARACTERS) -> str:
    """Returns the text for display: without users and queries of URLs, with control and direction-changing characters
    escaped, and with the middle of a long text cut out."""
    plain = _visible(without_users_and_queries(text))
    return plain if len(plain) <= most else f"{plain[: most // 2]}…{plain[-(most // 2) :]}"


def paragraphs(text: str) -> list[str]:
    """Returns the lines of a description that are not empty. URLs stay whole, because the author wants them to be
    read."""
    return [_visible(line, kept=_JOINERS) for line in text.split("\n") if line.strip()]


def without_users_and_queries(text: str) -> str:
    """Returns the text without the users and queries of URLs, which may contain passwords."""
    return _QUERY.sub(r"\1", _USER_AND_PASSWORD.sub(r"\1", text))


def whole_flags(body: str) -> Markup:
    """Returns HTML in which each flag outside pictures is an element that stays on one line. Browsers would otherwise
    break a line behind the two hyphens of `--data.url`."""
    return Markup(_FLAG.sub(lambda found: f'<span class="flag">{found[1]}</span>' if found[1] else found[0], body))  # noqa: S704


def data_uri(image: bytes, kind: str) -> str:
    """Returns the URI that embeds an image in a page. `kind` is jpeg or png."""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"


def _visible(text: str, kept: str = "") -> str:
    """Returns the text with escapes for characters that are invisible or change how others look."""
    return "".join(
        _escaped(character) if unicodedata.category(character) in _UNSEEN and character not in kept else character
        for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def labelled(values: Iterable[float], text: Callable[[float], str] = number) -> list[tuple[float, str]]:
    """Returns ticks at these values, with their texts."""
    return [(value, text(value)) for value in values]


def ticks(low: float, high: float, *, is_whole: bool = False) -> list[float]:
    """Returns two to five round numbers from `low` to `high`. There may be fewer if `is_whole`, which allows only whole
    numbers. Returns `low` alone if `high` is not above it."""
    if high <= low:
        return [low]
    rough = 10.0 ** math.floor(math.log10((high - low) / 5))
    for factor in (1, 2, 5, 10, 20):
        step = max(rough * factor, 1.0) if is_whole else rough * factor
        found = [at * step for at in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if len(found) <= _MOST_TICKS:
            break
    return found


def log_ticks(low: float, high: float) -> list[float]:
    """Returns round numbers from `low` to `high`: powers of ten, with their multiples by 2 and 5 if the powers are few,
    or only some of the powers if they are many. Returns the two ends if there are fewer than two round numbers."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1,)):
        found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        found = [at for at in found if low <= at <= high]
        if len(found) <= _MOST_LOG_TICKS:
            break
    else:
        found = found[:: -(-len(found) // _MOST_LOG_TICKS)]
    return found if len(found) > 1 else list(dict.fromkeys((low, high)))


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis from `low` to `high`, extended at both ends by `margin`, a share of the length between them."""

    name: str
    low: float
    high: float
    ticks: Ticks
    is_log: bool = False
    margin: float = 0.0

    def share(self, value: float) -> float:
        """Returns where on the axis a value is: 0 at its beginning, 1 at its end."""
        low, high, at = (math.log10(each) if self.is_log else each for each in (self.low, self.high, value))
        if low == high:
            return 0.5 if self.margin else 0.0
        return ((at - low) / (high - low) + self.margin) / (1 + 2 * self.margin)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The two axes of a plot."""

    x: Axis
    y: Axis

    def across(self, value: float) -> float:
        """Returns how far from the left a value of the x axis lies, in pixels."""
        return LEFT + self.x.share(value) * (WIDTH - LEFT - RIGHT)

    def down(self, value: float) -> float:
        """Returns how far from the top a value of the y axis lies, in pixels."""
        return HEIGHT - BOTTOM - self.y.share(value) * (HEIGHT - TOP - BOTTOM)

    def line(self, points: Iterable[tuple[float, float]], style: str = "curve", *, has_area: bool = False) -> str:
        """Returns a line through the points, with the area below it if `has_area`."""
        at = [(self.across(x), self.down(y)) for x, y in points]
        path, base = " ".join(f"{x:.1f},{y:.1f}" for x, y in at), HEIGHT - BOTTOM
        area = f'<polygon class="area" points="{at[0][0]:.1f},{base} {path} {at[-1][0]:.1f},{base}"/>'
        return f'{area if has_area else ""}<polyline class="{style}" points="{path}"/>'

    def dot(self, x: float, y: float, style: str, *, radius: int) -> str:
        """Returns a filled circle at a point."""
        return f'<circle class="{style}" cx="{self.across(x):.1f}" cy="{self.down(y):.1f}" r="{radius}"/>'

    def mark(self, x: float, text: str = "") -> str:
        """Returns a dashed line from top to bottom, with its text on the side that has room."""
        at = self.across(x)
        line = f'<path class="mark" d="M{at:.1f} {TOP - 12 if text else TOP}V{HEIGHT - BOTTOM}"/>'
        shift, anchor = (6, "start") if self.x.share(x) < 0.5 else (-6, "end")
        place = f'x="{at + shift:.1f}" y="{TOP - 4}" text-anchor="{anchor}"'
        return line + (f'<text class="marked" {place}>{escape(text)}</text>' if text else "")

    def svg(self, about: str, drawn: Iterable[str]) -> Markup:
        """Returns the plot with the elements `drawn` in the frame. `about` says in words what it shows."""
        return svg(about, WIDTH, HEIGHT, self.elements(drawn))

    def elements(self, drawn: Iterable[str]) -> list[str]:
        """Returns the elements of the plot: the grid, then `drawn`, then the axes and their names."""
        base, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        grid = [
            f'<path class="grid" d="M{LEFT} {self.down(at):.1f}H{right}"/>'
            f'<text x="{LEFT - 8}" y="{self.down(at) + 4:.1f}" text-anchor="end">{escape(label)}</text>'
            for at, label in self.y.ticks
        ]
        steps = []
        for at, label in self.x.ticks:
            x = self.across(at)
            has_room = x + 0.7 * text_width(label) < WIDTH  # 0.7 instead of 0.5: texts are larger on a phone
            place = (
                f'x="{x if has_room else WIDTH:.1f}" y="{base + 18}" text-anchor="{"middle" if has_room else "end"}"'
            )
            steps.append(f'<path class="axis" d="M{x:.1f} {base}v4"/><text {place}>{escape(label)}</text>')
        names = [f"{axis.name} (log scale)" if axis.is_log else axis.name for axis in (self.x, self.y)]
        ends = [
            f'<path class="axis" d="M{LEFT} {base}H{right}"/>',
            f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">{escape(names[0])}</text>',
            f'<text x="4" y="13">{escape(names[1])}</text>',
        ]
        return [*grid, *drawn, *steps, *ends]


def svg(about: str, width: int, height: int, body: Iterable[str], *, is_flat: bool = False) -> Markup:
    """Returns the picture of the elements `body`. `about` says what it shows, for people who cannot see it. A flat
    picture is as wide as the page."""
    # Every text in `body` is either made in this file or was escaped when it was put in.
    size = 'preserveAspectRatio="none" class="flat"' if is_flat else f'style="max-width:{width * 1.15:.0f}px"'
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(about)}" {size}>'
    return Markup(f"{head}{''.join(body)}</svg>")  # noqa: S704


def matrix(
    shares: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    style: Callable[[int, int], str],
    about: str,
) -> Markup:
    """Draws a matrix of percentages, the largest in the strongest colour. `style` returns the CSS class for a row and a
    column; cells of the class `none` stay empty. If there are many names, cells are small and have no numbers."""
    cell = _CELL if max(len(rows), len(columns)) <= _MOST_WIDE else _NARROW_CELL
    left, top, right = _margins(rows, columns, cell=cell)
    drawn = [
        value
        for row, of_row in enumerate(shares)
        for column, value in enumerate(of_row)
        if style(row, column) != "none"
    ]
    most = max(drawn, default=0.0) or 1.0
    body = []
    for column, name in enumerate(columns):
        turned = f"translate({left + (column + 0.5) * cell + 4:.1f} {top - 7}) rotate(-{_TURN})"
        body.append(f'<text class="name" transform="{turned}">{escape(name)}</text>')
    for row, name in enumerate(rows):
        y = top + row * cell
        place = f'x="{left - 8}" y="{y + cell / 2 + 4}" text-anchor="end"'
        body.append(f'<text class="name" {place}>{escape(name)}</text>')
        for column, value in enumerate(shares[row]):
            x, own = left + column * cell, style(row, column)
            box = f'class="{own}" x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}"'
            if own == "none":
                body.append(f"<rect {box}/>")
                continue
            strength = math.sqrt(value / most)
            body.append(f'<rect {box} fill-opacity="{0.04 + 0.96 * strength:.2f}"/>')
            if value and cell == _CELL:
                kind = "value strong" if strength > 0.6 else "value"
                place = f'class="{kind}" x="{x + (cell - 1) / 2}" y="{y + cell / 2 + 4}" text-anchor="middle"'
                body.append(f"<text {place}>{escape(_percent(value))}</text>")
    return svg(about, left + len(columns) * cell + right, top + len(rows) * cell + 4, body)


def _percent(value: float) -> str:
    """Returns a percentage in one to three characters. Shares below 1 % are `<1`; shares between 99 and 100 % are
    `>99`."""
    return "<1" if value < 0.01 else ">99" if 0.99 < value < 1 else f"{100 * value:.0f}"


def _margins(rows: Sequence[str], columns: Sequence[str], *, cell: int) -> tuple[int, int, int]:
    """Returns the room that whole names need: left of the cells, above them, and right of them, where rotated column
    names stick out."""
    left = max([_LEAST_LEFT, *(12 + text_width(name) for name in rows)])
    top = max([_LEAST_TOP, *(24 + math.sin(math.radians(_TURN)) * text_width(name) for name in columns)])
    lean = math.cos(math.radians(_TURN))
    ends = [lean * text_width(name) + 8 - (len(columns) - at - 0.5) * cell for at, name in enumerate(columns)]
    return math.ceil(left), math.ceil(top), math.ceil(max([_LEAST_RIGHT, *(end + 8 for end in ends)]))


def text_width(text: str) -> float:
    """Returns an upper estimate of a name's width in pixels, in the fonts that pages are shown in."""
    return _TEXT_SIZE * sum(_width(one) for one in text)


def _width(character: str) -> float:
    """Returns the width of a character in em."""
    if unicodedata.combining(character):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF" or character in "MW@%mw…—":
        return 1.0
    return 0.78 if character.isupper() else 0.62

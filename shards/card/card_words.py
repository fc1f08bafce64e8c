"""The card's words: numbers, shares and names as people read them. The template escapes them."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator

from shards.card.card_tally import Tally

NAME_CHARACTERS = 90
MOST_MODES = 12

# Without \b, every character of a long word would be tried as the first of a scheme.
_USER_AND_PASSWORD = re.compile(r"\b(\w+://)[^/\s]*@")
_QUERY = re.compile(r"\b(\w+://[^\s?#]*)[?#]\S*")
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
_JOINERS = "\u200c\u200d"  # of Persian words and of emoji
_FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WebP"}
_MODES = {
    "L": "greyscale",
    "LA": "greyscale with transparency",
    "I;16": "greyscale of 16 bits",
    "1": "black and white",
    "P": "with a palette",
    "RGBA": "RGB with transparency",
    "": "of unknown mode",
}
# What is done to a stored image to show it upright, by its EXIF orientation.
_TURNS = {
    2: "mirrored",
    3: "by 180°",
    4: "by 180° and mirrored",
    5: "by 90° anticlockwise and mirrored",
    6: "by 90° clockwise",
    7: "by 90° clockwise and mirrored",
    8: "by 90° anticlockwise",
}


def title_of(url: str) -> str:
    """The last part of a dataset's URL, without anything that could be a password."""
    last = _without_secrets(url).rstrip("/").rpartition("/")[2]
    return last.rpartition("@")[2] or "dataset"


def shown(text: str, most: int = NAME_CHARACTERS) -> str:
    """`text` for display: no password, no control or direction-changing characters, the middle of long ones
    left out."""
    plain = _visible(_without_secrets(text))
    return plain if len(plain) <= most else f"{plain[: most // 2]}…{plain[-(most // 2) :]}"


def paragraphs(text: str) -> list[str]:
    """The lines of a description that are not empty. Their author meant them to be read: URLs stay whole."""
    return [_visible(line, kept=_JOINERS) for line in text.split("\n") if line.strip()]


def counted(count: int, one: str, many: str = "") -> str:
    """A number with its noun: "1 class", "2 classes"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def byte_text(count: float) -> str:
    """A number of bytes in decimal units, three digits."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            value = count / size
            return f"{value:.{max(0, 2 - int(math.log10(max(value, 1))))}f} {unit}"
    return f"{count:.0f} B"


def share_text(count: int, total: int) -> str:
    """A share in percent; a few of many are never shown as 0, nor almost all as 100."""
    percent = 100 * count / max(total, 1)
    if 0 < percent < 1:
        return "<1 %"
    if 99.9 < percent < 100:
        return ">99.9 %"
    return f"{percent:.{0 if percent in (0, 100) else 1}f} %"


def image_words(tally: Tally, modes: Counter[str]) -> str:
    """What the images are: "500 JPEG; 486 RGB, 14 greyscale; 1 with EXIF rotation (by 90° clockwise)"."""
    formats = [f"{count:,} {_FORMATS.get(ext, shown(ext))}" for ext, count in tally.exts.most_common()]
    is_one = len(modes) == 1
    named = [f"{'all' if is_one else f'{count:,}'} {_mode(mode)}" for mode, count in modes.most_common(MOST_MODES)]
    return "; ".join(", ".join(words) for words in (formats, named, list(_rotations(tally))) if words)


def _mode(mode: str) -> str:
    return _MODES.get(mode, shown(mode))


def _rotations(tally: Tally) -> Iterator[str]:
    turns = {turn: int(count) for turn, count in enumerate(tally.orientations) if turn in _TURNS and count}
    if mirrored := turns.pop(2, 0):
        yield f"{mirrored:,} mirrored by EXIF"
    if len(turns) == 1:
        turn, count = turns.popitem()
        yield f"{count:,} with EXIF rotation ({_TURNS[turn]})"
    elif turns:
        details = ", ".join(f"{count:,} {_TURNS[turn]}" for turn, count in turns.items())
        yield f"{sum(turns.values()):,} with EXIF rotation ({details})"


def _visible(text: str, kept: str = "") -> str:
    """The text with escapes for characters that are invisible or change how others look."""
    return "".join(
        _escaped(character) if unicodedata.category(character) in _UNSEEN and character not in kept else character
        for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _without_secrets(text: str) -> str:
    return _QUERY.sub(r"\1", _USER_AND_PASSWORD.sub(r"\1", text))

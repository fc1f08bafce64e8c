"""Text of others on a terminal: names of files and classes, in one line that fits, without anything that acts."""

import select
import unicodedata
from typing import TextIO

WIDTH = 80
_ACTING = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # control, direction-changing, half a character, line ends


def plain(text: str) -> str:
    """The text with escapes in the place of characters that would act on a terminal, or that it cannot show."""
    return "".join(_escaped(c) if unicodedata.category(c) in _ACTING else c for c in text)


def fitted(text: str, width: int = WIDTH) -> str:
    """The plain text in at most `width` columns; the middle of a long one is left out."""
    from rich.cells import cell_len, set_cell_size  # noqa: PLC0415 - help does without

    shown = plain(text)
    if cell_len(shown) <= width:
        return shown
    first = (width - 1) // 2
    last = width - 1 - first
    tail = shown
    while cell_len(tail) > last:
        tail = tail[1:]
    return f"{set_cell_size(shown, first).rstrip()}…{tail}"


def has_no_reader(stream: TextIO | None) -> bool:
    """Whether the stream is a pipe whose other end is closed."""
    poll = select.poll()
    try:
        poll.register(stream.fileno() if stream else -1, 0)
    except (OSError, ValueError):  # closed, or no file at all
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")

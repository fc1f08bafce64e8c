"""A hostile name, and what must never be seen of it."""

import re

# Sets the title and the colours of a terminal, erases a line, turns the direction, and adds a line of a log.
HOSTILE = "\x1b]0;owned\x07\x1b[31m\x9b2K\u202e\u2028\x85\x7f\r\n12:34:56 done: forged\nerror: forged\u2069"
HOSTILE_LINE = HOSTILE.replace("\n", " ")

_NEVER = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]")
_FORGED = re.compile(r"^(\d\d:\d\d:\d\d done: forged|error: forged)", re.MULTILINE)


def assert_harmless(said: str) -> None:
    """No control character but tabs and line breaks, and no forged line."""
    assert not (found := _NEVER.search(said)), f"{found[0]!r} in {said!r}"
    assert not _FORGED.search(said), said

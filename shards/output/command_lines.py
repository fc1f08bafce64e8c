"""A command as shown on a terminal: it can be copied even if it takes several lines."""

import shlex
from collections.abc import Sequence

from shards.output.terminal import printable_name

_INDENT = " " * 4


def command_lines(before: str, words: Sequence[str], *, columns: int) -> list[str]:
    """The command after the prompt `before`, broken before a flag wherever a line would exceed `columns`; longer words
    stay whole."""
    lines = [before]
    for number, flag in enumerate(_flags(words)):
        line = f"{lines[-1]}{' ' if number else ''}{flag}"
        if number and len(line) + len(" \\") > columns:
            lines.append(_INDENT + flag)
        else:
            lines[-1] = line
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _flags(words: Sequence[str]) -> list[str]:
    """The quoted words, each flag with its values."""
    flags: list[str] = []
    for word in words:
        quoted = printable_name(shlex.quote(word))
        if flags and not word.startswith("--"):
            flags[-1] += f" {quoted}"
        else:
            flags.append(quoted)
    return flags

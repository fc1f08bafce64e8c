"""A command as a terminal shows it: to be copied, also where it takes several lines."""

import shlex
from collections.abc import Sequence

from shards.terminal import printable_name

_INDENT = " " * 4


def command_lines(before: str, words: Sequence[str], *, columns: int) -> list[str]:
    """The command with `before` it on its first line, cut before a flag wherever a line would be longer than `columns`;
    words that are longer stay whole."""
    lines = [before]
    for number, part in enumerate(_flags(words)):
        line = f"{lines[-1]}{' ' if number else ''}{part}"
        if number and len(line) + len(" \\") > columns:
            lines.append(_INDENT + part)
        else:
            lines[-1] = line
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _flags(words: Sequence[str]) -> list[str]:
    """The quoted words, each flag together with its values."""
    parts: list[str] = []
    for word in words:
        quoted = printable_name(shlex.quote(word))
        if parts and not word.startswith("--"):
            parts[-1] += f" {quoted}"
        else:
            parts.append(quoted)
    return parts

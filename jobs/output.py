"""Fits names of files and classes into one line of a terminal."""

import json
import re
import select
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

from shards.errors import STATUSES, Finding
from shards.output.quantities import plural
from shards.output.terminal import printable_name, unescaped, wrapped_text

if TYPE_CHECKING:
    from rich.table import Table


WIDTH = 80
_INDENT = "    "
_PIPE_COLUMNS = 120
_STATUS_WIDTH = len("warning")
_COMMANDS = ("patchline ", "rm ", "ls ", "scancel ", "scontrol ", "sinfo ", "squeue ")
_MORE_WORDS = re.compile(r"[;,`] |; |, then")


def fitted(text: str, width: int = WIDTH) -> str:
    """The text in at most `width` columns, control characters escaped; the middle of a long text is left out."""
    from rich.cells import cell_len, set_cell_size  # noqa: PLC0415 - not needed for help

    if len(text) > 16 * width:  # of a text of megabytes only the ends are looked at
        text = f"{text[: 8 * width]}…{text[-8 * width :]}"
    shown = printable_name(text)
    if cell_len(shown) <= width:
        return shown
    first = (width - 1) // 2
    last = width - 1 - first
    tail = shown
    while cell_len(tail) > last:
        tail = tail[1:]
    return f"{set_cell_size(shown, first).rstrip()}…{tail}"


def wrapped(text: str, width: int = WIDTH, *, most_lines: int = 4) -> list[str]:
    """The text in as many lines as it needs, but not more than a few, control characters escaped; those below the first
    are indented. What is left out is at its end."""
    shown = printable_name(text[: most_lines * width])
    if fitted(shown, width) == shown and shown == printable_name(text):
        return [shown]
    inner = width - len(_INDENT)
    parts = textwrap.wrap(shown, inner, break_on_hyphens=False) or [""]
    kept = parts[:most_lines]
    if len(parts) > most_lines or len(text) > most_lines * width:
        kept[-1] = f"{kept[-1][: inner - 1]}…"
    return [f"{_INDENT * (at > 0)}{fitted(part, inner)}" for at, part in enumerate(kept)]


def advice(todo: str, width: int = WIDTH, *, most_lines: int = 3) -> list[str]:
    """What to do, behind `>`; nothing if there is nothing to do. A command alone stays whole, so that it can be pasted:
    a terminal wraps it without a line break."""
    if not todo:
        return []
    is_command = todo.startswith(_COMMANDS) and not _MORE_WORDS.search(todo)
    return [f"> {printable_name(todo)}"] if is_command else wrapped(f"> {todo}", width, most_lines=most_lines)


def table_of_checks(found: Sequence[Finding], *, columns: int) -> str:
    """A line for each check, below it what to do, and at the end how many faults and warnings there are. `columns`: 0
    for a pipe."""
    name_width = max(len(one.name) for one in found)
    indent = " " * (name_width + _STATUS_WIDTH + 4)
    width, lines = columns or _PIPE_COLUMNS, []
    for one in found:
        status = one.status.upper() if one.status == "fault" else one.status
        head = f"{status:{_STATUS_WIDTH}}  {printable_name(one.name):{name_width}}  "
        allowed = f" (allowed: {one.allowed})" if one.allowed else ""
        lines.append(wrapped_text(head + printable_name(one.found + allowed), width, indent=indent))
        if one.todo:
            lines.append(wrapped_text(f"{indent}> {printable_name(one.todo)}", width, indent=indent))
    counts = counts_of(found)
    lines += ["", f"{plural(counts['fault'], 'fault')}, {plural(counts['warning'], 'warning')}"]
    return "".join(f"{line}\n" for line in lines)


def json_of_checks(found: Sequence[Finding]) -> str:
    """Returns the checks, and how many have each status, as one JSON object."""
    checks = [{name: value for name, value in asdict(one).items() if name != "seen"} for one in found]
    return json.dumps({"checks": checks, "counts": counts_of(found)}, allow_nan=False) + "\n"


def counts_of(found: Sequence[Finding]) -> dict[str, int]:
    """How many findings have each status."""
    return {status: sum(one.status == status for one in found) for status in STATUSES}


def put(text: str) -> None:
    """Writes a result to standard output, at once: if it takes no more, the command ends here and not unnoticed."""
    sys.stdout.write(text)
    sys.stdout.flush()


def show_table(table: "Table") -> None:
    """Writes the table to standard output in colour; names in it must have passed `printable_name`. Rich itself would
    end the program with 1 if there is no reader."""
    from rich.console import Console  # noqa: PLC0415 - not needed for help

    stream = unescaped(sys.stdout)
    console = Console(file=stream)
    with console.capture() as captured:
        console.print(table)
    stream.write(captured.get())
    stream.flush()


def has_no_reader(stream: TextIO | None) -> bool:
    """Whether the stream is a pipe whose other end is closed."""
    poll = select.poll()
    try:
        poll.register(stream.fileno() if stream else -1, 0)
    except (OSError, ValueError):  # closed, or not a file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))

"""How the last try of a run's jobs ended, from the line that stage.sbatch left in RUN/submit/tries.jsonl."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from jobs import exit_codes
from shards.errors import InvalidDataError
from shards.files.json_lines import Line, object_in
from shards.files.line_tail import read_tail
from shards.local_file import open_local_file

_TAIL_BYTES, _CHUNK = 1 << 16, 1 << 20
_MOST_WORD = 80
_SAID_ALREADY = ("done", "gave up", "told to stop")
_EXITS = re.compile(r"exits-(\d{1,10})-(\d{1,9})-(\d{1,9})")
_KNOWN = {
    "done": "is done",
    "stopped": "saved and stopped, and is to be continued",
    "asked to stop": "was asked to stop before it had saved anything, and is to be continued",
    "too few nodes": "found too few healthy nodes, and is to be continued",
    "ended from outside": "was ended from outside: cancelled, preempted, or started again on other nodes",
    "at fault": "was refused, or found a fault that every try would find",
    "gave up": "gave up",
    "told to stop": "was stopped by the file STOP",
}
_CRASHES = (
    (exit_codes.CRASH, "by a fault outside: storage, a disk, a lost worker or rank"),
    (exit_codes.OUR_BUG, "by a bug in patchline"),
    (137, "by SIGKILL"),
    (135, "by SIGBUS"),
    (139, "by SIGSEGV"),
    (134, "by SIGABRT"),
)


def last_try(run_dir: Path) -> tuple[Line | None, int]:
    """The last usable line and its number, from 1; None and 0 if there is none."""
    path = run_dir / "submit" / "tries.jsonl"
    with suppress(OSError, InvalidDataError):
        tail = read_tail(path, most_bytes=_TAIL_BYTES)
        found = tail.last(lambda line: isinstance(line.get("end"), str)) if tail else None
        if tail and found:
            lines = tail.data.split(b"\n")
            at = max(number for number, line in enumerate(lines) if object_in(line) == found)
            return found, line_breaks(path, tail.num_bytes - len(tail.data)) + at + 1
    return None, 0


def said_of_last_try(run_dir: Path) -> str:
    """How the newest try ended; empty while it runs, and if it was the last one: a marker or the table says that."""
    line, _ = last_try(run_dir)
    is_said = line is None or line["end"] in _SAID_ALREADY or not is_newest(run_dir, line)
    return "" if is_said else f"its last try {try_words(line)}"  # type: ignore[arg-type]


def is_newest(run_dir: Path, line: Line) -> bool:
    """Whether no try has begun since: each has a folder of its own from its beginning."""
    try:
        names = [entry.name for entry in os.scandir(run_dir / "submit")]
    except OSError:
        return True
    found = [tuple(map(int, match.groups())) for name in names if (match := _EXITS.fullmatch(name))]
    return not found or max(found) == tuple(line.get(name) for name in ("job", "start", "try"))


def line_breaks(path: Path, num_bytes: int) -> int:
    """In the first bytes of a file."""
    count = 0
    with open_local_file(path) as file:
        while num_bytes > 0 and (data := file.read(min(_CHUNK, num_bytes))):
            count, num_bytes = count + data.count(b"\n"), num_bytes - len(data)
    return count


def try_words(line: Line) -> str:
    """How a try ended, such as `crashed (exit code 9), and is to be continued`. Pure."""
    end, codes = str(line["end"]), list(_codes(line))
    if end != "crashed":
        return _KNOWN.get(end, f"ended as: {end[:_MOST_WORD]}")
    named = next((words for code, words in _CRASHES if code in codes), "")
    shown = f"exit code {' and '.join(map(str, codes))}" if codes else "no rank left an exit code"
    ended = f"ended {named} ({shown})" if named else f"crashed ({shown})"
    return f"{ended}, and is to be continued"


def _codes(line: Line) -> Iterator[int]:
    """Of ranks that did not end well, at most four."""
    codes = line.get("exit_codes")
    found = [code for code in codes if type(code) is int and 0 < code < 256] if isinstance(codes, list) else []
    yield from [code for code in found if code != exit_codes.CONTINUE][:4] or found[:4]

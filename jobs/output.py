"""Writes what commands produce: lines that fit a terminal, the file of --out, and a run's folder.

A file at --out is whole or absent. Weights overwrite other content only with --overwrite, and files of other names are
never deleted.

The umask decides who may read and write a run. A folder is shared if its group may write to it and everything in it
stays with that group (chmod g+ws). A command that works in a shared folder lets the group read and write its files,
whatever the umask was, so that colleagues can watch, stop and continue the run. `--shared` makes a run's folder shared.
"""

import errno
import filecmp
import json
import logging
import os
import re
import select
import shlex
import stat
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from shards.errors import STATUSES, Finding, UserError
from shards.files.local_files import write_whole
from shards.files.looks import is_a_folder, patiently
from shards.output.quantities import plural
from shards.output.terminal import printable_name, unescaped, wrapped_text

if TYPE_CHECKING:
    from rich.table import Table

log = logging.getLogger(__name__)
WIDTH = 80
_INDENT = "    "
_PIPE_COLUMNS = 120
_STATUS_WIDTH = len("warning")
_COMMANDS = ("patchline ", "rm ", "ls ", "scancel ", "scontrol ", "sinfo ", "squeue ")
_MORE_WORDS = re.compile(r"[;,`] |; |, then")
PAGES = (".html", ".htm")
# Errors that are the user's mistake. Other errors, such as a full disk, are faults of the system.
_NOT_HERE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
_MOST_NAMES = 3
_PART = ".part"  # the ending of a file whose write was interrupted
_OF_GROUP = stat.S_IRWXG
_SHARED = stat.S_ISGID | stat.S_IWGRP


def fitted(text: str, width: int = WIDTH) -> str:
    """Returns the text in at most `width` columns, with control characters escaped. The middle of a long text is left
    out."""
    from rich.cells import cell_len, set_cell_size  # noqa: PLC0415 - not needed for help

    if len(text) > 16 * width:  # only the ends of a very long text are needed
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
    """Returns the text in at most `most_lines` lines, with control characters escaped; lines below the first are
    indented. The end of a longer text is left out."""
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
    """Returns `todo` as lines, the first of which begins with `>`; no lines if it is empty. A single command stays on
    one line, so that it can be copied and pasted."""
    if not todo:
        return []
    is_command = todo.startswith(_COMMANDS) and not _MORE_WORDS.search(todo)
    return [f"> {printable_name(todo)}"] if is_command else wrapped(f"> {todo}", width, most_lines=most_lines)


def table_of_checks(found: Sequence[Finding], *, columns: int) -> str:
    """Returns a line for each check, followed by a line that says what to do, if anything, and then the numbers of
    faults and warnings. `columns` is the terminal's width; 0 for a pipe."""
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
    """Returns the checks, and the number of checks with each status, as one JSON object."""
    checks = [{name: value for name, value in asdict(one).items() if name != "seen"} for one in found]
    return json.dumps({"checks": checks, "counts": counts_of(found)}, allow_nan=False) + "\n"


def counts_of(found: Sequence[Finding]) -> dict[str, int]:
    """Returns the number of findings with each status."""
    return {status: sum(one.status == status for one in found) for status in STATUSES}


def put(text: str) -> None:
    """Writes a result to standard output and flushes it. If standard output cannot be written, the error is raised
    here."""
    sys.stdout.write(text)
    sys.stdout.flush()


def show_table(table: "Table") -> None:
    """Writes the table to standard output in colour; names in it must have passed `printable_name`. The text goes
    through our own stream, because Rich would end the program with 1 if standard output has no reader."""
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


def write_to(out: Path, write: Callable[[Path], None], *, overwrite: bool) -> None:
    """Calls `write(out)`, which writes a file or a folder. Raises UserError if `out` has content that this command
    would not have written; with `overwrite`, files of the same names are replaced."""
    if overwrite or not _has_content(out):
        write(out)
        return
    path = out.absolute()  # `.` has neither a name nor a parent
    parent = path.parent if os.access(path.parent, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{path.name}-") as folder:
        again = Path(folder) / path.name
        write(again)
        others = list(_others(out, again))
        if not others and _files(again) == _files(out):
            return
    if others:
        more = f" and {len(others) - _MOST_NAMES} more" if len(others) > _MOST_NAMES else ""
        raise UserError(
            f"--out is {str(out)!r}, which has other content: {', '.join(others[:_MOST_NAMES])}{more}; give another "
            "--out, or --overwrite, which replaces files of the same names and leaves the others as they are"
        )
    write(out)


def _has_content(out: Path) -> bool:
    return any(out.iterdir()) if out.is_dir() else out.exists()


def _others(out: Path, again: Path) -> Iterator[str]:
    """Yields the files in `out` that the command would not have written, or would have written with other content."""
    if not (out.is_dir() and again.is_dir()):
        if out.is_dir() or again.is_dir() or not filecmp.cmp(out, again, shallow=False):
            yield f"{out.name} ({'a folder' if out.is_dir() else 'a file'})"
        return
    for name in sorted(_files(out)):
        if not name.endswith(_PART):
            same = (again / name).is_file() and filecmp.cmp(out / name, again / name, shallow=False)
            if not same:
                yield name


def _files(folder: Path) -> set[str]:
    if not folder.is_dir():
        return {folder.name}
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def write_out(path: Path, data: bytes, *, todo: str) -> None:
    """Writes a file, completely or not at all. Raises UserError with `todo` if the path is wrong or not writable, and
    OSError for a fault of the storage."""
    try:
        write_whole(path, data)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}", todo=todo) from error


def write_page(path: Path, page: bytes) -> None:
    """Writes an HTML page as `write_out` does."""
    write_out(path, page, todo="give --out FILE.html in a folder that this user may write to")


def refuse_no_page(out: Path, *, name: str) -> None:
    """Raises UserError if a page cannot have this path, or would replace something else. `name` is a page's usual name,
    for the message."""
    if out.is_dir():
        raise UserError(f"--out is the folder {str(out)!r}; give the name of a file, such as {str(out / name)!r}")
    if not out.parent.is_dir():
        raise UserError(f"--out is {str(out)!r}, and there is no folder {str(out.parent)!r}; make it first")
    if out.exists() and not (out.is_file() and out.suffix.lower() in PAGES):
        raise UserError(f"--out is {str(out)!r}, which is there and is no .html file; give another name")


def work_in(folder: Path, *, is_shared: bool = False) -> None:
    """Sets this process's umask for its work in a folder: the group may read and write if the folder is shared, or is
    made with `is_shared`. Raises UserError if `is_shared` is given for an existing folder that is not shared."""
    is_there = is_a_folder(folder)
    is_already = is_there and patiently(folder, folder.stat).st_mode & _SHARED == _SHARED
    if is_shared and is_there and not is_already:
        quoted = shlex.quote(str(folder))
        raise UserError(
            f"--shared makes folders, and {printable_name(str(folder))} is there and is not shared; to share it, do: "
            f"chmod -R g+rwX {quoted} && find {quoted} -type d -exec chmod g+s {{}} +"
        )
    if is_shared or is_already:
        os.umask(_umask() & ~_OF_GROUP)


def make_folder(folder: Path) -> None:
    """Makes a folder and its missing parents, with the mode that the umask gives. If the group may write to the folder,
    everything in it stays with the group. Some file servers (NFSv4 with ACLs, SMB) refuse to set this: then a warning
    says so, unless the folder has it from its parent."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        folder.mkdir(exist_ok=True)  # raises an error if it is a file
        return
    mode = stat.S_IMODE(patiently(folder, folder.stat).st_mode)
    if _umask() & _OF_GROUP or mode & stat.S_ISGID:
        return
    try:
        folder.chmod(mode | stat.S_ISGID)
    except PermissionError as error:
        log.warning(
            "%s cannot be kept with its group (chmod g+s: %s); colleagues may lack access to some of its files: set it "
            "with the file server's own ACLs",
            printable_name(str(folder)),
            error.strerror,
        )


def private_mode() -> int:
    """Returns the mode of a private file: only its owner may read and write it; in a shared folder, the group may,
    too."""
    return 0o600 if _umask() & _OF_GROUP else 0o660


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask

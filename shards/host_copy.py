"""Keeps one copy of a table for all ranks of a host: the first rank that needs it makes it, and the others map its file
into memory.

The file is in TMPDIR, in a folder that only this user can open. Once every rank has opened it, its name is removed, so
that the kernel deletes it when the last rank ends, even if it is killed. Each table has a lock, which the kernel frees
when a rank is killed; the next rank makes the table again. If all ranks are killed before each has opened the file, it
stays until the ranks of a later start share a table on this host, which removes tables that only dead processes have
opened. The folder stays. A rank that waits too long for another, because that one is stopped or its store does not
answer, reads its own copy.
"""

import fcntl
import hashlib
import logging
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

log = logging.getLogger(__name__)
_TABLE, _LOCK, _UNFINISHED = ".arrow", ".lock", ".part"
_MOST_LOCK_BYTES = 1 << 16
_MOST_WAIT_SECONDS = 120.0  # a rank waits this long for another to make a table
_LONGEST_PAUSE_SECONDS = 0.1  # between two tries to take a lock
_STATE, _BEGAN = 0, 19  # fields of /proc/PID/stat after the name


@dataclass(kw_only=True)
class LocalRanks:
    """The ranks that one launch has started on this host.

    `launch`: a text that identifies the launch and is the same on all its ranks. `num_ranks`: the number of ranks.
    `is_starting`: whether all ranks open the same tables at about the same time; later, each rank reads its own tables.
    `is_alone`: whether this rank reads all further tables without the others, because one of them took too long over a
    table. `opened`: the tables that this rank has opened.
    """

    launch: str
    num_ranks: int
    is_starting: bool = True
    is_alone: bool = False
    opened: dict[str, pa.Table] = field(default_factory=dict)


def one_copy(ranks: LocalRanks | None, name: str, make: Callable[[], pa.Table]) -> pa.Table:
    """Returns the table of this name, which one rank makes for all. A single rank makes its own. Raises what `make`
    raises. If there is no room for the file, warns, and each rank makes its own table."""
    if ranks is None or ranks.num_ranks == 1:
        return make()
    if name not in ranks.opened:
        if not ranks.is_starting:
            return make()
        ranks.opened[name] = passing_copy(ranks, name, make)
    return ranks.opened[name]


def passing_copy(ranks: LocalRanks, name: str, make: Callable[[], pa.Table]) -> pa.Table:
    """Shares a table like `one_copy`, but at any time of the run, and without keeping the table in `ranks.opened`: for
    tables that each rank needs only once."""
    if ranks.is_alone:
        return make()
    key = hashlib.sha256(f"{ranks.launch}\0{name}".encode()).hexdigest()[:32]
    made: pa.Table | None = None
    try:
        folder = _own_folder()
        _sweep(folder)
        with _locked(folder / f"{key}{_LOCK}", seconds=_MOST_WAIT_SECONDS) as lock:
            owners = _owners(lock)
            if not any(map(_is_alive, owners)):  # left by an earlier start with the same key: it may be outdated
                owners = set()
                (folder / f"{key}{_TABLE}").unlink(missing_ok=True)
            path = folder / f"{key}{_TABLE}"
            if not path.exists():
                made = _made(make)
                _write(path, made)
            table, made = pa.ipc.open_file(pa.memory_map(str(path))).read_all(), None
            pa.default_memory_pool().release_unused()
            owners.add(_mark(os.getpid()))
            if len(owners) >= ranks.num_ranks:
                _remove(folder, key)
            else:
                os.ftruncate(lock, 0)
                os.pwrite(lock, "".join(f"{owner}\n" for owner in owners).encode(), 0)
        return table
    except BlockingIOError:
        ranks.is_alone = True
        log.warning(
            "another rank of this host has not finished reading a table for %.0f s, so this one reads its own: is that "
            "rank stopped, or does its store not answer?",
            _MOST_WAIT_SECONDS,
        )
        return make()
    except OSError as error:
        log.warning(
            "ranks of this host cannot share a table (%s); each reads its own: make room in %s, or set TMPDIR",
            error.strerror or error,
            tempfile.tempdir or "a folder for temporary files",
        )
        return make() if made is None else made
    except _MakingFailed as failed:
        raise failed.error from failed.error.__cause__


class _MakingFailed(Exception):  # noqa: N818 - it carries the error, which may be an OSError of the store
    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _made(make: Callable[[], pa.Table]) -> pa.Table:
    try:
        return make()
    except Exception as error:
        raise _MakingFailed(error) from error


def _own_folder() -> Path:
    """Returns this user's folder for tables on this host. Raises OSError if it cannot be made, or if others have access
    to it."""
    folder = Path(tempfile.gettempdir()) / f"patchline-{os.getuid()}-{socket.gethostname()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


@contextmanager
def _locked(path: Path, *, seconds: float = 0.0) -> Iterator[int]:
    """Yields the open lock file, and holds its lock until the end of the block. Raises BlockingIOError if another
    process holds it for `seconds`."""
    deadline, pause = time.monotonic() + seconds, 0.0
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if _is_free(lock, is_last_try=time.monotonic() >= deadline) and _is_named(lock, path):
                yield lock
                return
        finally:
            os.close(lock)
        pause = min(pause + _LONGEST_PAUSE_SECONDS / 20, _LONGEST_PAUSE_SECONDS)
        threading.Event().wait(pause)


def _is_free(lock: int, *, is_last_try: bool) -> bool:
    """Takes the lock if no other process holds it, and returns whether it did. On the last try, raises BlockingIOError
    instead of returning False."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if is_last_try:
            raise
        return False
    return True


def _is_named(lock: int, path: Path) -> bool:
    """Returns whether the lock file still has this name: the rank that held it before may have removed it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock), path.stat())
    return False


def _owners(lock: int) -> set[str]:
    """Returns the marks of the processes that have opened the table."""
    return set(os.pread(lock, _MOST_LOCK_BYTES, 0).decode(errors="replace").split())


def _mark(pid: int) -> str:
    """Returns the mark of a process: its id and start time, since the ids of dead processes are used again. Returns ""
    if the process is dead."""
    with suppress(OSError, IndexError):
        values = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return "" if values[_STATE] in "XZ" else f"{pid}-{values[_BEGAN]}"
    return ""


def _is_alive(mark: str) -> bool:
    pid = mark.partition("-")[0]
    return pid.isdecimal() and _mark(int(pid)) == mark


def _write(path: Path, table: pa.Table) -> None:
    unfinished = path.with_suffix(_UNFINISHED)
    try:
        with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table.combine_chunks())  # otherwise each rank would copy the chunks into one
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _sweep(folder: Path) -> None:
    """Removes the tables that only dead processes have opened."""
    for path in folder.glob(f"*{_LOCK}"):
        with suppress(BlockingIOError), _locked(path) as lock:
            if not any(map(_is_alive, _owners(lock))):
                _remove(folder, path.stem)


def _remove(folder: Path, key: str) -> None:
    for suffix in (_TABLE, _UNFINISHED, _LOCK):
        (folder / f"{key}{suffix}").unlink(missing_ok=True)

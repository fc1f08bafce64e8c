"""Decides how a command ends: what each exit code tells a shell, a batch script or Slurm, and which error or signal
leads to it.

A training run handles signals itself (pipeline/training/watchdog/stopping.py). Other commands end at the first signal
while they load. While they work, the first signal is raised as KeyboardInterrupt, so that half-written files are
cleaned up. The process then ends after 10 s at the latest, or at a second signal.
"""

import errno
import grp
import os
import pwd
import re
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from jobs.output import has_no_reader
from pipeline.training.watchdog.stopping import DEADLINE_SECONDS, SignalWatcher, end_now, install, say
from shards.errors import PASSING_FAULTS, TransientError, UserError, WillNotSucceedError, disk_fault
from shards.output.terminal import printable_name
from shards.ulimits import file_size_todo, has_address_limit, lack_of_memory, memory_todo

DONE = 0
FAULTS_FOUND = 1
USER_MISTAKE = 2
OUR_BUG = 70
CRASH = 74  # an outside fault (a full disk, a lost worker, storage); to continue, run the same command
CONTINUE = 75  # stopped with its work saved; clusters list this code in Slurm's RequeueExit
WILL_NOT_SUCCEED = 78
INTERRUPTED = 130  # ended by Ctrl-C; nothing was saved
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_SHELL_ADDS = 128  # the exit code after a signal is this plus its number
_ACL = re.compile("acl_access|nfs4_acl|richacl")
_ROOM = "make room, and run the same command to continue"
_ACCESS = "give this user access, and run the same command to continue"
_ASK = "ask its owner for access, or do it as that user"
_DISK = "check the disk or the file server; run the same command to continue"
_FILES = "raise the limit on open files (ulimit -n), and run the same command to continue"
_TO_DO = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EROFS: "make it writable, and run the same command to continue",
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    **dict.fromkeys(PASSING_FAULTS, _DISK),
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
}
_MOVE = "move it away, or give another path"
_WRONG_PATHS = {
    errno.ELOOP: "remove the link that leads back to itself",
    errno.ENAMETOOLONG: "use shorter names",
    errno.EISDIR: _MOVE,
    errno.ENOTDIR: _MOVE,
}


class Interrupted(KeyboardInterrupt):
    """Raised when a signal interrupts a command. `number` is the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """Returns 130 after Ctrl-C, 143 after TERM, 138 after USR1 and 140 after USR2, as shells do."""
    return _SHELL_ADDS + getattr(interrupt, "number", signal.SIGINT)


class Interrupts:
    """Handles a command's signals inside the `with` block. Outside the main thread it does nothing, since Python allows
    no handlers there. A signal that is ignored stays ignored, except USR1 and USR2."""

    def __init__(self) -> None:
        self._is_working = False
        self.interrupt: Interrupted | None = None  # the exception that was raised
        self._late: threading.Timer | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = install(_SIGNALS, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._late:
            self._late.cancel()
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:  # a finished run ignores signals until the process ends
                signal.signal(number, handler)

    def works(self) -> None:
        """Says that everything is loaded: from now on, a signal raises Interrupted."""
        self._is_working = True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if not self._is_working:
            say("interrupted")
            end_now(_SHELL_ADDS + number)
        if self.interrupt:
            say("ended at once")
            end_now(_SHELL_ADDS + number)
        self.interrupt = Interrupted(number)
        self._late = threading.Timer(DEADLINE_SECONDS, end_now, (_SHELL_ADDS + number,))
        self._late.daemon = True
        self._late.start()
        if os.isatty(2):
            with suppress(OSError):
                os.write(2, b"\r  \r")  # overwrites the ^C that the terminal has echoed
        raise self.interrupt


@contextmanager
def answered_in_exchanges() -> Iterator[None]:
    """Lets signals end ranks that wait for each other in an exchange, during which Python runs no signal handlers.
    Inside, a signal ends the command after 10 s, and a second signal at once, even if the exchange never ends. Outside
    the main thread it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first = 0

    def notice(numbers: bytes) -> float | None:
        nonlocal first
        if not numbers:
            say("interrupted; run the same command to start again")
            end_now(_SHELL_ADDS + first)
        for number in numbers:
            if number in _SIGNALS:
                if first:
                    end_now(_SHELL_ADDS + number)
                first = number
        return DEADLINE_SECONDS if first else None

    watcher = SignalWatcher(notice, name="interrupts")
    watcher.start()
    try:
        yield
    finally:
        watcher.stop()


@dataclass(frozen=True, kw_only=True)
class End:
    """How a command ends: its exit code, and its message (empty: none)."""

    code: int
    message: str
    has_traceback: bool = False


def end_of(error: BaseException, *, is_looking: bool = False) -> End:
    """Returns the message and the exit code for `error`. Only bugs and unexpected errors have a traceback.
    `is_looking`: whether the command is about a run that may belong to another user."""
    if is_looking and isinstance(error, PermissionError):
        where = f" at {printable_name(os.fsdecode(error.filename))}" if error.filename else ""
        return End(code=USER_MISTAKE, message=f"error: {error.strerror}{where}{_refused_words(error)}; {_ASK}")
    match error:
        case UserError():
            return _end_of_mistake(error)
        case TransientError():
            return End(code=CRASH, message=f"error: {error}; run the same command to continue")
        case WillNotSucceedError():
            return End(code=WILL_NOT_SUCCEED, message=f"error: {error}")
        case KeyboardInterrupt():
            return End(code=exit_code_of(error), message="interrupted; run the same command to start again")
        case _ if end := _end_of_limit(error):
            return end
        case AssertionError() | TypeError() | AttributeError() | LookupError():
            message = "this is a bug in patchline; please report it with the lines below"
            return End(code=OUR_BUG, message=message, has_traceback=True)
        case BrokenExecutor():
            message = f"error: a worker process was killed ({error}); did memory run out?"
            todo = "Run the same command to continue, with fewer --workers"
            return End(code=CRASH, message=f"{message} {todo}")
        case BrokenPipeError() if has_no_reader(sys.stdout):  # for example `| head` has ended
            return End(code=_SHELL_ADDS + signal.SIGPIPE, message="")
        case OSError(errno=number) if number in _TO_DO:
            where = f" at {error.filename}" if error.filename else ""
            words = f"{error.strerror}{where}{_refused_words(error)}"
            return End(code=CRASH, message=f"error: {words}; {_TO_DO[number]}")
        case OSError(errno=number, filename=str() | bytes() as name) if number in _WRONG_PATHS:
            where = printable_name(os.fsdecode(error.filename2 or name))
            return End(code=USER_MISTAKE, message=f"error: {error.strerror} at {where}; {_WRONG_PATHS[number]}")
    what = "a system call failed" if isinstance(error, OSError) else "ended by an unexpected error"
    return End(code=CRASH, message=f"{what}; run the same command to continue", has_traceback=True)


def _end_of_limit(error: BaseException) -> End | None:
    """Returns how the command ends if it ran out of memory or reached the limit on file sizes; None for any other
    error. If the cause is a limit that its shell sets, the exit code says that retrying does not help. (A run that
    lacks memory after a step ends with CRASH: pipeline/training/run.py.)"""
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        where = f" at {printable_name(os.fsdecode(error.filename))}" if error.filename else ""
        return End(code=WILL_NOT_SUCCEED, message=f"error: {error.strerror}{where}; {file_size_todo()}")
    if what := lack_of_memory(error):
        code, again = (USER_MISTAKE, "again") if has_address_limit() else (CRASH, "to continue")
        return End(code=code, message=f"error: {what}; {memory_todo()}, and run the same command {again}")
    return None


def _end_of_mistake(error: UserError) -> End:
    """Returns the end for a UserError. If a disk fault caused the error, the exit code is CRASH, unless the fault is
    the limit on file sizes."""
    if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EFBIG:
        return End(code=USER_MISTAKE, message=f"error: {error.what}; {file_size_todo()}")
    if fault := disk_fault(error):
        todo = _TO_DO[fault.errno or 0]  # the UserError's own advice does not fit a disk fault
        return End(code=CRASH, message=f"error: {error.what}; {todo}")
    return End(code=USER_MISTAKE, message=f"error: {error}{_refused_words(error.__cause__)}")


def _refused_words(error: BaseException | None) -> str:
    """Returns, for a PermissionError, which user lacks which right, and the rights that the path has, in the form of
    `ls -l`: a `+` stands for an ACL. Returns an empty string if the path is unknown or lacks no right of its own."""
    if not isinstance(error, PermissionError) or not isinstance(error.filename, str | bytes):
        return ""
    path = Path(os.fsdecode(error.filename))
    for place in (path, *path.parents):
        try:
            return _lacking_words(place, place.stat())
        except FileNotFoundError:  # the file was to be made, so its folder counts
            if place != path:
                return ""
        except OSError:  # a folder above it may not be entered
            continue
    return ""


def _lacking_words(path: Path, found: os.stat_result) -> str:
    rights = {"read": os.R_OK, "write to": os.W_OK} | ({"enter": os.X_OK} if stat.S_ISDIR(found.st_mode) else {})
    lacking = [right for right, mode in rights.items() if not os.access(path, mode)]
    if not lacking:
        return ""
    attributes: list[str] = []
    with suppress(OSError):
        attributes = os.listxattr(path)
    mode = stat.filemode(found.st_mode) + ("+" if any(map(_ACL.search, attributes)) else "")
    names = f"{_name_of_user(found.st_uid)}:{_name_of_group(found.st_gid)}"
    shown = printable_name(str(path))
    return f" (user {_name_of_user(os.getuid())} may not {' or '.join(lacking)} {shown}: {mode} {names})"


def _name_of_user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except (KeyError, OSError):  # a container may know only numbers
        return str(number)


def _name_of_group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except (KeyError, OSError):
        return str(number)

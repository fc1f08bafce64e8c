"""How a command ends after an error: the one place where errors become exit codes and messages."""

import errno
import os
import signal
import sys
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass

from jobs import exit_codes
from jobs.interrupts import SHELL_ADDS, exit_code_of
from jobs.output import has_no_reader
from shards.errors import TransientError, UserError, WillNotSucceedError, disk_fault
from shards.output.terminal import printable_name

_ROOM = "make room, and run the same command to continue"
_ACCESS = "give this user access, and run the same command to continue"
_ASK = "ask its owner for access, or do it as that user"
_DISK = "check the disk or the file server; run the same command to continue"
_FILES = "raise the limit on open files (ulimit -n), and run the same command to continue"
_TO_DO = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.ENOMEM: "free some memory, and run the same command to continue",
    errno.EROFS: "make it writable, and run the same command to continue",
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EIO: _DISK,
    errno.ESTALE: _DISK,
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


@dataclass(frozen=True, kw_only=True)
class End:
    """The exit code and the message; an empty message is not printed."""

    code: int
    message: str
    has_traceback: bool = False


def end_of(error: BaseException, *, is_looking: bool = False) -> End:
    """What `error` means to the user and to the shell. Only unknown errors and bugs are shown with a traceback.
    `is_looking`: the command is one that looks at runs, which may be those of others."""
    if is_looking and isinstance(error, PermissionError):
        where = f" at {printable_name(os.fsdecode(error.filename))}" if error.filename else ""
        return End(code=exit_codes.USER_MISTAKE, message=f"error: {error.strerror}{where}; {_ASK}")
    match error:
        case UserError():
            return _end_of_mistake(error)
        case TransientError():
            return End(code=exit_codes.CRASH, message=f"error: {error}; run the same command to continue")
        case WillNotSucceedError():
            return End(code=exit_codes.WILL_NOT_SUCCEED, message=f"error: {error}")
        case KeyboardInterrupt():
            return End(code=exit_code_of(error), message="interrupted; run the same command to start again")
        case AssertionError() | TypeError() | AttributeError() | LookupError():
            message = "this is a bug in patchline; please report it with the lines below"
            return End(code=exit_codes.OUR_BUG, message=message, has_traceback=True)
        case BrokenExecutor():
            message = f"error: a worker process was killed ({error}); did memory run out?"
            todo = "Run the same command to continue, with fewer --workers"
            return End(code=exit_codes.CRASH, message=f"{message} {todo}")
        case BrokenPipeError() if has_no_reader(sys.stdout):  # `| head` has seen enough
            return End(code=SHELL_ADDS + signal.SIGPIPE, message="")
        case OSError(errno=number) if number in _TO_DO:
            where = f" at {error.filename}" if error.filename else ""
            return End(code=exit_codes.CRASH, message=f"error: {error.strerror}{where}; {_TO_DO[number]}")
        case OSError(errno=number, filename=str() | bytes() as name) if number in _WRONG_PATHS:
            where = printable_name(os.fsdecode(error.filename2 or name))
            return End(
                code=exit_codes.USER_MISTAKE, message=f"error: {error.strerror} at {where}; {_WRONG_PATHS[number]}"
            )
        case OSError():
            message = "a system call failed; run the same command to continue"
        case _:
            message = "ended by an unexpected error; run the same command to continue"
    return End(code=exit_codes.CRASH, message=message, has_traceback=True)


def _end_of_mistake(error: UserError) -> End:
    """It is a fault outside if a disk's answer was turned into it."""
    if fault := disk_fault(error):
        what = str(error).rpartition("; ")[0] or str(error)  # what to do about it is not what a mistake needs
        return End(code=exit_codes.CRASH, message=f"error: {what}; {_TO_DO[fault.errno or 0]}")
    return End(code=exit_codes.USER_MISTAKE, message=f"error: {error}")

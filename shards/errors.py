"""Errors, which end a command with a message instead of a traceback, and findings, which checks list. Both say what is
wrong and what to do about it. jobs/exit_codes.py gives each family of errors its exit code."""

import errno
from collections.abc import Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from typing import Literal

from shards.output.terminal import printable

Status = Literal["ok", "warning", "fault"]
STATUSES: tuple[Status, ...] = ("ok", "warning", "fault")
# Errors of a disk or file server that fails for a while. ESTALE: the server was down; ENOTCONN: the process that serves
# a FUSE mount has ended; ECONNABORTED: it ended while this call waited for it; EREMOTEIO: the server's own disk fails.
PASSING_FAULTS = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ECONNABORTED, errno.EREMOTEIO)
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, *PASSING_FAULTS)


class PrintableError(Exception):
    """An error whose message may quote names from data. Its text has no control characters, so that a user's own
    script, which does not escape its output, can print it.

    The message is made of three fields, which are printable too. `what`: what is wrong, with the value. `allowed`: what
    would be right. `todo`: what to do about it. Fields that do not apply are empty. `flags`: the flags with which the
    same command works, as words; the command line prints that command.
    """

    def __init__(self, what: object = "", *, allowed: str = "", todo: str = "", flags: Sequence[str] = ()) -> None:
        ends = [text for text in (f"allowed: {allowed}" if allowed else "", todo) if text]
        super().__init__("; ".join([str(what), *ends]) if ends else what)
        self.what, self.allowed, self.todo = printable(str(what)), printable(allowed), printable(todo)
        self.flags = tuple(flags)

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(PrintableError):
    """The user's mistake (exit code 2). The message says what is wrong, the value, what is allowed and what to do."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found, and what to do about it.

    `name`: what was checked, for tables. `found`: what was found, in words. `allowed`: what would be right. `todo`:
    what to do, often a command. `seen`: where it can be seen: a file and a line, or a command. Fields that do not apply
    are empty.
    """

    name: str = ""
    status: Status = "ok"
    found: str
    allowed: str = ""
    todo: str = ""
    seen: str = ""

    def error(self) -> UserError:
        """Returns this fault as an error that ends a command."""
        return UserError(self.found, allowed=self.allowed, todo=self.todo)


def judged(
    name: str, found: str, *, is_ok: bool, todo: str, allowed: str = "", otherwise: Status = "warning"
) -> Finding:
    """Returns the finding of a check. If the check passed, it says only what was found; otherwise it also says what is
    allowed and what to do."""
    if is_ok:
        return Finding(name=name, found=found)
    return Finding(name=name, status=otherwise, found=found, allowed=allowed, todo=todo)


class InvalidDataError(UserError):
    """A file is damaged or hostile: it is not a regular file or too large, or a value in it has a wrong type or is out
    of range.

    Before the first step, this ends a command with exit code 2. Afterwards training ends with 78 instead, since the
    same command would end in the same way.
    """


class UnreachableError(UserError):
    """Storage has never answered this process: its address or its credentials are probably wrong."""


class TransientError(PrintableError):
    """A temporary fault outside this program (exit code 74). Once it is over, the same command continues."""


class StorageError(TransientError):
    """Storage has answered before and fails now."""


class WillNotSucceedError(PrintableError):
    """The same command would end in the same way (exit code 78), for example after a non-finite loss or without
    progress."""


class ImageRefusedError(PrintableError):
    """The bytes of an image cannot go into a shard. The message is the reason in the quarantine list."""


class one_traceback(ContextDecorator):  # noqa: N801 - a context, used like a function
    """Raises the errors of this module without the tracebacks below this block, and without those of the libraries'
    errors that caused them: the message has what a caller needs. An OSError stays as the cause, since exit codes follow
    from it."""

    def __enter__(self) -> None:
        """Begins the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, PrintableError):
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else None
            raise error.with_traceback(None) from cause


def disk_fault(error: BaseException) -> OSError | None:
    """Returns the OSError of a full, read-only or failing disk or file server if `error` is one, or was raised from
    one; otherwise None. Such an error is always a fault outside this program."""
    for one in (error, error.__cause__):
        if isinstance(one, OSError) and one.errno in _OF_DISKS:
            return one
    return None

"""What is wrong and what to do about it: errors that end a command with a message instead of a traceback, and findings,
which checks list. jobs/exit_codes.py gives each family of errors its exit code."""

import errno
from dataclasses import dataclass
from typing import Literal

from shards.output.terminal import printable

Status = Literal["ok", "warning", "fault"]
STATUSES: tuple[Status, ...] = ("ok", "warning", "fault")
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


class PrintableError(Exception):
    """The message may quote names from data. As text it holds no control character, so that it can be printed by a
    loop of the user's own, whose output nobody else escapes.

    The message is made of three fields, which are printable too: `what` is wrong, with the value; what would be
    `allowed`; and `todo`, what to do about it. A field that says nothing is empty.
    """

    def __init__(self, what: object = "", *, allowed: str = "", todo: str = "") -> None:
        ends = [text for text in (f"allowed: {allowed}" if allowed else "", todo) if text]
        super().__init__("; ".join([str(what), *ends]) if ends else what)
        self.what, self.allowed, self.todo = printable(str(what)), printable(allowed), printable(todo)

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(PrintableError):
    """The user's mistake (exit code 2). The message says what is wrong, the value, what is allowed and what to do."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found, and what to do about it.

    `name`: what was checked, for tables. `found`: in words. `allowed`: what would be right. `todo`: what to do, often a
    command. `seen`: where it is written, such as a file and its line, or a command that shows it. Fields that say
    nothing are empty.
    """

    name: str = ""
    status: Status = "ok"
    found: str
    allowed: str = ""
    todo: str = ""
    seen: str = ""

    def error(self) -> UserError:
        """The error for a command that this fault ends."""
        return UserError(self.found, allowed=self.allowed, todo=self.todo)


def judged(
    name: str, found: str, *, is_ok: bool, todo: str, allowed: str = "", otherwise: Status = "warning"
) -> Finding:
    """A check that has passed, or one that says what is allowed and what to do."""
    if is_ok:
        return Finding(name=name, found=found)
    return Finding(name=name, status=otherwise, found=found, allowed=allowed, todo=todo)


class InvalidDataError(UserError):
    """A file, or what it says, is damaged or hostile: not regular, too large, of a wrong type or out of its range.

    Before the first step this ends a command as the user's mistake; training that is running ends with 78 instead,
    since the same command would end in the same way.
    """


class UnreachableError(UserError):
    """Storage that has never answered this process: its address or its credentials are probably wrong."""


class TransientError(PrintableError):
    """A fault outside (exit code 74): the same command continues once it is over."""


class StorageError(TransientError):
    """Storage that has answered before and fails now."""


class WillNotSucceedError(PrintableError):
    """The same command would end in the same way (exit code 78): non-finite loss, no progress."""


class ImageRefusedError(PrintableError):
    """These bytes cannot go into a shard. The message is the reason in the quarantine list."""


def disk_fault(error: BaseException) -> OSError | None:
    """Returns the answer of a full, read-only or failing disk or file server that this error is, or was raised from.
    It is a fault outside, whatever was being written; None if the error has another reason."""
    for one in (error, error.__cause__):
        if isinstance(one, OSError) and one.errno in _OF_DISKS:
            return one
    return None

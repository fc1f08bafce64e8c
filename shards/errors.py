"""Errors that end a command with a message instead of a traceback; jobs/exit_codes.py gives each its exit code."""

import errno

from shards.output.terminal import printable

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


class PrintableError(Exception):
    """The message may quote names from data. As text it holds no control character, so that it can be printed by a
    loop of the user's own, whose output nobody else escapes. `todo`, what to do about it, ends the message."""

    def __init__(self, what: object = "", *, todo: str = "") -> None:
        super().__init__(f"{what}; {todo}" if todo else what)
        self.what, self.todo = what, todo

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(PrintableError):
    """The user's mistake (exit code 2). The message says what is wrong, the value, what is allowed and what to do."""


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

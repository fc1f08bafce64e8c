"""Errors that end a command with a message instead of a traceback."""


class UserError(Exception):
    """The user's mistake. The message says what, the value, what is allowed and what to do (exit code 2)."""


class StorageError(UserError):
    """Storage that does not answer: a mistake in its address when a command starts, a fault to retry when a run was
    under way."""


class WillNotSucceedError(Exception):
    """Trying again with the same input gives the same end (exit code 78): non-finite loss, no progress."""


class ImageRefusedError(Exception):
    """These bytes cannot go into a shard. The message is the reason that the quarantine list shows."""

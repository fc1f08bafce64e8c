"""Temporary files, whose disk may be full: one message that names their folder."""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from shards.errors import TransientError

_FULL = {errno.ENOSPC: "No space left on device", errno.EDQUOT: "Disk quota exceeded"}


@contextmanager
def room_for_temporary_files() -> Iterator[None]:
    """TransientError if the block fails for want of room for temporary files, or of a folder for them.

    Temporary files have no name in such an error; other files do, and their errors stay as they are.
    """
    try:
        yield
    except FileNotFoundError as error:
        if error.filename is not None or "temporary directory" not in str(error.strerror):
            raise
        todo = "make room in one of these folders, or set TMPDIR to another one"
        raise TransientError(f"no temporary file can be written: {error.strerror}; {todo}") from error
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        what = f"no room for temporary files in {tempfile.gettempdir()}: {_FULL[error.errno]}"
        raise TransientError(f"{what}; make room there, or set TMPDIR to another folder") from error

"""Writes a large file past the page cache (open(2), O_DIRECT), as far as its file system and the bytes allow it.

Nobody reads a checkpoint soon, and room in the page cache costs a virtual machine dearly: measured on one, a writer's
thread took 3.0 s of CPU time for 1 GB through the page cache (clearing new pages and copying into them) and 0.7 s past
it, most of it for hashing.
"""

import errno
import fcntl
import mmap
import os


class DirectFile:
    """Writes to `descriptor` from where it stands. Bytes go past the page cache as long as each piece has whole pages;
    the first that has not, or that the file system refuses, is written through it, and all that follow."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.is_direct = self._switch(on=True)

    def write(self, piece: memoryview) -> None:
        """All of it. OSError as of write(2)."""
        while piece:
            if self.is_direct and len(piece) % mmap.PAGESIZE:
                self.is_direct = self._switch(on=False)
            try:
                piece = piece[os.write(self._descriptor, piece) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self.is_direct:
                    raise
                self.is_direct = self._switch(on=False)

    def _switch(self, *, on: bool) -> bool:
        """Whether the file is written past the page cache now."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError:
            if not on:
                raise
            return False
        return on

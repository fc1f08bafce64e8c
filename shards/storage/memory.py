"""Memory for blocks of images, used again and again.

malloc keeps what a thread frees in an arena of that thread. A stream reads blocks of several MB in many threads, so
nearly as much again as it holds would stay there. A new mapping for each block would return the memory, but the kernel
clears its pages: the loader would take 7 % more CPU time (the arm `patchline` of benchmarks/loader.py, MOST_FREE = 0).
"""

import mmap
from collections import deque

LEAST_BYTES = 1 << 20  # malloc serves what is smaller
MOST_FREE = 4  # mappings that are kept for the next blocks


class ReusedMemory:
    """Keeps a few anonymous mappings and lends them to blocks. Its methods may be called from any thread.

    There is no lock: memory may be given back anywhere in a thread, and in a child that was forked meanwhile.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=MOST_FREE)
        self._is_closed = False

    def take(self, num_bytes: int) -> memoryview:
        """Returns `num_bytes` (at least 1) of writable memory with undefined contents.

        Raises MemoryError if the system has too little.
        """
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        mapping = self._resized(size)
        if mapping is None:
            try:
                mapping = _new(size)
            except OSError:
                self._free.clear()  # perhaps they are what is missing
                try:
                    mapping = _new(size)
                except OSError as error:
                    raise MemoryError(f"{num_bytes} bytes for a block of images: {error.strerror}") from None
        return memoryview(mapping)[:num_bytes]

    def give_back(self, mapping: object) -> None:
        """Takes back a mapping (`view.obj` of what `take` returned) that nothing uses any more. Ignores any other
        object."""
        if isinstance(mapping, mmap.mmap) and not self._is_closed:
            self._free.append(mapping)  # beyond MOST_FREE, the oldest is unmapped

    def close(self) -> None:
        """Unmaps what is free, and from now on what is given back."""
        self._is_closed = True
        self._free.clear()

    def _resized(self, size: int) -> mmap.mmap | None:
        """A free mapping with this size; it keeps its pages. None if there is none, or if something still uses it."""
        try:
            mapping = self._free.pop()
            mapping.resize(size)
        except (IndexError, BufferError, OSError, SystemError, ValueError):
            return None
        return mapping


def _new(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

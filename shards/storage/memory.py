"""Memory for blocks of images, used again and again.

malloc keeps what a thread frees in an arena of that thread. A stream reads blocks of several MB in many threads, so
nearly as much again as it holds would stay there. A new mapping for each block would return the memory, but the loader
would take 7 % more CPU time, as the kernel clears each page.
"""

import mmap
import threading

LEAST_BYTES = 1 << 20  # malloc serves what is smaller
MOST_FREE = 4  # mappings that are kept for the next blocks


class ReusedMemory:
    """Mappings of the process's own memory. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: memory may be given back anywhere in a thread
        self._free: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> memoryview:
        """So many bytes, at least one, with any contents. MemoryError if there are not as many."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            mapping = min(self._free, key=lambda free: abs(len(free) - size), default=None)
            if mapping:
                self._free.remove(mapping)
        if not mapping or not _resized(mapping, size):
            try:
                mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise MemoryError(f"{num_bytes} bytes for a block of images: {error.strerror}") from None
        return memoryview(mapping)[:num_bytes]

    def give_back(self, mapping: object) -> None:
        """The object of what `take` returned, once nothing refers to its memory any more. Others are ignored."""
        if isinstance(mapping, mmap.mmap):
            with self._lock:
                if len(self._free) < MOST_FREE:
                    self._free.append(mapping)


def _resized(mapping: mmap.mmap, size: int) -> bool:
    """The pages that a mapping has stay, up to its new size. False if something refers to it after all, or if there is
    not as much memory."""
    try:
        mapping.resize(size)
    except (BufferError, OSError, SystemError, ValueError):
        return False
    return True

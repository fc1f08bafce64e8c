"""A stored object from front to end, in large pieces that are read ahead."""

from collections.abc import Callable, Generator
from functools import partial
from typing import Protocol

from shards.storage.ahead import in_order
from shards.storage.local import LocalStore
from shards.storage.objects import Store

LOCAL_PIECE_BYTES = 1 << 20  # fits a processor's cache; the operating system reads ahead
REMOTE_PIECE_BYTES = 8 << 20
REMOTE_PIECES_AHEAD = 2


class Digest(Protocol):
    """A hash such as hashlib's."""

    def update(self, data: bytes, /) -> None: ...


def stored_pieces(store: Store, path: str, first: int, end: int, *, digest: Digest | None = None) -> "Pieces":
    """Bytes first..end-1 of an object, for callers that take nearly all of them."""
    is_local = isinstance(store, LocalStore)
    return Pieces(
        partial(store.read_range, path),
        first,
        end,
        piece_bytes=LOCAL_PIECE_BYTES if is_local else REMOTE_PIECE_BYTES,
        ahead=0 if is_local else REMOTE_PIECES_AHEAD,
        digest=digest,
    )


class Pieces:
    """Bytes first..end-1 from `read_range(first, end)`, taken from front to end.

    Skipped bytes are not read if that saves a piece; with a `digest` all bytes are read, and fed to it in order.
    Threads read `ahead` pieces before they are taken; 0: nothing is read before it is needed. `take` and `skip` raise
    the errors of `read_range`.
    """

    def __init__(
        self,
        read_range: Callable[[int, int], bytes],
        first: int,
        end: int,
        *,
        piece_bytes: int,
        ahead: int = 0,
        digest: Digest | None = None,
    ) -> None:
        self._read_range, self._ahead, self._digest = read_range, ahead, digest
        self._piece_bytes = piece_bytes
        self.end = end
        self._held, self._next, self._held_end = b"", 0, first  # a piece, what is taken of it, its end
        self._coming = self._read_from(first)

    @property
    def position(self) -> int:
        """The next byte's offset in the object."""
        return self._held_end - len(self._held) + self._next

    def take(self, count: int) -> bytes:
        """The next `count` bytes, fewer at the end."""
        begin = self._next
        if begin + count <= len(self._held):
            self._next = begin + count
            return self._held[begin : self._next]
        parts = [self._held[begin:]]
        missing = count - len(parts[0])
        while missing and self._load():
            self._next = min(missing, len(self._held))
            parts.append(self._held[: self._next])
            missing -= self._next
        return b"".join(parts)

    def skip(self, count: int) -> None:
        """Skips `count` bytes, not beyond the end."""
        target = min(self.position + count, self.end)
        if self._digest is None and target - self._held_end > self._ahead * self._piece_bytes:
            self.close()
            self._held, self._next, self._held_end = b"", 0, target
            self._coming = self._read_from(target)
            return
        while target > self._held_end and self._load():
            pass
        self._next = len(self._held) - (self._held_end - target)

    def close(self) -> None:
        """Stops the threads."""
        self._coming.close()

    def _load(self) -> bool:
        """Loads the next piece once all of this one is taken; False at the end."""
        piece = next(self._coming, b"")
        if isinstance(piece, Exception):
            raise piece
        if self._digest is not None:
            self._digest.update(piece)
        self._held, self._next = piece, 0
        self._held_end += len(piece)
        return bool(piece)

    def _read_from(self, first: int) -> Generator[bytes | Exception, None, None]:
        starts = range(first, self.end, self._piece_bytes)
        if self._ahead and len(starts) > 1:
            return in_order(self._piece, starts, threads=self._ahead, window=self._ahead)
        return (self._piece(start) for start in starts)

    def _piece(self, start: int) -> bytes:
        return self._read_range(start, min(start + self._piece_bytes, self.end))

"""Works ahead of the caller in threads: applies a function to many items, or reads one object in large pieces.

Results come in order. The number or the bytes of those in memory are limited.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from functools import partial
from itertools import islice
from math import inf
from typing import Protocol, TypeVar

from shards.pool import Pool
from shards.storage.local import LocalStore
from shards.storage.objects import Store

Item = TypeVar("Item")
Result = TypeVar("Result")
# Before a task allocates memory, it calls its Hold with the total number of bytes that it needs. The call returns when
# there is room for them.
Hold = Callable[[int], None]
LOCAL_PIECE_BYTES = 1 << 20  # fits a processor's cache; the operating system reads ahead
REMOTE_PIECE_BYTES = 8 << 20
REMOTE_PIECES_AHEAD = 2


def no_wait(_: int) -> None:
    """Returns at once, for a caller that does not limit its memory."""


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads: int, window: int
) -> Generator[Result | Exception, None, None]:
    """Yields the result of `function` for every item, in order. An exception is yielded in place of its item's result,
    so that one failed item does not end the others.

    At most `window` results are being computed or wait for the caller. Items are drawn in the caller's thread, as
    results are taken. A caller that stops early waits only for calls that have begun.
    """
    return _in_order(lambda _, item: function(item), items, threads, window, None)


def in_order_within(
    function: Callable[[Item, Hold], Result], items: Iterable[Item], *, threads: int, most_bytes: int
) -> Generator[Result | Exception, None, None]:
    """Does the same as `in_order` for large results of unknown size: results that are being computed or wait for the
    caller occupy at most `most_bytes` together.

    `function` calls its `Hold` before it allocates memory. The result that is needed next never waits for room, which
    rules out a deadlock; its bytes may exceed `most_bytes`.
    """
    room = _Room(most_bytes)
    return _in_order(lambda number, item: function(item, room.hold_of(number)), items, threads, threads, room)


class _Room:
    """The bytes held by results that have not been taken yet."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._first, self._closed = most_bytes, 0, False
        self._held: dict[int, int] = {}
        self._changed = threading.Condition()

    def hold_of(self, number: int) -> Hold:
        """Returns the `Hold` of the item with this number, counted from 0."""

        def hold(num_bytes: int) -> None:
            with self._changed:
                more = num_bytes - self._held.get(number, 0)
                if more > 0:
                    self._changed.wait_for(lambda: self._may_have(number, more))
                    self._held[number] = num_bytes
                if self._closed:
                    raise RuntimeError("the reader has stopped")

        return hold

    def taken(self) -> None:
        """Frees the bytes of the first result, which the caller has taken. The next result is then the first."""
        with self._changed:
            self._held.pop(self._first, None)
            self._first += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Wakes all waiting threads with an error, because nobody needs their results."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _may_have(self, number: int, more: int) -> bool:
        return self._closed or number == self._first or sum(self._held.values()) + more <= self._most_bytes


def _in_order(
    function: Callable[[int, Item], Result], items: Iterable[Item], threads: int, window: int, room: _Room | None
) -> Generator[Result | Exception, None, None]:
    if threads < 1 or window < 1:
        raise ValueError(f"threads is {threads}, window is {window}: both must be at least 1")
    left, pool = enumerate(items), Pool(threads, name="ahead")
    try:
        pending: deque[Future[Result]] = deque(pool.submit(partial(function, *item)) for item in islice(left, window))
        while pending:
            outcome: Result | Exception = _outcome(pending.popleft())
            yield outcome
            del outcome  # its memory is freed before the next result comes
            if room:
                room.taken()
            pending.extend(pool.submit(partial(function, *item)) for item in islice(left, 1))
    finally:
        if room:
            room.close()
        pool.close(seconds=inf)


def _outcome(future: Future[Result]) -> Result | Exception:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, Exception):
        return error
    raise error


class Digest(Protocol):
    """A hash such as hashlib's."""

    def update(self, data: bytes, /) -> None: ...


def stored_pieces(store: Store, path: str, first: int, end: int, *, digest: Digest | None = None) -> "Pieces":
    """Returns bytes first..end-1 of an object as pieces, for callers that need nearly all of them."""
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
    """Bytes first..end-1 from `read_range(first, end)`, taken from front to back.

    Skipped bytes are not read if that saves a piece; with a `digest`, all bytes are read and fed to it in order.
    Threads read `ahead` pieces before they are taken; with 0, nothing is read before it is needed. `take` and `skip`
    raise the errors of `read_range`.
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
        # A piece, how many of its bytes have been taken, and its end in the object.
        self._held, self._next, self._held_end = b"", 0, first
        self._coming = self._read_from(first)

    @property
    def position(self) -> int:
        """The offset of the next byte in the object."""
        return self._held_end - len(self._held) + self._next

    def take(self, count: int) -> bytes:
        """Returns the next `count` bytes, or fewer at the end."""
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
        """Skips `count` bytes, or fewer at the end."""
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
        """Loads the next piece, after the current one has been taken. Returns False at the end."""
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

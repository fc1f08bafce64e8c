"""One function over many items, in threads that read ahead: results come in order, and few are in memory."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from functools import partial
from itertools import islice
from math import inf
from typing import TypeVar

from shards.pool import Pool

Item = TypeVar("Item")
Result = TypeVar("Result")

# Called before a task takes memory for this many bytes in all; returns when there is room for them.
Hold = Callable[[int], None]


def no_wait(_: int) -> None:
    """There is room for anything."""


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads: int, window: int
) -> Generator[Result | Exception, None, None]:
    """`function` of every item, in order. An exception comes in its item's place, so that one does not end the others.

    At most `window` items are being made or wait to be taken. Items are drawn in the caller's thread, as results are
    taken. A caller that stops early waits only for calls that have begun.
    """
    return _in_order(lambda _, item: function(item), items, threads, window, None)


def in_order_within(
    function: Callable[[Item, Hold], Result], items: Iterable[Item], *, threads: int, most_bytes: int
) -> Generator[Result | Exception, None, None]:
    """Like `in_order`, for large results of unknown size: those that wait to be taken hold at most `most_bytes`
    together.

    `function` calls its `Hold` before it takes memory. The result that is needed next never waits, so that nothing can
    be stuck; it may come on top of `most_bytes`.
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
        """The hold of the item with this number, counted from 0."""

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
        """The first result has been taken; the next one is the first now."""
        with self._changed:
            self._held.pop(self._first, None)
            self._first += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Releases all that wait; nobody needs what they would read."""
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
            del outcome  # before the next one comes
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

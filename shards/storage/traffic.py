"""Counters of reads: requests, bytes, seconds, retries, hedges. Any thread may count."""

import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from shards.storage.fork_lock import ForkLock


@dataclass(frozen=True, kw_only=True)
class TrafficCounts:
    """Sums since the counters were made. `seconds` is the time of all reads; concurrent ones add up."""

    requests: int = 0  # reads that have ended, without retries, hedges and reads that were stopped
    bytes: int = 0  # of these reads, without bytes that were of no use
    seconds: float = 0.0
    retries: int = 0  # repeated requests, whatever the reason; broken bodies included
    broken_bodies: int = 0
    throttled: int = 0  # answers 429 or 503
    hedges: int = 0  # second requests for slow reads
    hedges_won: int = 0
    wasted_bytes: int = 0  # of requests that lost against the other one for the same bytes

    def __sub__(self, earlier: "TrafficCounts") -> "TrafficCounts":
        before = asdict(earlier)
        return TrafficCounts(**{name: value - before[name] for name, value in asdict(self).items()})


NAMES = tuple(field.name for field in fields(TrafficCounts))


class Traffic:
    """The counters of a store in this process, or of one of its readers (`Store.with_traffic`)."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._sums: dict[str, Any] = dict.fromkeys(NAMES, 0) | {"seconds": 0.0}

    def __reduce__(self) -> tuple[type["Traffic"], tuple[()]]:
        return type(self), ()

    def add(self, more: TrafficCounts) -> None:
        """Adds to every count."""
        with self._lock:
            for name, value in vars(more).items():
                self._sums[name] += value
        for listener in self._listeners if more.throttled else ():
            if told := listener():
                told()

    def on_throttle(self, listener: Callable[[], None]) -> None:
        """Calls this method, while its object lives, whenever the storage has asked for fewer requests."""
        living = [known for known in self._listeners if known()]
        self._listeners = [*living, weakref.WeakMethod(listener)]

    def counts(self) -> TrafficCounts:
        """The sums so far."""
        with self._lock:
            return TrafficCounts(**self._sums)

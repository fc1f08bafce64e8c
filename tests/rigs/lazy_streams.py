"""Streams of a device that exists only in a test, and runs its work at the worst moment that events allow.

Work is queued, and run only when an event behind it is waited for; the work of an `eager` stream, at once, unless an
event holds it up. So whatever no event orders happens in the wrong order, and the test sees wrong values.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from pipeline.ranks.streams import Event

COMPUTE, COPIES = "compute", "copies"
_Launched = tuple[Callable[[], object], "LazyEvent | None"]


@dataclass(eq=False)
class LazyEvent:
    """A point in the work of a stream."""

    streams: "LazyStreams"
    stream: str
    number: int
    has_happened: bool = False

    def synchronize(self) -> None:
        """The host waits for it: exactly the work that it needs is run."""
        self.streams.log.append(f"the host waits for {self.number}")
        self.streams.run_until(self)


@dataclass
class LazyStreams:
    """See the top of this file. `log`: what was launched, in order."""

    eager: str = ""
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._current, self._num_events = COMPUTE, 0
        self._queues: dict[str, deque[tuple[Callable[[], object], LazyEvent | None]]] = {
            COMPUTE: deque(),
            COPIES: deque(),
        }

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Work launched inside goes to the stream for copies."""
        self._current = COPIES
        try:
            yield
        finally:
            self._current = COMPUTE

    def record(self) -> LazyEvent:
        """An event behind the work launched so far."""
        self._num_events += 1
        event = LazyEvent(self, self._current, self._num_events)

        def happen() -> None:
            event.has_happened = True

        self._launch(happen, f"{self._current} records {event.number}")
        return event

    def wait(self, event: Event) -> None:
        """Later work of the current stream waits for an event."""
        assert isinstance(event, LazyEvent)
        self._launch(lambda: None, f"{self._current} waits for {event.number}", after=event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy, made when its turn comes."""
        self._launch(lambda: target.copy_(source), f"{self._current} copies")

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, as `pin_memory` makes one."""
        return tensor.clone()

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Filled, so that a value that was never copied is noticed."""
        return torch.full_like(tensor, 99)

    def launch(self, work: Callable[[], object], said: str) -> None:
        """Work that computes."""
        self._launch(work, said)

    def run_until(self, event: LazyEvent) -> None:
        """Runs what an event needs, on its own stream and on those that it waits for."""
        while not event.has_happened:
            self._run_next(event.stream)

    def finish(self) -> None:
        """Runs all that is left, the computation first."""
        for stream in (COMPUTE, COPIES):
            while self._queues[stream]:
                self._run_next(stream)

    def _launch(self, work: Callable[[], object], said: str, *, after: LazyEvent | None = None) -> None:
        self.log.append(said)
        self._queues[self._current].append((work, after))
        queue = self._queues.get(self.eager, deque())
        while queue and (queue[0][1] is None or queue[0][1].has_happened):
            self._run_next(self.eager)

    def _run_next(self, stream: str) -> None:
        work, after = self._queues[stream][0]
        if after:
            self.run_until(after)
        self._queues[stream].popleft()
        work()

"""The order between a GPU's copies, its computation and the host: a stream for copies, and events.

Work launched on one stream runs in order; between two streams, and between a stream and the host, only events order it.
Tests put streams of their own in place of these, which run their work as late, or as early, as the events allow.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """The host waits until the device has done all work before this point."""


class Streams(Protocol):
    """The stream that computes, and one that copies."""

    def copying(self) -> AbstractContextManager[object]:
        """Work launched inside goes to the stream for copies."""

    def record(self) -> Event:
        """An event behind all work launched so far on the current stream."""

    def wait(self, event: Event) -> None:
        """What is launched on the current stream from now on waits for an event; the host does not."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launches a copy on the current stream; one side is on the device, the other pinned on the host."""

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a small host tensor from which, or into which, the device copies by itself."""

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the device with this shape and type. It belongs to the current stream."""


class CudaStreams:
    """Those of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copying(self) -> AbstractContextManager[object]:
        """Implements `Streams`."""
        stream: AbstractContextManager[object] = torch.cuda.stream(self._copies)
        return stream

    def record(self) -> torch.cuda.Event:
        """Implements `Streams`. A host that waits for it sleeps: the threads that decode need its core."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Event) -> None:
        """Implements `Streams`."""
        if not isinstance(event, torch.cuda.Event):
            raise TypeError(f"{event!r} is no event of a GPU")
        torch.cuda.current_stream(self._device).wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Implements `Streams`."""
        target.copy_(source, non_blocking=True)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Implements `Streams`. PyTorch reuses its memory only after copies out of it are done."""
        return tensor.pin_memory()

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Implements `Streams`."""
        return torch.empty_like(tensor, device=self._device)


class HostStreams:
    """Those of a CPU, where everything is done when it is launched."""

    def copying(self) -> AbstractContextManager[object]:
        """Implements `Streams`."""
        return nullcontext()

    def record(self) -> Event:
        """Implements `Streams`."""
        return _Past()

    def wait(self, event: Event) -> None:
        """Implements `Streams`."""
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Implements `Streams`."""
        target.copy_(source)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Implements `Streams`: there is no device that copies."""
        return tensor

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Implements `Streams`."""
        return torch.empty_like(tensor)


class _Past:
    """An event that has happened."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


def streams_of(device: torch.device) -> Streams:
    """The streams of a rank's device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


@dataclass(frozen=True, kw_only=True)
class ReadBack:
    """Values on their way to the host. `event`: when they have arrived."""

    host: torch.Tensor
    event: Event

    def values(self) -> list[float]:
        """The values, for which the host waits, but not for any work that was launched after them."""
        found: list[float] = self.arrived().tolist()
        return found

    def arrived(self) -> torch.Tensor:
        """The same as a tensor of the host."""
        self.event.synchronize()
        return self.host


def read_back(values: torch.Tensor, streams: Streams) -> ReadBack:
    """Launches the copy of a small tensor to the host, behind the work that computes it."""
    host = streams.pinned(torch.empty(values.shape, dtype=values.dtype))
    streams.copy(host, values)
    return ReadBack(host=host, event=streams.record())

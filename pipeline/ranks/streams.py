"""The streams of a rank's device, and values on their way from it to the host.

Work that is launched on one stream runs in order. Between two streams, and between a stream and the host, only events
impose an order. The host launches work and the copy of its outcome, launches more work, and only then waits for the
first outcome, so that the device always has work. On a CPU, work is done as soon as it is launched. Tests replace the
streams with their own, which run the work as late, or as early, as the events allow.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Makes the host wait until the device has done all work before this point."""


class Streams(Protocol):
    """The streams of a device: one computes, one copies."""

    def copying(self) -> AbstractContextManager[object]:
        """Returns a context inside which work is launched on the stream for copies."""

    def record(self) -> Event:
        """Returns an event after all work launched so far on the current stream."""

    def wait(self, event: Event) -> None:
        """Makes work that is launched on the current stream from now on wait for an event. The host does not wait."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launches a copy on the current stream. One side is on the device, the other in pinned memory of the host."""

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a host tensor in pinned memory, which the device can read and write by itself."""

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor on the device with this shape and type. It belongs to the current stream."""


class CudaStreams:
    """The streams of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copying(self) -> AbstractContextManager[object]:
        """Implements `Streams`."""
        stream: AbstractContextManager[object] = torch.cuda.stream(self._copies)
        return stream

    def record(self) -> torch.cuda.Event:
        """Implements `Streams`. A host thread that waits for the event sleeps, since the decoding threads need its
        core."""
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
        """Implements `Streams`. PyTorch reuses the memory only after copies out of it are done."""
        return tensor.pin_memory()

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Implements `Streams`."""
        return torch.empty_like(tensor, device=self._device)


class HostStreams:
    """The streams of a CPU, where work is done as soon as it is launched."""

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
        """Implements `Streams`. Returns the tensor itself, since no device copies from it."""
        return tensor

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Implements `Streams`."""
        return torch.empty_like(tensor)


class _Past:
    """An event that has happened."""

    def synchronize(self) -> None:
        """Does nothing, since there is nothing to wait for."""


def streams_of(device: torch.device) -> Streams:
    """Returns the streams of a rank's device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


@dataclass(frozen=True, kw_only=True)
class ReadBack:
    """Values on their way to the host. `event`: the event after their copy."""

    host: torch.Tensor
    event: Event

    def values(self) -> list[float]:
        """Returns the values. The host waits for them, but not for work that was launched after them."""
        found: list[float] = self.arrived().tolist()
        return found

    def arrived(self) -> torch.Tensor:
        """Returns the values as a tensor on the host, for which the host waits."""
        self.event.synchronize()
        return self.host


def read_back(values: torch.Tensor, streams: Streams) -> ReadBack:
    """Launches the copy of a small tensor to the host, after the work that computes it."""
    host = streams.pinned(torch.empty(values.shape, dtype=values.dtype))
    streams.copy(host, values)
    return ReadBack(host=host, event=streams.record())

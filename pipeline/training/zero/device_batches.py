"""A rank's batches on its device, and what orders copies, computation and the host: a stream for copies, and events.

Work that is launched on one stream runs in order. Between two streams, and between a stream and the host, only events
order it. The next batch is copied while the step before it computes:

    host, the loader's buffers        k       k+1     k+2 (refills k's)      a request waits for the copy of k
    stream for copies                 copy k  copy k+1  .  copy k+2          a copy waits for the last use of its buffer
    stream that computes                      step k       step k+1          a step waits for the copy of its batch

Every wait is for an event, and nothing relies on how long any device takes. On a CPU nothing is copied. Tests replace
the streams with their own, which run the work as late, or as early, as the events allow.
"""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pipeline.data.batches import NUM_VALID_REQUESTS, Batch
from pipeline.data.position import StreamPosition
from pipeline.data.stream import BatchStream
from pipeline.training.zero.step_times import StepTimes

_NUM_BUFFERS = 2  # on the device: one is used while the other is filled


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """The host waits until the device has done all work before this point."""


class Streams(Protocol):
    """The streams of a device: one computes, one copies."""

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
    """The streams of a GPU."""

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


class Batches(Protocol):
    """What a training step takes its batches from. `streams`: those of the device that the batches are on."""

    @property
    def streams(self) -> Streams:
        """What orders all other copies to and from the device, too."""

    @property
    def typed_position(self) -> StreamPosition:
        """The position at which the batch after the one returned last begins."""

    def counts(self) -> dict[str, float]:
        """What the stream has read so far, by name of pipeline.data.batches.COUNT_NAMES."""

    def __next__(self) -> Batch:
        """The next batch, on the device."""

    def launched(self) -> None:
        """All work that uses the batch returned last has been launched."""


class HostBatches:
    """A stream's batches as they are, in the loader's own buffers: the CPU computes from there."""

    def __init__(self, stream: BatchStream, streams: Streams) -> None:
        self._stream, self.streams = stream, streams

    @property
    def typed_position(self) -> StreamPosition:
        """Implements `Batches`."""
        return self._stream.typed_position

    def counts(self) -> dict[str, float]:
        """Implements `Batches`."""
        return self._stream.counts()

    def __next__(self) -> Batch:
        """Implements `Batches`."""
        return next(self._stream)

    def launched(self) -> None:
        """Implements `Batches`. The CPU has done the work, too."""


@dataclass
class _Buffer:
    """One of the device's buffers: the batch in it, and the event behind its last use."""

    images: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    used: Event | None = None


@dataclass(frozen=True, kw_only=True)
class _Copied:
    """A batch on its way to the device, and the stream's position after it."""

    batch: Batch
    buffer: _Buffer
    event: Event
    position: StreamPosition


class DeviceBatches:
    """A stream's batches, copied to the device by a stream of its own. See the top of this file."""

    def __init__(self, stream: BatchStream, streams: Streams, *, times: StepTimes | None = None) -> None:
        self._stream, self.streams, self._times = stream, streams, times or StepTimes()
        self._position = stream.typed_position
        self._buffers = deque(_Buffer() for _ in range(_NUM_BUFFERS))  # the one to be filled next comes first
        self._copies: deque[Event] = deque()  # out of buffers of the loader that are still valid
        self._ahead: _Copied | None = None
        self._in_use: _Buffer | None = None

    @property
    def typed_position(self) -> StreamPosition:
        """Implements `Batches`. A batch that was only copied ahead does not count."""
        return self._position

    def counts(self) -> dict[str, float]:
        """Implements `Batches`."""
        return self._stream.counts()

    def __next__(self) -> Batch:
        """Implements `Batches`. Work launched from now on waits for its copy; the host does not."""
        self._is_used()
        copied, self._ahead = self._ahead or self._copied(), None
        with self._times.part("to_device"):
            self.streams.wait(copied.event)
        self._position, self._in_use = copied.position, copied.buffer
        return copied.batch

    def launched(self) -> None:
        """Implements `Batches`. The next batch follows to the device at once if it is complete: the host waits for no
        data here, since what it has launched so far is not yet the whole step."""
        self._is_used()
        if self._ahead is None and self._stream.is_ready:
            self._ahead = self._copied()

    def _is_used(self) -> None:
        if self._in_use:
            self._in_use.used, self._in_use = self.streams.record(), None

    def _copied(self) -> _Copied:
        """Requests a batch and launches its copy."""
        if len(self._copies) == NUM_VALID_REQUESTS:  # this request lets the loader refill what the oldest copies from
            self._copies.popleft().synchronize()
        batch, streams, buffer = next(self._stream), self.streams, self._buffers[0]
        self._buffers.rotate(-1)
        with streams.copying():
            if buffer.used:
                streams.wait(buffer.used)
            if buffer.images is None:
                buffer.images = streams.empty_like(batch.images)
            # Their number per image differs from batch to batch. The old ones stay until their last use is waited for.
            buffer.labels = streams.empty_like(batch.labels)
            streams.copy(buffer.images, batch.images)
            streams.copy(buffer.labels, streams.pinned(batch.labels))
            if batch.weights is not None:
                buffer.weights = streams.empty_like(batch.weights)
                streams.copy(buffer.weights, streams.pinned(batch.weights))
            event = streams.record()
        self._copies.append(event)
        batch = replace(batch, images=buffer.images, labels=buffer.labels, weights=buffer.weights)
        return _Copied(batch=batch, buffer=buffer, event=event, position=self._stream.typed_position)


def batches_on(stream: BatchStream, streams: Streams, *, times: StepTimes | None = None) -> Batches:
    """A stream's batches on the device that these streams belong to. `times`: those of the steps that take them."""
    if isinstance(streams, HostStreams):
        return HostBatches(stream, streams)
    return DeviceBatches(stream, streams, times=times)

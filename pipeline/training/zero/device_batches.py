"""A rank's batches on its device: the next one is copied there while the step before it computes.

    host, the loader's buffers        k       k+1     k+2 (refills k's)      a request waits for the copy of k
    stream for copies                 copy k  copy k+1  .  copy k+2          a copy waits for the last use of its buffer
    stream that computes                      step k       step k+1          a step waits for the copy of its batch

Every wait is for an event, and no time of any device is relied on. On a CPU nothing is copied.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pipeline.data.batches import NUM_VALID_REQUESTS, Batch
from pipeline.data.position import StreamPosition
from pipeline.data.stream import BatchStream
from pipeline.training.zero.gpu_streams import Event, HostStreams, Streams
from pipeline.training.zero.step_times import StepTimes

_NUM_BUFFERS = 2  # on the device: one is used while the other is filled


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

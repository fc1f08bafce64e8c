"""A rank's batches on its device. Batches are copied on a separate stream, and events order the copies, the computation
and the host.

The next batch is copied while the previous step computes (what orders streams is in pipeline/ranks/streams.py):

    host, the loader's buffers        k       k+1     k+2 (refills k's)      a request waits for the copy of k
    stream for copies                 copy k  copy k+1  .  copy k+2          a copy waits for the last use of its buffer
    stream that computes                      step k       step k+1          a step waits for the copy of its batch

Every wait is for an event, and nothing depends on how long a device takes. On a CPU, nothing is copied.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pipeline.data.batches import NUM_VALID_REQUESTS, Batch
from pipeline.data.position import StreamPosition
from pipeline.data.stream import BatchStream
from pipeline.ranks.streams import Event, HostStreams, Streams
from pipeline.training.zero.step_times import StepTimes

_NUM_BUFFERS = 2  # buffers on the device: one is used while the other is filled


class Batches(Protocol):
    """The source of a training step's batches. `streams`: the streams of the device on which the batches are."""

    @property
    def streams(self) -> Streams:
        """The streams, which also order all other copies to and from the device."""

    @property
    def typed_position(self) -> StreamPosition:
        """The position after the batch that was returned last."""

    def counts(self) -> dict[str, float]:
        """Returns what the stream has read so far, by the names in pipeline.data.batches.COUNT_NAMES."""

    def __next__(self) -> Batch:
        """Returns the next batch, on the device."""

    def launched(self) -> None:
        """Records that all work that uses the last batch has been launched."""


class HostBatches:
    """A stream's batches in the loader's own buffers, for computation on the CPU."""

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
        """Implements `Batches`. Does nothing, since the CPU has already done the work."""


@dataclass
class _Buffer:
    """One of the device's buffers: the batch in it, and the event after its last use."""

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
    """A stream's batches, copied to the device on a separate stream. See the top of this file."""

    def __init__(self, stream: BatchStream, streams: Streams, *, times: StepTimes | None = None) -> None:
        self._stream, self.streams, self._times = stream, streams, times or StepTimes()
        self._position = stream.typed_position
        self._buffers = deque(_Buffer() for _ in range(_NUM_BUFFERS))  # the next one to be filled comes first
        self._copies: deque[Event] = deque()  # copies of batches that are still valid in the loader's buffers
        self._ahead: _Copied | None = None
        self._in_use: _Buffer | None = None

    @property
    def typed_position(self) -> StreamPosition:
        """Implements `Batches`. A batch that was only copied ahead does not count yet."""
        return self._position

    def counts(self) -> dict[str, float]:
        """Implements `Batches`."""
        return self._stream.counts()

    def __next__(self) -> Batch:
        """Implements `Batches`. Work launched from now on waits for the batch's copy; the host does not."""
        self._is_used()
        copied, self._ahead = self._ahead or self._copied(), None
        with self._times.part("to_device"):
            self.streams.wait(copied.event)
        self._position, self._in_use = copied.position, copied.buffer
        return copied.batch

    def launched(self) -> None:
        """Implements `Batches`. If the next batch is complete, its copy to the device begins at once. The host does not
        wait for data here, since it has not launched the whole step yet."""
        self._is_used()
        if self._ahead is None and self._stream.is_ready:
            self._ahead = self._copied()

    def _is_used(self) -> None:
        if self._in_use:
            self._in_use.used, self._in_use = self.streams.record(), None

    def _copied(self) -> _Copied:
        """Requests a batch and launches its copy."""
        if len(self._copies) == NUM_VALID_REQUESTS:  # this request lets the loader refill the oldest copy's source
            self._copies.popleft().synchronize()
        batch, streams, buffer = next(self._stream), self.streams, self._buffers[0]
        self._buffers.rotate(-1)
        with streams.copying():
            if buffer.used:
                streams.wait(buffer.used)
            if buffer.images is None or buffer.images.shape != batch.images.shape:  # the image size may change once
                buffer.images = streams.empty_like(batch.images)
            # The number of labels per image differs between batches. The wait above protects the old tensor's memory.
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
    """Returns a stream's batches on the device to which `streams` belong. `times`: the times of the steps that use the
    batches."""
    if isinstance(streams, HostStreams):
        return HostBatches(stream, streams)
    return DeviceBatches(stream, streams, times=times)

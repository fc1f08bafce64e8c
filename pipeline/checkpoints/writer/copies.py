"""Writes a rank's saves, in the background or inline. All ranks save in the same way, and the log says how and why.

In the background, the trainer waits only for a copy of its state, and a writer process does the rest. Without a writer
process, the trainer writes the file itself before it continues.

The copy is the rank file, byte by byte, in host memory that is shared with the writer. The memory is allocated and
touched once and reused by every save. On a GPU it is pinned, and the copies run on a separate stream.
"""

import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipeline.checkpoints.config import CheckpointConfig
from pipeline.checkpoints.saves import RankFile, RankWriter
from pipeline.checkpoints.writer.client import Writer
from pipeline.checkpoints.writer.process import do_commit, do_write
from pipeline.checkpoints.writer_messages import BufferFit, CommitOrder, SaveResult, Write
from pipeline.models.weights.safetensors_head import FLOAT_BYTES
from pipeline.ranks.collectives import gather_json
from pipeline.ranks.host import available_bytes
from pipeline.ranks.world import World
from shards.errors import StorageError, UserError
from shards.output.quantities import size
from shards.store import Store

log = logging.getLogger(__name__)
_MOST_SHARE = 0.9  # the most that saves may take of the host's available memory


class Copies:
    """Copies that are on their way into host memory. `event`: the event after them on the GPU; None if they are
    complete."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def is_done(self) -> bool:
        """Returns whether all bytes have arrived, without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Waits until all bytes have arrived."""
        if self._event is not None:
            self._event.synchronize()

    def order(self) -> None:
        """Makes the device finish the copies before it begins any work launched from now on. The host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


def copy_out(
    views: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: torch.cuda.Stream | None
) -> Copies:
    """Copies tensors into host memory. `stream`: on a GPU, the stream for these copies alone. They begin after all work
    launched so far on the current stream."""
    if stream is None:
        for view, target in zip(views, targets, strict=True):
            target.copy_(view)
        return Copies()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for view, target in zip(views, targets, strict=True):
            target.copy_(view, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    return Copies(event)


class HostBuffer:
    """The memory of `descriptor` (memfd_create(2)), which holds a rank file. It is allocated again for a file of
    another size."""

    def __init__(self, descriptor: int, device: torch.device) -> None:
        self._descriptor = descriptor
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._head = b""
        self._is_pinned = False

    @property
    def num_bytes(self) -> int:
        """The size of the buffer, which the rank file in it fills."""
        return self._bytes.numel()

    def fit(self, num_bytes: int) -> None:
        """Allocates this much memory, and touches all of it now. Check `available_bytes` first: if the host has less,
        the kernel kills a process. Raises OSError if the memory cannot be mapped or pinned."""
        if num_bytes == self.num_bytes:
            return
        self._unpin()
        self._bytes, self._head = torch.empty(0, dtype=torch.uint8), b""
        os.ftruncate(self._descriptor, num_bytes)
        mapped = mmap.mmap(self._descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # Touched now, so that the first copy is not slower.
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8).zero_()
        if self._stream is not None:
            _check(_cudart().cudaHostRegister(self._bytes.data_ptr(), num_bytes, 0))
            self._is_pinned = True

    def fill(self, file: RankFile) -> tuple[Copies, bool]:
        """Copies a rank's state into the buffer. Also returns whether the head, and thus the pieces, differ from those
        of the previous file."""
        self.fit(file.head.num_bytes)
        is_new = self._head != file.head.data
        if is_new:
            self._head = file.head.data
            self._bytes[: len(self._head)] = torch.frombuffer(bytearray(self._head), dtype=torch.uint8)
        begins = [offset for _, _, offset, _, _ in file.pieces]
        ends = [begin + view.numel() * FLOAT_BYTES for begin, view in zip(begins, file.views, strict=True)]
        targets = [self._bytes[begin:end].view(torch.float32) for begin, end in zip(begins, ends, strict=True)]
        return copy_out(file.views, targets, self._stream), is_new

    def close(self) -> None:
        """Frees the memory."""
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _unpin(self) -> None:
        if self._is_pinned:
            self._is_pinned = False
            _check(_cudart().cudaHostUnregister(self._bytes.data_ptr()))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(code: object) -> None:
    if int(code) != 0:  # type: ignore[call-overload]
        raise OSError(f"host memory cannot be pinned for the GPU: CUDA error {code}")


class _Streamed:
    """A rank file that is copied out of the engine, one tensor after another, while it is written."""

    def __init__(self, laid_out: RankFile) -> None:
        self._laid_out = laid_out
        self.pieces = laid_out.pieces

    def parts(self) -> Iterable[memoryview]:
        """Returns the file's bytes in order."""
        return self._laid_out.parts()

    def file(self) -> None:
        """Returns None, since no file with these bytes exists."""
        return


class InlineWriter:
    """Finishes each order before the call returns, and keeps the answers until they are taken."""

    is_waited_for = True  # a save ends before training continues

    def __init__(self, store: Store) -> None:
        self._store = store
        self._answers: list[SaveResult] = []

    def write(self, order: Write, laid_out: RankFile) -> None:
        """Writes the file and the report, and returns when they are written."""
        for _ in do_write(order, _Streamed(laid_out), self._answers.append, store=self._store):
            pass  # all steps are taken here

    def commit(self, order: CommitOrder) -> None:
        """Commits the checkpoint, and returns when that is done."""
        do_commit(order, self._answers.append, store=self._store)

    def answers(self, *, seconds: float = 0.0) -> list[SaveResult]:  # noqa: ARG002 - all is done already
        """Returns the answers since the last call."""
        found, self._answers = self._answers, []
        return found

    @property
    def is_busy(self) -> bool:
        """Whether an answer has not been taken yet."""
        return bool(self._answers)

    def order_update(self) -> None:
        """Does nothing, since no copies are running."""

    def close(self) -> None:
        """Does nothing, since there is nothing to free."""


class BackgroundWriter:
    """A writer process with a buffer that holds a copy of this rank's state."""

    is_waited_for = False

    def __init__(self, writer: Writer, buffer: HostBuffer) -> None:
        self._writer, self._buffer = writer, buffer
        self._copies = Copies()
        self._after_copies: Write | None = None
        self._failed: list[SaveResult] = []

    def write(self, order: Write, laid_out: RankFile) -> None:
        """Copies the state. The writer begins once the copies are complete."""
        try:
            self._copies, is_new = self._buffer.fill(laid_out)
            if is_new:
                self._writer.fit(BufferFit(num_bytes=self._buffer.num_bytes, pieces=laid_out.pieces))
        except OSError as error:
            self._failed.append(SaveResult(save=order.save, what="failed", message=f"rank {order.rank}: {error}"))
            return
        self._after_copies = order
        self._begin()

    def commit(self, order: CommitOrder) -> None:
        """Has the checkpoint committed in the background."""
        try:
            self._writer.commit(order)
        except StorageError as error:
            self._failed.append(SaveResult(save=order.save, what="failed", message=f"manifest: {error}"))

    def answers(self, *, seconds: float = 0.0) -> list[SaveResult]:
        """Returns the answers since the last call. If `seconds` is above 0, waits until the copies are complete, and
        then up to `seconds` for the first answer."""
        if self._after_copies and seconds:
            self._copies.wait()
        self._begin()
        failed, self._failed = self._failed, []
        return failed or self._writer.answers(seconds=seconds)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is due, or has not been taken yet."""
        return bool(self._after_copies or self._failed) or self._writer.is_busy

    def order_update(self) -> None:
        """Makes the device finish the copies before it begins any work launched from now on."""
        self._copies.order()
        self._copies = Copies() if self._copies.is_done() else self._copies

    def close(self) -> None:
        """Frees the memory, and ends the process."""
        self._buffer.close()
        self._writer.close()

    def _begin(self) -> None:
        order = self._after_copies
        if order is None or not self._copies.is_done():
            return
        self._after_copies = None
        try:
            self._writer.write(order)
        except StorageError as error:
            self._failed.append(SaveResult(save=order.save, what="failed", message=f"rank {order.rank}: {error}"))


@dataclass(frozen=True, kw_only=True)
class Room:
    """The memory of one rank's host. `needed_bytes`: what copies of the state of all its ranks need. `training_bytes`:
    what these ranks will still need for training. `fault`: why the memory could not be allocated; empty if nothing
    failed."""

    rank: int
    needed_bytes: int
    available_bytes: int
    training_bytes: int = 0
    fault: str = ""

    @property
    def is_enough(self) -> bool:
        """Whether saves in the background fit, with a tenth of the available memory to spare."""
        return not self.fault and self.needed_bytes + self.training_bytes <= self.available_bytes * _MOST_SHARE

    def words(self) -> str:
        """Returns a text that says why the memory is not enough."""
        needed, available = size(self.needed_bytes), size(self.available_bytes)
        told = self.fault or f"{available} of memory are available there, of which they may take {_MOST_SHARE:.0%}"
        training = f" and {size(self.training_bytes)} to train" if self.training_bytes else ""
        ranks = f"the ranks on the host of rank {self.rank}"
        return f"{ranks} need {needed} for one copy of their state{training}, but {told}"


def choose_writer(
    config: CheckpointConfig,
    writer: Writer | None,
    store: Store,
    world: World,
    *,
    num_bytes: int,
    training_bytes: int = 0,
) -> RankWriter:
    """Chooses how this rank saves. `num_bytes`: the size of its file. `training_bytes`: the host memory that the rank
    will still need for training. `writer`: None if the job asks for none. Raises UserError if the job requires
    background saves and a host does not have enough memory. Collective."""
    if writer is None:
        return InlineWriter(store)
    ranks = world.num_local_ranks
    mine = Room(
        rank=world.rank,
        needed_bytes=num_bytes * ranks,
        available_bytes=available_bytes(),
        training_bytes=training_bytes * ranks,
    )
    short = _short_of_all(mine, world)
    buffer = HostBuffer(writer.buffer, world.device)
    if not short:
        short = _short_of_all(_taken(buffer, mine, num_bytes), world)
    if not short:
        if world.is_first:
            log.info("asynchronous checkpoints: %s of host memory per rank", size(num_bytes))
        return BackgroundWriter(writer, buffer)
    buffer.close()
    writer.close()
    if config.asynchronous == "on":
        todo = "give --checkpoint.asynchronous auto or off, or start fewer ranks per host"
        raise UserError(f'checkpoint.asynchronous is "on", but {short.words()}; {todo}')
    if world.is_first:
        log.warning("checkpoints are written while training waits: %s", short.words())
    return InlineWriter(store)


def _taken(buffer: HostBuffer, mine: Room, num_bytes: int) -> Room:
    """Allocates the buffer. Returns the room, with a `fault` if the allocation failed."""
    try:
        buffer.fit(num_bytes)
    except OSError as error:
        return replace(mine, fault=f"it could not be taken: {error.strerror or error}")
    return mine


def _short_of_all(mine: Room, world: World) -> Room | None:
    """Returns the first room, in rank order, that is not enough; None if all are. Collective."""
    found: list[dict[str, Any]] = gather_json(vars(mine), device=world.device)
    return next((room for room in (Room(**each) for each in found) if not room.is_enough), None)

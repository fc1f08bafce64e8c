"""Saves in the background: the trainer waits for one copy of its state, and a writer process does the rest."""

from pipeline.checkpoints.fragments import RankFile
from pipeline.checkpoints.writer.client import Writer
from pipeline.checkpoints.writer.host_buffer import Copies, DoneCopies, HostBuffer
from pipeline.checkpoints.writer_messages import Answer, CommitOrder, Fit, Write
from shards.errors import StorageError


class BackgroundWriter:
    """A writer process with a buffer in which a copy of this rank's state has room."""

    is_waited_for = False

    def __init__(self, writer: Writer, buffer: HostBuffer) -> None:
        self._writer, self._buffer = writer, buffer
        self._copies: Copies = DoneCopies()
        self._after_copies: Write | None = None
        self._failed: list[Answer] = []

    def write(self, order: Write, laid_out: RankFile) -> None:
        """Copies the state; the writer begins once the copies have ended."""
        try:
            self._copies, is_new = self._buffer.fill(laid_out)
            if is_new:
                self._writer.fit(Fit(num_bytes=self._buffer.num_bytes, pieces=laid_out.pieces))
        except OSError as error:
            self._failed.append(Answer(save=order.save, what="failed", message=f"rank {order.rank}: {error}"))
            return
        self._after_copies = order
        self._begin()

    def commit(self, order: CommitOrder) -> None:
        """Commits, in the background, too."""
        try:
            self._writer.commit(order)
        except StorageError as error:
            self._failed.append(Answer(save=order.save, what="failed", message=f"manifest: {error}"))

    def answers(self, *, seconds: float = 0.0) -> list[Answer]:
        """What was answered since; waits for the first up to `seconds`."""
        if self._after_copies and seconds:
            self._copies.wait()
        self._begin()
        failed, self._failed = self._failed, []
        return failed or self._writer.answers(seconds=seconds)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._after_copies or self._failed) or self._writer.is_busy

    def order_update(self) -> None:
        """What the device is asked from now on comes after the copies."""
        self._copies.order()
        self._copies = DoneCopies() if self._copies.is_done() else self._copies

    def close(self) -> None:
        """Ends the process, and frees the memory."""
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
            self._failed.append(Answer(save=order.save, what="failed", message=f"rank {order.rank}: {error}"))

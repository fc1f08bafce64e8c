"""Saves without a writer process: the trainer does the same work itself, and waits for it."""

from collections.abc import Iterable

from pipeline.checkpoints.fragments import RankFile
from pipeline.checkpoints.writer.save_work import do_commit, do_write
from pipeline.checkpoints.writer_messages import Answer, CommitOrder, Write
from shards.store import Store


class _Streamed:
    """A rank file that is copied out of the engine tensor by tensor while it is written."""

    def __init__(self, laid_out: RankFile) -> None:
        self._laid_out = laid_out
        self.pieces = laid_out.pieces

    def parts(self) -> Iterable[memoryview]:
        """Its bytes in order."""
        return self._laid_out.parts()

    def file(self) -> None:
        """It is nowhere as a whole."""
        return


class InlineWriter:
    """Does each thing when it is asked, and keeps the answers."""

    is_waited_for = True  # a save ends before training continues

    def __init__(self, store: Store) -> None:
        self._store = store
        self._answers: list[Answer] = []

    def write(self, order: Write, laid_out: RankFile) -> None:
        """Writes the file and the report."""
        for _ in do_write(order, _Streamed(laid_out), self._answers.append, store=self._store):
            pass  # nobody else takes the steps

    def commit(self, order: CommitOrder) -> None:
        """Commits."""
        do_commit(order, self._answers.append, store=self._store)

    def answers(self, *, seconds: float = 0.0) -> list[Answer]:  # noqa: ARG002 - all is done already
        """What was answered since."""
        found, self._answers = self._answers, []
        return found

    @property
    def is_busy(self) -> bool:
        """Whether an answer has not been taken yet."""
        return bool(self._answers)

    def order_update(self) -> None:
        """Nothing is being copied."""

    def close(self) -> None:
        """It holds nothing."""

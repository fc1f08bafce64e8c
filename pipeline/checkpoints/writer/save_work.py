"""What is done for a save after its state was copied, in the writer process or, without one, in the trainer itself."""

import errno
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from pipeline.checkpoints.gone import gone_message
from pipeline.checkpoints.rank_file_out import RankFileBytes, file_name, report_name, write_rank_file
from pipeline.checkpoints.writer_messages import Answer, CommitOrder, Write
from shards.errors import StorageError, UserError
from shards.store import Store, open_store

Say = Callable[[Answer], None]
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FAULTS = (OSError, UserError, StorageError)
_SIGN_SECONDS = 1.0  # between two signs of progress


def do_write(order: Write, data: RankFileBytes, say: Say, *, store: Store | None = None) -> Iterator[None]:
    """Writes the rank's file and report, step by step; says written, failed or overtaken."""
    store = store or open_store(order.url)
    try:
        if not store.exists(order.record):  # or a run directory that was deleted would be made again
            say(Answer(save=order.save, what="overtaken", message=gone_message(f"{store.url}/{order.record}")))
            return
        if order.failed:
            _discard(order, store)
        yield from write_rank_file(
            store, order.folder, data, rank=order.rank, save=order.save, progress=_signs(order.save, say)
        )
    except _FAULTS as error:
        say(Answer(save=order.save, what="failed", message=f"rank {order.rank}: {said_of(error, store.url)}"))
        return
    say(Answer(save=order.save, what="written"))


def _signs(save: int, say: Say) -> Callable[[], None]:
    """Says that a save makes progress, whenever it is called, but seldom: a trainer that evaluates reads nothing for
    minutes, and a writer whose pipe is full stands still."""
    said_at = -math.inf

    def sign() -> None:
        nonlocal said_at
        now = time.monotonic()
        if now - said_at >= _SIGN_SECONDS:
            said_at = now
            say(Answer(save=save, what="progress"))

    return sign


def _discard(order: Write, store: Store) -> None:
    """Deletes what this rank wrote for a save that has failed, and what a killed writer had begun to write, as far as
    that works."""
    own = [f"{order.failed}/{name}" for name in (report_name(order.rank), file_name(order.rank))]
    with suppress(*_FAULTS):
        store.discard_unfinished(lambda path: path in own)
    for path in own:
        with suppress(*_FAULTS):
            store.delete(path)


def do_commit(order: CommitOrder, say: Say, *, store: Store | None = None) -> None:
    """Commits the checkpoint, says so (or failed, or overtaken), deletes old ones, and says retired."""
    # Only rank 0 needs it, and only now: it loads pydantic.
    from pipeline.checkpoints.attempt_record import attempt_from_json  # noqa: PLC0415
    from pipeline.checkpoints.commit import Commit, OvertakenError, Retention, commit, retire_after  # noqa: PLC0415

    store = store or open_store(order.url)
    what = Commit(draft=order.draft, num_ranks=order.num_ranks, save=order.save, run_dir=order.run_dir)
    try:
        newest = commit(store, what)
    except OvertakenError as error:
        say(Answer(save=order.save, what="overtaken", message=str(error)))
        return
    except _FAULTS as error:
        say(Answer(save=order.save, what="failed", message=f"manifest: {said_of(error, store.url)}"))
        return
    say(Answer(save=order.save, what="committed"))
    retention = Retention(
        keep_newest=order.keep_newest,
        keep_every=order.keep_every,
        rewind_steps=order.rewind_steps,
        folders=order.keep,
    )
    try:
        retire_after(store, newest, attempt_from_json(order.attempt.encode()), retention)
    except _FAULTS as error:
        say(Answer(save=order.save, what="said", message=f"old checkpoints could not be deleted: {error}"))
    say(Answer(save=order.save, what="retired"))


def said_of(error: Exception, url: str) -> str:
    """An error of a save as the log says it, with what to do."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        where = error.filename or url
        return f"{error.strerror} at {where}; make room there (a smaller --checkpoint.keep-newest needs less)"
    return str(error)

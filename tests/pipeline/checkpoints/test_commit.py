"""Commits: the manifest of all ranks' reports, the fence, and the requests, which run at once; counted at 512 ranks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.attempts import Attempt, attempt_to_json, record_path
from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.commit import OvertakenError, commit, draft_manifest, retire, with_reports
from pipeline.checkpoints.config import Retention
from pipeline.checkpoints.manifest import (
    MANIFEST_NAME,
    CheckpointId,
    draft_from_json,
    manifest_from_json,
    manifest_to_json,
)
from pipeline.checkpoints.rank_file_out import FileRecord, RankReport, file_name, report_name, report_to_json
from pipeline.checkpoints.saves import lay_out
from pipeline.checkpoints.writer_messages import CommitOrder
from pipeline.training.saving.save import saved_job
from shards.errors import StorageError
from shards.store import LocalStore, Store
from tests.rigs.counted_store import CountedStore
from tests.rigs.positions import position_at

OWN = "0051-aaaaaaaa"
NUM_RANKS, NUM_STARTS = 512, 51  # 50 restarts
MOST_IN_A_ROW = 10


def put_attempts(store: Store, num_starts: int) -> Attempt:
    """The records of this many starts, each of which resumed from the one before; the last is OWN."""
    tokens = [f"{number:04d}-aaaaaaaa" for number in range(52 - num_starts, 52)]
    before: str | None = None
    for number, token in enumerate(tokens):
        origin = CheckpointId(step=4 * number, attempt=before) if before else None
        attempt = Attempt(token=token, resumed_from=origin, skipped=())
        store.write(record_path(token), attempt_to_json(attempt))
        before = token
    return attempt


def put_save(store: Store, step: int, *, num_ranks: int, save: int) -> str:
    """What all ranks write of one save; returns the draft of its manifest."""
    folder = CheckpointId(step=step, attempt=OWN).folder
    for rank in range(num_ranks):
        store.write(f"{folder}/{file_name(rank)}", b"x" * 108)
        facts = FileRecord(num_bytes=108, part_bytes=1 << 20, sha256=("0" * 64,))
        report = RankReport(save=save, file=file_name(rank), record=facts, pieces=(("a", "master", 100, 2 * rank, 2),))
        store.write(f"{folder}/{report_name(rank)}", report_to_json(report))
    draft = draft_manifest(
        CheckpointId(step=step, attempt=OWN),
        shapes={"a": (2 * num_ranks,)},
        position=position_at(step),
        num_updates=step,
        job=saved_job(digits_smoke()),
        record={},
    )
    return manifest_to_json(draft).decode()


def order_in(store: LocalStore, step: int = 4, *, num_ranks: int = 2, save: int = 1) -> CommitOrder:
    return CommitOrder(
        save=save,
        url=store.url,
        draft=put_save(store, step, num_ranks=num_ranks, save=save),
        attempt="",
        num_ranks=num_ranks,
        run_dir=store.url,
        retention=Retention(keep_newest=1),
    )


def test_the_manifest_holds_all_reports(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    put_attempts(store, 1)
    found = commit(store, order_in(store))
    manifest = manifest_from_json(store.read(f"{found.folder}/{MANIFEST_NAME}"))
    assert (found, sorted(manifest.files)) == (CheckpointId(step=4, attempt=OWN), [file_name(0), file_name(1)])
    (place,) = manifest.tensors["a"].slots["master"]
    assert (place.file, place.start, place.length, place.num_files) == (file_name(0), 0, 2, 2)


def test_an_overtaken_attempt_commits_nothing(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    put_attempts(store, 1)
    order = order_in(store)
    store.write(record_path("0052-bbbbbbbb"), b"")
    with pytest.raises(OvertakenError, match="0052-bbbbbbbb, took over the run"):
        commit(store, order)
    store.delete(record_path("0052-bbbbbbbb"))
    store.delete(record_path(OWN))
    with pytest.raises(OvertakenError, match="was deleted or moved"):
        commit(store, replace(order, num_ranks=3))  # although a report is missing, too
    assert [path for path in store.list() if path.endswith(MANIFEST_NAME)] == []


@pytest.mark.parametrize("change", [{"num_ranks": 3}, {"num_ranks": 1}, {"save": 2}])
def test_reports_that_do_not_fit_commit_nothing(tmp_path: Path, change: dict[str, int]) -> None:
    store = LocalStore(str(tmp_path))
    put_attempts(store, 1)
    with pytest.raises(StorageError):
        commit(store, replace(order_in(store), **change))  # type: ignore[arg-type]  # a table of one field each
    assert [path for path in store.list() if path.endswith(MANIFEST_NAME)] == []


def test_at_512_ranks_after_50_restarts_few_requests_follow_each_other(tmp_path: Path) -> None:
    """Rank 0 once asked 619 times in a row. Its own file and report (3 requests before the commit) are counted."""
    plain = LocalStore(str(tmp_path))
    attempt = put_attempts(plain, NUM_STARTS)
    old = commit(plain, order_in(plain, 4, num_ranks=NUM_RANKS))
    order = order_in(plain, 8, num_ranks=NUM_RANKS, save=2)
    store = CountedStore(str(tmp_path), seconds=0.25)
    newest = commit(store, order)
    names = store.requests.names
    assert (names.count("list"), names.count("exists"), names.count("write")) == (1, 1, 1)
    assert names.count("read") == NUM_RANKS, "one report a rank, and no attempt's record"
    assert store.requests.depth + 3 <= MOST_IN_A_ROW
    committed = store.requests.depth
    retire(store, attempt=attempt, newest=newest, retention=order.retention)
    assert names.count("list") == 2
    assert names.count("delete") == 2 * NUM_RANKS + 1
    assert store.requests.depth - committed <= 2 + NUM_STARTS // 128 + 1 + 2 * NUM_RANKS // 128 + 2
    assert [path for path in store.list() if path.startswith(old.folder)] == []


def fragment(name: str, start: int, values: list[float]) -> Fragment:
    tensor = torch.tensor(values)
    return Fragment(name=name, start=start, length=len(values), slots={"master": tensor, "exp_avg": -tensor})


def test_the_manifest_puts_the_ranks_pieces_in_order() -> None:
    reports = []
    for rank, part in enumerate([fragment("a", 2, [3.0, 4.0]), fragment("a", 0, [1.0, 2.0])]):
        laid_out = lay_out([part])
        facts = FileRecord(num_bytes=laid_out.head.num_bytes, part_bytes=1 << 20, sha256=("0" * 64,))
        reports.append(RankReport(save=1, file=f"rank-{rank}", record=facts, pieces=laid_out.pieces))
    draft = draft_manifest(
        CheckpointId(step=7, attempt="0001-a"),
        shapes={"a": (2, 2)},
        position=position_at(7),
        num_updates=6,
        job=saved_job(digits_smoke()),
        record={},
    )
    manifest = with_reports(draft_from_json(manifest_to_json(draft)), reports)
    places = manifest.tensors["a"].slots["master"]
    assert [(place.file, place.start, place.length) for place in places] == [("rank-1", 0, 2), ("rank-0", 2, 2)]
    assert (manifest.moments, manifest.num_updates, manifest.num_samples) == (("exp_avg",), 6, 7 * 16)

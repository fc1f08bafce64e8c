"""Which checkpoint a command takes that only reads a run, and RUN/best.json: with real files, without any run."""

from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline.checkpoints.attempts import Attempt, attempt_to_json, record_path
from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId
from pipeline.checkpoints.rank_file_in import RetiredError, open_checkpoint
from pipeline.checkpoints.stored import Best, CheckpointChoice, chosen, read_best, standing_in, write_best
from shards.errors import InvalidDataError
from shards.store import Store, open_store

BEST = Best(
    step=8,
    checkpoint="step-00000008/attempt-0001-aaaaaaaa",
    accuracy=0.75,
    loss=0.5,
    images=4,
    dataset="cd" * 32,
)
FIRST, SECOND = "0001-aaaaaaaa", "0002-bbbbbbbb"
ALL = [CheckpointId(step=step, attempt=FIRST) for step in (16, 12, 8, 4)]


def with_scores(accuracy: float, loss: float) -> Best:
    return Best(**{**asdict(BEST), "accuracy": accuracy, "loss": loss})


def test_it_is_read_back(tmp_path: Path) -> None:
    assert read_best(tmp_path) is None
    write_best(tmp_path, BEST)
    assert read_best(tmp_path) == BEST
    write_best(tmp_path, with_scores(1.0, 0.0))
    assert read_best(tmp_path) == with_scores(1.0, 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["best.json"]


@pytest.mark.parametrize(
    ("accuracy", "loss", "is_better"),
    [
        pytest.param(0.8, 9.0, True, id="accuracy comes first"),
        pytest.param(0.75, 0.4, True, id="a tie goes to the lower loss"),
        pytest.param(0.75, 0.5, False, id="the same again"),
        pytest.param(0.7, 0.1, False, id="worse"),
    ],
)
def test_the_better_of_two(accuracy: float, loss: float, is_better: bool) -> None:
    assert with_scores(accuracy, loss).is_better_than(BEST) == is_better


def test_what_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text('{"step": 8')
    with pytest.raises(InvalidDataError, match=r"best\.json cannot be read"):
        read_best(tmp_path)
    (tmp_path / "best.json").unlink()
    (tmp_path / "best.json").mkdir()
    with pytest.raises(InvalidDataError, match=r"best\.json cannot be read"):
        read_best(tmp_path)


def test_every_single_bit_counts(tmp_path: Path) -> None:
    """With another accuracy, a worse checkpoint could take its place."""
    write_best(tmp_path, BEST)
    data = (tmp_path / "best.json").read_bytes()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "best.json").write_bytes(changed)
        with pytest.raises(InvalidDataError, match=r"best\.json cannot be read"):
            read_best(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two attempts: the second continued from step 8 of the first, which went on to 12 meanwhile."""
    store = open_store(str(tmp_path / "checkpoints"))
    eighth = CheckpointId(step=8, attempt=FIRST)
    for attempt in (
        Attempt(token=FIRST, resumed_from=None, skipped=()),
        Attempt(token=SECOND, resumed_from=eighth, skipped=()),
    ):
        store.write(record_path(attempt.token), attempt_to_json(attempt))
    for step, token in ((4, FIRST), (8, FIRST), (12, FIRST), (12, SECOND)):
        store.write(f"{CheckpointId(step=step, attempt=token).folder}/{MANIFEST_NAME}", b"a manifest")
    return store


def test_only_standing_ones_count(store: Store) -> None:
    found = standing_in(store, recorded=None)
    assert [(each.step, each.attempt) for each in found] == [(12, SECOND), (8, FIRST), (4, FIRST)]


def test_what_the_ledger_names_counts_if_it_is_there(store: Store) -> None:
    gone = CheckpointId(step=16, attempt=SECOND)
    assert [each.step for each in standing_in(store, recorded=gone)] == [12, 8, 4]


def test_the_newest_come_first_and_a_step_is_that_step(tmp_path: Path) -> None:
    def steps(choice: CheckpointChoice) -> list[int]:
        return [each.step for each in chosen(choice, ALL, run_dir=tmp_path, url="there")]

    assert steps(CheckpointChoice()) == [16, 12, 8, 4]
    assert steps(CheckpointChoice(step=12)) == [12]
    write_best(tmp_path, BEST)
    assert steps(CheckpointChoice(is_best=True)) == [8]


def test_a_checkpoint_that_is_gone_is_told_from_a_damaged_one(store: Store) -> None:
    with pytest.raises(InvalidDataError, match="not a manifest"):
        open_checkpoint(store, CheckpointId(step=4, attempt=FIRST))
    with pytest.raises(RetiredError, match="step-00000099/attempt-0001-aaaaaaaa was deleted while it was read"):
        open_checkpoint(store, CheckpointId(step=99, attempt=FIRST))

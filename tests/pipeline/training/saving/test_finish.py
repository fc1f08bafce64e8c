"""The marker of a finished run, and weights out of a run that retires its checkpoints while they are read.

Whole runs are in test_run.py, whole commands in tests/jobs.
"""

import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.recipes.pretrain import digits_smoke
from jobs.record import read_record
from pipeline.checkpoints.manifest import CheckpointManifest
from pipeline.checkpoints.rank_file_in import RankFiles
from pipeline.checkpoints.stored import CheckpointChoice
from pipeline.models.weights.folder import open_weights
from pipeline.training.saving.finish import (
    Done,
    TakenRun,
    done_from_json,
    done_to_json,
    labels_of_data,
    read_done,
    take_weights,
)
from pipeline.training.saving.save import saved_job
from pipeline.training.settings.job import TrainingJob
from shards.errors import InvalidDataError, UserError
from shards.files.typed_json import sealed
from shards.store import LocalStore
from tests.rigs.positions import position_at
from tests.rigs.training import FinishedRuns

DONE = Done(
    step=8,
    checkpoint="step-00000008/attempt-0001-aa",
    weights_sha256=hashlib.sha256(b"weights").hexdigest(),
    position=position_at(8),
    job=saved_job(digits_smoke()),
)
OTHERS = {name: value for name, value in json.loads(done_to_json(DONE)).items() if name != "digest"}
NEWEST = CheckpointChoice()


def write_marker(run_dir: Path, text: str) -> None:
    (run_dir / "weights").mkdir()
    (run_dir / "weights" / "model.safetensors").write_bytes(b"weights")
    (run_dir / "DONE").write_text(text)


def test_a_marker_says_which_job_is_done(tmp_path: Path) -> None:
    write_marker(tmp_path, done_to_json(DONE))
    assert read_done(tmp_path) == DONE
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"others")
    assert read_done(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "null", '{"job": {}}', '{"position": 3}'),
        json.dumps(OTHERS),
        sealed(json.dumps(OTHERS | {"later": 1}).encode()).decode(),
        *(
            sealed(json.dumps({other: OTHERS[other] for other in OTHERS if other != name}).encode()).decode()
            for name in OTHERS
        ),
    ],
)
def test_what_is_no_marker_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of json, of pydantic, or our own
        done_from_json(text)


def test_every_bit_of_a_marker_counts(tmp_path: Path) -> None:
    """A marker that is damaged is none: the run verifies its checkpoint and finishes again."""
    data = done_to_json(DONE).encode()
    write_marker(tmp_path, "")
    for bit in range(0, 8 * len(data), 7):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "DONE").write_bytes(changed)
        assert read_done(tmp_path) is None, changed


@pytest.mark.parametrize("name", ["DONE", "weights/model.safetensors"])
def test_a_pipe_is_no_marker(tmp_path: Path, name: str) -> None:
    write_marker(tmp_path, done_to_json(DONE))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert read_done(tmp_path) is None


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"[" * 200_000, b"x" * (17 << 20), sealed(b'{"step": 8}'), done_to_json(DONE).encode()[:-40]],
    ids=["not UTF-8", "nested", "large", "too little", "half"],
)
def test_what_is_no_marker_is_ignored(tmp_path: Path, data: bytes) -> None:
    write_marker(tmp_path, "")
    (tmp_path / "DONE").write_bytes(data)
    assert read_done(tmp_path) is None


class _RetiringStore(LocalStore):
    """The run's own store, in which something happens just before a rank file's size is asked."""

    happens: Callable[[], object] = staticmethod(lambda: None)

    def size(self, path: str) -> int:
        if path.endswith(".safetensors"):
            type(self).happens()
        return super().size(path)


@pytest.fixture
def run_dir(finished_runs: FinishedRuns, tmp_path: Path) -> Path:
    """A copy of a run with checkpoints of steps 4, 8, 12 and 16."""
    shutil.copytree(finished_runs.get(2, "--engine.zero-stage", "1"), tmp_path / "run")
    return tmp_path / "run"


def source_of(run_dir: Path, happens: Callable[[], object]) -> TakenRun:
    job = read_record(run_dir / "job.yaml", stage="pretrain", kind=TrainingJob)
    kind = type("Store", (_RetiringStore,), {"happens": staticmethod(happens)})
    store = kind(str(run_dir / "checkpoints"))
    return TakenRun(run_dir=run_dir, job=job, store=store, labels_for=lambda _: tuple("abcdefghij"))


def retire(run_dir: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(run_dir / "checkpoints" / f"step-{step:08d}", ignore_errors=True)


@pytest.mark.slow
def test_a_retired_one_gives_way_to_the_newest_that_is_left(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    source = source_of(run_dir, lambda: retire(run_dir, 16, 12))
    found = take_weights(tmp_path / "out", source, choice=NEWEST, is_raw=False)
    assert found.step == 8
    assert [message.partition("/")[0] for message in caplog.messages] == ["checkpoint step-00000016"]
    assert "was deleted while it was read; taking a newer one" in caplog.messages[0]
    assert open_weights(str(tmp_path / "out")).labels == tuple("abcdefghij")


@pytest.mark.slow
def test_a_step_that_was_asked_for_has_no_stand_in(run_dir: Path, tmp_path: Path) -> None:
    source = source_of(run_dir, lambda: retire(run_dir, 12))
    with pytest.raises(UserError, match=r"step-00000012/.* was deleted while it was read: .*another --step"):
        take_weights(tmp_path / "out", source, choice=CheckpointChoice(step=12), is_raw=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_that_is_always_faster_ends_in_a_message(run_dir: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(run_dir / "checkpoints", whole)
    steps = itertools.cycle((12, 8, 4, 16))

    def replaced() -> None:
        """One goes as soon as it is read; another one comes."""
        retire(run_dir, 4, 8, 12, 16)
        step = f"step-{next(steps):08d}"
        shutil.copytree(whole / step, run_dir / "checkpoints" / step)

    retire(run_dir, 4, 8, 12)
    source = source_of(run_dir, replaced)
    with pytest.raises(UserError, match=r"deletes its checkpoints faster than they are read; raise"):
        take_weights(tmp_path / "out", source, choice=NEWEST, is_raw=False)


@pytest.mark.slow
def test_what_goes_after_it_was_verified_is_told_from_a_fault(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large checkpoint is verified first, and what does not fit into memory is read again."""
    monkeypatch.setattr(RankFiles, "_hold", lambda *_, **__: None)

    def labels_for(manifest: CheckpointManifest) -> tuple[str, ...]:
        retire(run_dir, manifest.id.step)
        return tuple("abcdefghij")

    source = replace(source_of(run_dir, lambda: None), labels_for=labels_for)
    with pytest.raises(UserError, match="was deleted while it was read"):
        take_weights(tmp_path / "out", source, choice=CheckpointChoice(step=16), is_raw=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_another_model_than_that_of_the_record_is_refused(run_dir: Path, tmp_path: Path) -> None:
    source = source_of(run_dir, lambda: None)
    other = replace(source.job, model=replace(source.job.model, depth=1))
    with pytest.raises(InvalidDataError, match="has other tensors than the model in the run's job"):
        take_weights(tmp_path / "out", replace(source, job=other), choice=CheckpointChoice(step=16), is_raw=False)


@pytest.mark.slow
def test_names_are_those_of_the_data_that_was_trained_on(run_dir: Path, tmp_path: Path, digits_url: str) -> None:
    source = source_of(run_dir, lambda: None)
    taken: list[CheckpointManifest] = []

    def labels_for(manifest: CheckpointManifest) -> tuple[str, ...]:
        taken.append(manifest)
        return labels_of_data(source.job, manifest)

    take_weights(tmp_path / "out", replace(source, labels_for=labels_for), choice=NEWEST, is_raw=False)
    assert open_weights(str(tmp_path / "out")).labels == open_weights(str(run_dir / "weights")).labels
    other = replace(taken[0], position=replace(taken[0].position, dataset="ab" * 32))
    with pytest.raises(UserError, match=rf"{digits_url} is not the dataset that the run was trained on.*--labels-file"):
        labels_of_data(source.job, other)

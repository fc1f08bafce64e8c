"""A job is checked against its data and its ranks before anything starts; whole runs are in test_run.py."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs.recipes.pretrain import digits_smoke
from pipeline.training.prepare import prepare
from pipeline.training.settings.job import EngineConfig, InitialConfig, TrainingJob
from shards.errors import UserError
from tests.rigs.processes import one_world


def job_of(url: str, run_dir: Path) -> TrainingJob:
    base = digits_smoke()
    return replace(
        base, run_dir=str(run_dir), data=replace(base.data, url=url), engine=EngineConfig(compile="off"), seed=3
    )


def test_what_a_job_leaves_open_is_filled_in_and_nothing_is_written(digits_url: str, run_dir: Path) -> None:
    job = job_of(digits_url, run_dir)
    prepared = prepare(job, replace(one_world(1, 2), num_threads=5))
    assert prepared.job == replace(job, model=replace(job.model, num_classes=10))
    assert prepared.plan.num_ranks == prepared.stream.share.num_ranks == 2
    assert prepared.stream.config.num_threads == 5
    start = prepared.stream.start
    assert (start.next_step, start.seed, start.image_size) == (0, 3, job.model.image_size)
    assert prepared.held_out == {}
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"run_dir": ""}, "--run-dir is missing", id="nowhere to write"),
        pytest.param({"data": replace(digits_smoke().data, url="")}, "--data.url is missing", id="no data"),
        pytest.param({"global_batch": 12}, "not a multiple of --data.lanes", id="a batch that lanes do not divide"),
        pytest.param({"initial": InitialConfig(weights="gone")}, "gone", id="weights that are not there"),
    ],
)
def test_what_does_not_fit_is_refused(digits_url: str, run_dir: Path, change: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepare(replace(job_of(digits_url, run_dir), **change), one_world())  # type: ignore[arg-type]


def test_a_run_that_is_kept_stopped_is_refused(digits_url: str, run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "STOP").touch()
    with pytest.raises(UserError, match="STOP exists and keeps the run stopped; delete it to continue"):
        prepare(job_of(digits_url, run_dir), one_world())

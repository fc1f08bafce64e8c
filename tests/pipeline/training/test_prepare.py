"""A job is checked against its data and its ranks before anything starts; whole runs are in test_run.py."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.data.pack import PackJob, run
from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId
from pipeline.training.prepare import prepare
from pipeline.training.settings.job import EngineConfig, InitialConfig, TrainingJob
from shards.config import HeldOutConfig
from shards.errors import UserError
from shards.sources.folders import FolderSource
from tests.rigs.images import image_bytes
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


def test_an_evaluation_of_the_training_images_is_a_warning(
    digits_url: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(digits_url, run_dir)
    part = replace(job.data, held_out=HeldOutConfig(share=0.1))
    cases = {
        "the same": (replace(job, evaluation=replace(job.evaluation, url=digits_url)), True),
        "beside a part of it": (replace(job, data=part), False),
        "none": (job, False),
    }
    for name, (changed, is_warned) in cases.items():
        caplog.clear()
        prepare(changed, one_world(0, 1))
        assert ("is what the run trains on, so its accuracy says nothing" in caplog.text) == is_warned, name


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


def test_more_ranks_than_lanes_are_refused_until_a_run_has_begun(
    digits_url: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(digits_url, run_dir)
    with pytest.raises(UserError, match=r"--data\.lanes is 8, fewer than the 16 ranks"):
        prepare(job, one_world(0, 16))
    assert not caplog.text
    checkpoint = run_dir / "checkpoints" / CheckpointId(step=1, attempt="1-0").folder
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST_NAME).touch()
    prepare(job, one_world(0, 16))
    assert "the run goes on, slower than it could: --data.lanes is 8, fewer than the 16 ranks" in caplog.text


def test_a_run_that_is_kept_stopped_is_refused(digits_url: str, run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "STOP").touch()
    with pytest.raises(UserError, match="STOP exists and keeps the run stopped; delete it to continue"):
        prepare(job_of(digits_url, run_dir), one_world())


def test_nearly_equal_classes_of_a_mix_are_said(
    tmp_path: Path, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls = []
    for number, names in enumerate((("a", "b"), ("A", "b"))):
        root = tmp_path / f"images{number}"
        for place, name in enumerate(names):
            (root / name).mkdir(parents=True)
            for seed in range(8):
                (root / name / f"{seed}.png").write_bytes(image_bytes(100 * place + seed + 50 * number))
        urls.append(str(tmp_path / f"packed{number}"))
        assert run(PackJob(out=urls[-1], source=FolderSource(root=str(root)), samples_per_block=1)) == 0
    job = job_of("", run_dir)
    mixed = replace(job.data, mix=((urls[0], 1.0), (urls[1], 1.0)), lanes=8, window_blocks=1)
    with caplog.at_level(logging.WARNING):
        prepared = prepare(replace(job, data=mixed, global_batch=8), one_world())
    assert prepared.job.model.num_classes == 3
    assert "the mixed classes 'a', 'A' differ only in case, spaces or similar characters; are they one?" in caplog.text

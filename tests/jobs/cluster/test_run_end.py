"""Runs that need no job, and what is believed of a DONE marker: `patchline submit` with Slurm's programs as scripts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.chains.done import refuse_stopped
from jobs.recipes.evaluate import RECIPES as EVALUATIONS
from jobs.recipes.pretrain import RECIPES
from shards.errors import UserError
from tests.jobs.cluster.test_slurm import programs
from tests.rigs.processes import patchline
from tests.rigs.training import FinishedRuns, pretrain_words


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Takes every job, and leaves a file then."""
    folder = tmp_path / "bin"
    folder.mkdir()
    settings = tmp_path / "cluster.yaml"
    settings.write_text("command: [patchline]\n")
    sbatch = f'case "$*" in *--test-only*) ;; *) touch "{tmp_path}/submitted";; esac; echo 12'
    return programs(folder, sbatch=sbatch, squeue="true", sinfo="true", scontrol="true")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ([], 0, "is done; nothing was submitted"),
        (["--steps=17"], 2, "steps: before 16, now 17"),
        (["--steps=17", "--extend"], 0, "job 12"),
        (["--steps=17", "--extend", "--schedule.warmup-steps=1"], 0, "job 12"),
        (["--extend"], 0, "is done; nothing was submitted"),
        (["--schedule.learning-rate=0.5"], 2, "schedule.learning_rate: before 0.001, now 0.5"),
        (["--seed=7"], 2, "seed: before 0, now 7"),
        (["--data.window-blocks=3"], 0, "job 12"),
        (["--data.num-threads=1"], 0, "is done; nothing was submitted"),
    ],
)
def test_a_run_that_is_done(
    finished_runs: FinishedRuns, tmp_path: Path, slurm: dict[str, str], more: list[str], code: int, said: str
) -> None:
    """More steps are submitted as ever; what cannot be told without the data is left to training."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished_runs.get(1), run_dir)
    words = ["submit", *pretrain_words(finished_runs.url, run_dir), f"--cluster={tmp_path}/cluster.yaml", *more]
    ended = patchline(*words, environ=slurm)
    assert (ended.code, said in ended.errors) == (code, True), ended.errors
    assert (tmp_path / "submitted").exists() == (said == "job 12")
    if not more:
        weights = run_dir / "weights" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
        assert "job 12" in patchline(*words, environ=slurm).errors, "DONE vouches for other weights"


def test_a_run_that_is_stopped(tmp_path: Path, slurm: dict[str, str]) -> None:
    run_dir = tmp_path / "my run"
    run_dir.mkdir()
    refuse_stopped(replace(RECIPES["digits_smoke"](), run_dir=str(run_dir)))
    (run_dir / "STOP").touch()
    words = ["pretrain", "digits_smoke", "--data.url=d", f"--run-dir={run_dir}", f"--cluster={tmp_path}/cluster.yaml"]
    ended = patchline("submit", *words, "--no-check", environ=slurm)
    assert (ended.code, f"to continue it, first: rm '{run_dir}/STOP'" in ended.errors) == (2, True), ended.errors
    assert not (tmp_path / "submitted").exists()
    assert not (run_dir / "submit").exists()


def test_other_stages_are_not_stopped(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()
    refuse_stopped(replace(EVALUATIONS["resize"](), run_dir=str(tmp_path)))
    with pytest.raises(UserError, match="STOP keeps the run stopped"):
        refuse_stopped(replace(RECIPES["digits_smoke"](), run_dir=str(tmp_path)))


@pytest.mark.slow
def test_only_a_marker_that_vouches_for_the_last_step_counts(digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert patchline("__done", str(run_dir)).code == 1
    assert patchline(*pretrain_words(digits_url, run_dir, "--steps", "6", "--engine.precision", "fp32")).code == 0
    assert patchline("__done", str(run_dir)).code == 0
    record, weights = run_dir / "job.yaml", run_dir / "weights" / "model.safetensors"
    text, data = record.read_text(), weights.read_bytes()
    record.write_text(text.replace("steps: 6\n", "steps: 7\n"))
    longer = patchline("__done", str(run_dir))
    assert (longer.code, "is of step 6, and the run has 7 steps" in longer.errors) == (1, True), longer.errors
    record.write_text(text)
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    changed = patchline("__done", str(run_dir))
    assert (changed.code, "does not vouch for the weights" in changed.errors) == (1, True), changed.errors
    assert patchline("__done").code == 2

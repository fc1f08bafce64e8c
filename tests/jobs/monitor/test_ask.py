"""`patchline stop` and `save`, of real runs."""

import shutil
from pathlib import Path

import pytest

from tests.jobs.reports.test_ls import make
from tests.rigs.kills import step_at_least, wait_until
from tests.rigs.processes import patchline
from tests.rigs.training import STEPS, pretrain_words, start


def test_a_running_run_saves_and_then_stops(digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--steps", "4000", "--checkpoint.every-steps", "0")
    ranks = start(words, num_ranks=2, log_dir=tmp_path)
    try:
        assert wait_until(ranks, step_at_least(2), run_dir)
        ended = patchline("save", str(run_dir))
        assert (ended.code, "it saves at its next step, and goes on" in ended.errors) == (0, True), ended.errors
        assert wait_until(ranks, lambda path: any((path / "checkpoints").glob("step-*/**/MANIFEST.json")), run_dir)
        assert wait_until(ranks, lambda path: not (path / "SAVE").exists(), run_dir)
        shutil.copytree(run_dir, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints"))
        for command in ("save", "stop"):
            ended = patchline(command, str(tmp_path / "copy"))
            assert (ended.code, f"is a copy of '{run_dir}'" in " ".join(ended.errors.split())) == (2, True), (
                ended.errors
            )
        ended = patchline("stop", str(run_dir))
        assert (ended.code, "at its next step it saves and stops" in " ".join(ended.errors.split())) == (0, True)
        assert ranks.wait() == 75
    finally:
        ranks.kill()
    ended = patchline("save", str(run_dir))
    assert (ended.code, "is stopped, and only a running one can save" in " ".join(ended.errors.split())) == (2, True)


def test_a_finished_run_is_not_stopped(digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ranks = start(pretrain_words(digits_url, run_dir), num_ranks=1, log_dir=tmp_path)
    assert (ranks.wait(), STEPS > 0) == (0, True)
    ended = patchline("stop", str(run_dir))
    assert (ended.code, "there is nothing to stop" in ended.errors) == (0, True)
    assert not (run_dir / "STOP").exists()


@pytest.mark.parametrize("command", ["stop", "save"])
def test_mistakes(tmp_path: Path, command: str) -> None:
    for words, message in (
        (["nowhere"], "'nowhere' is no run: it has no job.yaml"),
        (["a", "b"], f"usage: patchline {command} RUN"),
        (["--now"], f"usage: patchline {command} RUN"),
    ):
        ended = patchline(command, *words)
        assert (ended.code, message in " ".join(ended.errors.split())) == (2, True), ended.errors
    run_dir = make(tmp_path / "run", step=3)
    if command == "stop":
        (run_dir / "STOP").symlink_to(tmp_path / "elsewhere")
        ended = patchline(command, str(run_dir))
        assert (ended.code, "cannot write" in ended.errors) == (2, True)
        assert not (tmp_path / "elsewhere").exists()

"""`patchline stop`, `save` and `cancel`, with Slurm's programs as scripts; tests/slurm/test_chain.py has real ones."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import exit_codes
from jobs.monitor import ask
from jobs.reports.ls import is_unstarted
from jobs.reports.points import final_run_of
from jobs.submittable import output_name, run_name
from shards.errors import UserError
from shards.storage.retries import RetryConfig
from tests.jobs.cluster.test_slurm import programs
from tests.jobs.reports.test_ls import make
from tests.rigs.kills import step_at_least, wait_until
from tests.rigs.processes import patchline
from tests.rigs.training import STEPS, pretrain_words, start
from tests.shards.files.test_looks import failing


def test_a_running_run_saves_and_then_stops(digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--steps", "4000", "--checkpoint.every-steps", "0")
    ranks = start(words, num_ranks=2, log_dir=tmp_path)
    try:
        assert wait_until(ranks, step_at_least(2), run_dir)
        ended = patchline("save", str(run_dir))
        assert (ended.code, "it saves at its next step, and continues" in ended.errors) == (0, True), ended.errors
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


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ask, "_PAUSE_SECONDS", 0.01)
    found = tmp_path / "a run"
    (found / "submit").mkdir(parents=True)
    return found


def cluster(folder: Path, *lines: str) -> dict[str, str]:
    """A queue of these lines, of which scancel takes those that it is given."""
    (folder / "queue").write_text("".join(f"{line}\n" for line in lines))
    scancel = f'echo "$@" >>"{folder}/cancelled"; for job; do sed -i "/^$job /d" "{folder}/queue"; done'
    return programs(folder, squeue=f'cat "{folder}/queue"', scancel=scancel)


def test_only_the_jobs_of_the_run_are_cancelled(run_dir: Path, tmp_path: Path) -> None:
    name = run_name(str(run_dir))
    environ = cluster(
        tmp_path,
        f"12 RUNNING 0 9 {name}",
        "13 RUNNING 0 9 patchline-other",
        f"14_3 RUNNING 0 9 patchline-other@2,{name}@3,patchline-chain-1,tag",
        f"14_2 RUNNING 0 9 patchline-other@2,{name}@3,patchline-chain-1,tag",
        f"15 COMPLETING 0 9 {name}",
    )
    (tmp_path / "link").symlink_to(run_dir)
    assert ask.cancel([str(tmp_path / "link")], environ=environ) == exit_codes.DONE
    assert (tmp_path / "cancelled").read_text() == "12 14_3\n"
    assert (run_dir / "submit" / "cancelled").exists()


def test_a_job_that_does_not_end_is_named(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "_MOST_SECONDS", 0.05)
    environ = programs(tmp_path, squeue=f"echo '7 RUNNING 0 9 {run_name(str(run_dir))}'", scancel="true")
    with pytest.raises(UserError, match="7 does not end; see `scontrol show job 7`"):
        ask.cancel([str(run_dir)], environ=environ)


@pytest.mark.parametrize(
    ("name", "look", "found"),
    [
        ("", ask.refuse_no_run, None),
        ("submit", ask.is_begun, True),
        ("submit", is_unstarted, True),
        ("job.yaml", is_unstarted, True),
        ("submit", ask.why_unreadable, ""),
        ("job.yaml", lambda run_dir: final_run_of(str(run_dir)), None),
    ],
)
def test_a_look_that_fails_is_repeated(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, look: Callable[[Path], object], found: object
) -> None:
    quick = RetryConfig(backoff_seconds=0.001, most_backoff_seconds=0.001)
    monkeypatch.setattr("shards.storage.local.RETRIES", quick)
    failing(monkeypatch, run_dir / name, iter([errno.ESTALE, errno.EIO]))
    assert look(run_dir) == found


@pytest.mark.parametrize("scancel", ["echo 'Access/permission denied' >&2; exit 1", "exit 1"])
def test_a_cancel_that_fails_leaves_no_marker(run_dir: Path, tmp_path: Path, scancel: str) -> None:
    """Of which a gate would think that the chain is cancelled."""
    environ = programs(tmp_path, squeue=f"echo '7 RUNNING 0 9 {run_name(str(run_dir))}'", scancel=scancel)
    with pytest.raises(UserError, match="scancel failed"):
        ask.cancel([str(run_dir)], environ=environ)
    assert not (run_dir / "submit" / "cancelled").exists()
    (run_dir / "submit" / "cancelled").touch()  # by an earlier one, which did not fail
    with pytest.raises(UserError, match="scancel failed"):
        ask.cancel([str(run_dir)], environ=environ)
    assert (run_dir / "submit" / "cancelled").exists()


def test_what_a_job_is_to_write(run_dir: Path, tmp_path: Path) -> None:
    """The output of a stage without a run directory, which may be a URL, and not be there yet."""
    environ = cluster(tmp_path, f"7 PENDING 0 9 {output_name('s3://b/pk')}", f"8 RUNNING 0 9 {run_name(str(run_dir))}")
    assert ask.cancel(["s3://b/pk/"], environ=environ) == exit_codes.DONE
    assert (tmp_path / "cancelled").read_text() == "7\n"
    with pytest.raises(UserError, match=r"give its folder\. No job that waits or runs is to write it"):
        ask.cancel(["s3://b/pk"], environ=environ)

"""`patchline doctor` on this machine and of real runs: a table, JSON, and an exit code that says whether there is a
fault."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.cluster.test_slurm import SILENT, programs
from tests.jobs.monitor.test_status import submitted
from tests.jobs.reports.test_ls import heartbeat_is_there, make
from tests.rigs.kills import step_at_least, wait_until
from tests.rigs.processes import patchline
from tests.rigs.training import FinishedRuns, pretrain_words, start

NAMES = ["Python", "libraries", "DeepSpeed", "cores", "memory", "shared memory", "open files"]
PROBED = ["GPU", "driver", "bf16", "threads", "JPEG decoder", "disk"]
HELD = "JobId=7 JobName=a JobState=PENDING Reason=JobHeldUser Restarts=0 SubmitTime=1000 ExitCode=0:0 NodeList="


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("_no_gpu")
def test_a_machine_without_a_fault(tmp_path: Path, s3_bucket: str) -> None:
    words = ("--folder", str(tmp_path), "--s3-url", f"s3://{s3_bucket}/x", "--json")
    ended = patchline("doctor", *words)
    found = json.loads(ended.output)
    assert [one["name"] for one in found["checks"]] == [*NAMES, *PROBED, "S3"]
    assert all(one["status"] == "ok" or one["todo"] for one in found["checks"])
    assert (ended.code, found["counts"]["fault"]) == (0, 0), found
    assert sum(found["counts"].values()) == len(found["checks"])


def test_a_fault_is_exit_code_1_and_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no libcudart')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = patchline("doctor", "--folder", "/proc")
    assert ended.code == 1
    shown = " ".join(ended.output.split())
    assert "FAULT torch the check ended with exit code 1: ImportError: no libcudart > import torch by hand" in shown
    assert "FAULT disk /proc cannot be written to" in shown
    assert shown.endswith(("warning", "warnings"))
    assert "2 faults, " in shown or "3 faults, " in shown  # the decoder may need torch
    assert "Traceback" not in ended.output + ended.errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--s3-url", "data"), "--s3-url is 'data'; give s3://bucket/prefix"),
        (("--seconds", "0"), "--seconds is 0; allowed: 1 to 600"),
        (("--deep",), "unknown flag --deep of patchline doctor"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str) -> None:
    ended = patchline("doctor", *words)
    assert ended.code == 2
    assert message in " ".join(ended.errors.split())


def looked_at(run_dir: Path) -> tuple[int, Any]:
    ended = patchline("doctor", str(run_dir), "--json")
    assert ended.errors == ""
    return ended.code, json.loads(ended.output)


@pytest.mark.slow
def test_a_healthy_run(finished_runs: FinishedRuns, tmp_path: Path) -> None:
    shutil.copytree(finished_runs.get(2, "--engine.zero-stage", "1"), tmp_path / "run")
    ended = patchline("doctor", str(tmp_path / "run"))
    assert (ended.code, ended.output.splitlines()[1]) == (0, "nothing is wrong")


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_and_is_stopped(digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--steps", "4000", "--hang.step-seconds", "20")
    ranks = start(words, num_ranks=1, log_dir=tmp_path)
    try:
        assert wait_until(ranks, step_at_least(5), run_dir)
        assert wait_until(ranks, heartbeat_is_there, run_dir)
        code, found = looked_at(run_dir)
        assert (code, found["state"]) == (0, "running"), found
    finally:
        ranks.kill()
    code, found = looked_at(run_dir)
    assert (code, found["state"]) == (1, "failed")
    first = found["causes"][0]
    assert "its process is gone" in first["words"]
    assert "dmesg" in first["todo"]
    ranks = start(words, num_ranks=1, log_dir=tmp_path)
    try:
        assert wait_until(ranks, step_at_least(found["step"] + 3), run_dir)
        ranks.processes[0].send_signal(signal.SIGTERM)
        assert ranks.wait() == 75
    finally:
        ranks.kill()
    code, found = looked_at(run_dir)
    assert (code, found["state"]) == (0, "stopped"), found
    words_of = [cause["words"] for cause in found["causes"]]
    assert words_of[0] == "it was stopped by SIGTERM, with its work saved"
    assert any(one.startswith("earlier: killed or crashed") for one in words_of)


@pytest.mark.slow
def test_a_loss_that_is_not_finite(finished_runs: FinishedRuns) -> None:
    code, found = looked_at(finished_runs.diverged())
    assert code == 1
    assert "not finite" in found["causes"][0]["words"] or "non-finite" in found["causes"][0]["words"]


def test_the_screen_fits_and_nothing_in_it_acts(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run", step=5)
    (run_dir / "submit").mkdir()
    (run_dir / "submit" / "x-1.out").write_text("0: error: a\x1b[2J name\n")
    (run_dir / "STOP").touch()
    ended = patchline("doctor", str(run_dir))
    assert (ended.code, ended.errors, "\x1b" in ended.output) == (1, "", False)
    lines = ended.output.splitlines()
    assert lines[1].startswith("1. it was asked to stop, and stays stopped")
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("job", "code", "first", "line"),
    [
        (HELD, 1, "one: not started yet, no record yet", "1. job 7 is held by its user"),
        (HELD.replace("JobHeldUser", "Resources"), 0, "one: not started yet", "nothing is wrong"),
        (HELD.replace("PENDING", "FAILED").replace("0:0", "2:0"), 1, "one: never started", "1. no dataset in 'd'"),
        ("", 1, "one: never started, no record yet", "1. no dataset in 'd'"),
    ],
)
def test_a_run_whose_job_has_not_started(tmp_path: Path, job: str, code: int, first: str, line: str) -> None:
    """There is RUN/submit and nothing else; a job that was refused at its start has left a log, too."""
    run_dir = submitted(tmp_path / "one", 7)
    if "PENDING" not in job:
        (run_dir / "submit" / "x-7.out").write_text("0: error: no dataset in 'd'\n")
        (run_dir / "submit" / "exits-7-0-0").mkdir()
        (run_dir / "submit" / "exits-7-0-0" / "started").touch()
        (run_dir / "submit" / "exits-7-0-0" / "rank-0").write_text("2\n")
    ended = patchline("doctor", str(run_dir), environ=programs(tmp_path, scontrol=f"echo '{job}'", sinfo="true"))
    lines = ended.output.splitlines()
    assert (ended.code, ended.errors) == (code, ""), ended.output
    assert lines[0].startswith(first), ended.output
    assert lines[1].startswith(line), ended.output


def test_a_run_that_has_not_started_while_slurm_is_silent(tmp_path: Path) -> None:
    """A job of it may wait: nothing says that none does, or that it should be submitted again."""
    run_dir = submitted(tmp_path / "one", 7)
    said = patchline("doctor", str(run_dir), environ=programs(tmp_path, scontrol=SILENT)).output
    assert said.startswith(
        "one: not started yet, no record yet\n1. it has never started, and Slurm does not say whether"
    )
    assert "Slurm says nothing: scontrol does not answer" in said
    assert "submit it" not in said


def test_what_is_no_run(tmp_path: Path) -> None:
    ended = patchline("doctor", str(tmp_path))
    assert (ended.code, "no run in" in ended.errors) == (2, True)

"""Slurm's programs as scripts of the tests: what they are given, and what is made of their answers. tests/slurm has the
real ones."""

import os
import stat
from pathlib import Path

import pytest

from jobs.cluster import slurm
from jobs.cluster.slurm import need_sbatch, queued, queued_with, settled_with, slurms_answer, submitted
from shards.errors import UserError

UNKNOWN = "{ echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }"  # scontrol of a job it forgot
SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def programs(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment in which Slurm's programs are these lines of shell."""
    for name, text in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_jobs_inherit_no_secrets(tmp_path: Path) -> None:
    environ = programs(tmp_path, sbatch="env >seen; echo 12") | {
        "AWS_SECRET_ACCESS_KEY": "mine",
        "WANDB_API_KEY": "mine",
        "SSHPASS": "mine",
        "SLACK_WEBHOOK_URL": "https://hooks.example.org/mine",
        "UNKNOWN_TO_ALL": "mine",
        "WANDB_BASE_URL": "https://wandb.example.org/?sig=mine",
    }
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        more = {"PLAIN": "there", "NCCL_DEBUG": "INFO", "AWS_SHARED_CREDENTIALS_FILE": "/x"}
        assert submitted(["x"], environ | more, inherited=("PLAIN",)) == 12
    finally:
        os.chdir(before)
    seen = (tmp_path / "seen").read_text()
    assert {"PLAIN=there", "NCCL_DEBUG=INFO"} <= set(seen.splitlines())
    assert "AWS_SHARED_CREDENTIALS_FILE=/x" in seen, "a path is no secret"
    assert "mine" not in seen


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("invalid partition specified: gpuu", "`sinfo -s` lists the partitions"),
        ("invalid partition specified: cpuu", "or `cpu_partition:` of jobs without GPUs"),
        ("Invalid account or account/partition combination specified", "correct `account:` and `qos:`"),
        ("Requested time limit is invalid", "lower --time"),
        ("Requested node configuration is not available", "lower --nodes"),
        ("Requested node configuration is not available", "or --mem in `options:`"),
        ("Memory specification can not be satisfied", "lower --mem"),
        ("QOSMaxMemoryPerUser", "correct `account:` and `qos:`"),
        ("something new", "correct your cluster's settings, or the flags of submit"),
    ],
)
def test_a_refusal_says_what_to_do(tmp_path: Path, said: str, remedy: str) -> None:
    environ = programs(tmp_path, sbatch=f"echo 'sbatch: error: {said}' >&2; exit 1")
    with pytest.raises(UserError, match="Slurm would refuse this job: ") as caught:
        slurms_answer([], environ, text="#!/bin/sh\n")
    assert remedy in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "said", ["Unable to contact slurm controller (connect failure)", "Socket timed out on send/recv operation"]
)
def test_a_silent_controller_refuses_nothing(tmp_path: Path, said: str) -> None:
    environ = programs(tmp_path, sbatch=f"echo 'sbatch: error: Batch job submission failed: {said}' >&2; exit 1")
    with pytest.raises(UserError, match=r"^Slurm does not answer: Batch job submission failed: ") as caught:
        slurms_answer([], environ, text="#!/bin/sh\n")
    assert "once its controller answers" in str(caught.value)


def test_an_answer_is_one_line_without_control_characters(tmp_path: Path) -> None:
    environ = programs(tmp_path, sbatch=r"printf 'sbatch: Job 1 to start\n\033[2Jat noon\n' >&2")
    assert slurms_answer([], environ) == "Job 1 to start \\x1b[2Jat noon"


@pytest.mark.parametrize("answer", ["", "yes", "12a", "-3", "١٢"])
def test_what_is_no_number_of_a_job_is_refused(tmp_path: Path, answer: str) -> None:
    with pytest.raises(UserError, match="instead of a job's number"):
        submitted([], programs(tmp_path, sbatch=f"echo '{answer}'"))


def test_jobs_of_a_comment(tmp_path: Path) -> None:
    lines = (
        "12 RUNNING patchline-a\\n13_[1-3%2] PENDING patchline-b,patchline-a,tag\\n14 RUNNING (null)\\n"
        "15 RUNNING two words\\n16_5 RUNNING patchline-c@5,patchline-a@6,x\\n"
        "17_[0,4-6%1] PENDING patchline-c@3,patchline-a@6,x\\nnonsense\\n1 2 3 4\\nx RUNNING patchline-a\\n\\n"
    )
    environ = programs(
        tmp_path, squeue=f"echo $SLURM_BITSTR_LEN >'{tmp_path}/bits'; printf '{lines.replace('%', '%%')}'"
    )
    found = queued_with("patchline-a", environ)
    assert [(one.job, one.state) for one in found] == [
        ("12", "RUNNING"),
        ("13_[1-3%2]", "PENDING"),
        ("17_6", "PENDING"),
    ], "of the array of runs only the task of this one"
    assert [one.tag for one in found] == ["", "tag", "x"]
    assert (tmp_path / "bits").read_text() == "0\n", "squeue shortens long lists of tasks otherwise"
    assert queued_with("patchline", environ) == []


def test_jobs_that_are_ending_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_PAUSE_SECONDS", 0.01)
    squeue = (
        f'n=$(cat "{tmp_path}/n" 2>/dev/null || echo 0); echo $((n + 1)) >"{tmp_path}/n"; '
        '[ "$n" = 2 ] && exit 0; echo "7 COMPLETING patchline-a"'
    )
    assert settled_with("patchline-a", programs(tmp_path, squeue=squeue)) == []
    both = "echo '7 COMPLETING patchline-a'; echo '8 PENDING patchline-a'"
    assert [one.job for one in settled_with("patchline-a", programs(tmp_path, squeue=both))] == ["7", "8"]
    monkeypatch.setattr(slurm, "_ENDING_SECONDS", 0.05)
    with pytest.raises(UserError, match="job 7 is still ending; try again once"):
        settled_with("patchline-a", programs(tmp_path, squeue="echo '7 COMPLETING patchline-a'"))


def test_a_silent_or_missing_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = programs(tmp_path, squeue="echo 'slurm_load_jobs error' >&2; exit 1")
    with pytest.raises(UserError, match="squeue does not answer: slurm_load_jobs error; try again"):
        queued(environ)
    with pytest.raises(UserError, match=r"no sbatch on the PATH: run this on a login node"):
        need_sbatch({"PATH": str(tmp_path)})
    monkeypatch.setattr(slurm, "_ANSWER_SECONDS", 0.2)
    with pytest.raises(UserError, match=r"sbatch has not answered for 0\.2 s; try again when Slurm does"):
        submitted([], programs(tmp_path, sbatch="exec sleep 60"))


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"cannot run squeue_of_nobody: .*; it comes with Slurm"):
        slurm.ran(["squeue_of_nobody"], os.environ)

"""Slurm's programs, played by scripts: what they are given, and what is made of their answers, which were recorded on a
real Slurm 22.05 and shortened. tests/slurm has the real programs."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from jobs.cluster import recorded_jobs, slurm
from jobs.cluster.recorded_jobs import (
    RecordedJob,
    is_copied,
    numbers_of,
    recorded_in,
    started_in,
    submitted_in,
)
from jobs.cluster.settings import ClusterConfig
from jobs.cluster.slurm import (
    NodeFacts,
    in_one_line,
    job_facts,
    need_sbatch,
    nodes_in,
    parsed,
    queued,
    queued_with,
    settled_with,
    slurms_answer,
    submitted,
    tasks_of,
    with_variables,
)
from shards.errors import UserError
from shards.files.local_files import read_tail
from shards.storage.retries import RetryConfig

SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
UNKNOWN = "{ echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }"  # scontrol of a job it forgot
RUNNING = (
    "JobId=2 JobName=pretrain-x UserId=root(0) Priority=42 Account=(null) QOS=(null) JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=1 Restarts=3 BatchFlag=1 ExitCode=0:0 RunTime=00:00:12 TimeLimit=00:10:00 TimeMin=N/A "
    "SubmitTime=1000 StartTime=1795434043 EndTime=1795434643 AllocNode:Sid=localhost:1377 ReqNodeList=n9 "
    "NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=2,node=2,billing=2 "
    "NtasksPerN:B:S:C=0:0:*:* Command=/a b/x.sbatch WorkDir=/a b Comment=of JobState=FAILED "
    "StdOut=/runs/my run/submit/x-2.out Power=\n"
)
ARRAY = """\
JobId=1 ArrayJobId=1 ArrayTaskId=3-6%3 ArrayTaskThrottle=3 JobName=a JobState=PENDING Reason=Resources ExitCode=0:0
JobId=4 ArrayJobId=1 ArrayTaskId=2 JobName=a JobState=RUNNING Reason=None ExitCode=0:0 RunTime=00:00:10 NodeList=n2
JobId=3 ArrayJobId=1 ArrayTaskId=1 JobName=a JobState=FAILED Reason=NonZeroExitCode ExitCode=9:0 NodeList=n2
"""


def programs(folder: Path, **scripts: str) -> dict[str, str]:
    """Makes an environment in which Slurm's programs are these lines of shell."""
    for name, text in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_an_error_of_slurm_is_cut_between_words() -> None:
    said = in_one_line("error: Unable to contact\n" + "slurmctld-host-17 " * 40)
    assert said.startswith("error: Unable to contact slurmctld-host-17 ")
    assert (said.endswith(" slurmctld-host-17 ..."), len(said) <= 400) == (True, True)


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


@pytest.mark.parametrize("program", ["sbatch", "squeue", "sinfo", "scontrol", "scancel"])
def test_the_preferences_of_a_shell_are_not_given_to_slurms_programs(tmp_path: Path, program: str) -> None:
    environ = programs(tmp_path, **{program: "env"}) | {
        "SQUEUE_STATES": "COMPLETED",
        "SINFO_FORMAT": "%N",
        "SACCT_FORMAT": "jobid",
        "SCANCEL_STATE": "PENDING",
        "SCONTROL_ALL": "1",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_WAIT": "1",
        "SBATCH_ACCOUNT": "vision",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
    }
    seen = [line.partition("=")[0] for line in slurm.ran([program], environ).stdout.splitlines()]
    assert [name for name in seen if name in environ and name != "PATH"] == ["SBATCH_ACCOUNT", "SLURM_CONF"]


def test_a_shell_says_only_what_the_settings_leave_open(caplog: pytest.LogCaptureFixture) -> None:
    """sbatch would prefer SBATCH_PARTITION to the partition of the settings, even in a job for `cpu_partition`. With
    SLURM_CLUSTERS, squeue would look for the jobs elsewhere."""
    caplog.set_level("INFO")
    where = {"ACCOUNT": "vision", "PARTITION": "debug", "QOS": "high", "RESERVATION": "vit"}
    other = {"SBATCH_CLUSTERS": "b", "SBATCH_CONSTRAINT": "v100", "SLURM_CLUSTERS": "b"}
    shell = {f"SBATCH_{name}": value for name, value in where.items()} | other | {"PLAIN": "1"}
    for settings, used in (
        (ClusterConfig(), ["SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION"]),
        (ClusterConfig(cpu_partition="cpu", options=("--qos=low", "--reserv=own")), ["SBATCH_ACCOUNT"]),
        (ClusterConfig(partition="gpu", account="own", qos="low"), ["SBATCH_RESERVATION"]),
    ):
        environ = dict(shell)
        caplog.clear()
        found = with_variables(settings, environ)
        unused = sorted({*shell} - {*used, "PLAIN"})
        assert sorted(environ) == ["PLAIN", *used]
        assert f"not given to sbatch: {', '.join(unused)};" in caplog.text
        assert caplog.text.count(f"leave it open: {used[0]}={environ[used[0]]}") == 1
        assert (found.account, found.partition) == (
            environ.get("SBATCH_ACCOUNT", "own"),
            environ.get("SBATCH_PARTITION", settings.partition),
        )
        assert ("--reservation=vit" in found.options) == ("SBATCH_RESERVATION" in used)
    with pytest.raises(UserError, match="SBATCH_QOS of your shell cannot be used: qos is 'a b'; allowed: letters"):
        with_variables(ClusterConfig(), {"SBATCH_QOS": "a b"})


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
    with pytest.raises(UserError) as caught:
        slurms_answer([], environ, text="#!/bin/sh\n")
    assert remedy in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "said", ["Unable to contact slurm controller (connect failure)", "Socket timed out on send/recv operation"]
)
def test_a_silent_controller_refuses_nothing(tmp_path: Path, said: str) -> None:
    environ = programs(tmp_path, sbatch=f"echo 'sbatch: error: Batch job submission failed: {said}' >&2; exit 1")
    with pytest.raises(UserError) as caught:
        slurms_answer([], environ, text="#!/bin/sh\n")
    assert "once its controller answers" in str(caught.value)


def test_an_answer_is_one_line_without_control_characters(tmp_path: Path) -> None:
    environ = programs(tmp_path, sbatch=r"printf 'sbatch: Job 1 to start\n\033[2Jat noon\n' >&2")
    assert slurms_answer([], environ) == "Job 1 to start \\x1b[2Jat noon"


@pytest.mark.parametrize(
    ("sinfo", "is_refused"), [("printf 'n[1-2]\\nn4\\n'", False), ("true", True), ("exit 1", True)]
)
def test_a_job_that_would_wait_for_drained_nodes_is_not_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sinfo: str, is_refused: bool
) -> None:
    """`sbatch --test-only` says the same of nodes that are drained and of nodes that do not exist."""
    said = "allocation failure: Requested node configuration is not available"
    environ = programs(tmp_path, sbatch=f"echo 'sbatch: error: {said}' >&2; exit 1", sinfo=sinfo)
    if is_refused:
        with pytest.raises(UserError, match=r"Slurm would refuse this job.*lower --nodes"):
            slurms_answer([], environ)
    else:
        assert slurms_answer([], environ) == said
        assert "n[1-2], n4 are down or drained, and it may wait for them" in caplog.text


def test_jobs_of_a_comment(tmp_path: Path) -> None:
    lines = (
        "12 RUNNING 0 9 patchline-a\\n13_[1-3%2] PENDING 0 9 patchline-b,patchline-a,tag\\n14 RUNNING 0 9 (null)\\n"
        "15 RUNNING 0 9 two words\\n16_5 RUNNING 0 9 patchline-c@5,patchline-a@6,x\\n17_[0,4-6%1] PENDING 0 N/A "
        "patchline-c@3,patchline-a@6,x\\nnonsense\\n1 2 3 4 5\\nx RUNNING 0 9 patchline-a\\n\\n"
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


@pytest.mark.parametrize(
    ("recorded", "jobs"),
    [
        pytest.param(
            {"name": "patchline-b"}, ["12"], id="submitted through another path: the recorded name is its own"
        ),
        pytest.param({"name": "patchline-c"}, [], id="Slurm lost its state, and gave the number to another job"),
        pytest.param({}, [], id="only the number was recorded"),
        pytest.param({"user": 8, "submitted": 1000}, ["12"], id="by plain sbatch: the record of its first start"),
        pytest.param({"user": 9, "submitted": 1000}, [], id="of another user"),
        pytest.param({"name": "patchline-b", "user": 9}, [], id="of another user, in spite of the name"),
        pytest.param({"name": "patchline-b", "submitted": 1001}, [], id="submitted earlier"),
        pytest.param({"name": "patchline-b", "submitted": 999}, [], id="submitted later, and never requeued"),
        pytest.param({"job": "13", "name": "patchline-e", "submitted": 999}, ["13"], id="later: requeued meanwhile"),
        pytest.param({"job": "13", "user": 8, "submitted": 999}, [], id="later, without a name: any job is requeued"),
        pytest.param({"job": "14_2", "name": "life-1"}, ["14_2"], id="a task of a chain"),
        pytest.param({"job": "14_2", "name": "life-2"}, [], id="a task of another chain, or of an earlier one"),
    ],
)
def test_a_recorded_number_is_not_enough(tmp_path: Path, recorded: dict[str, Any], jobs: list[str]) -> None:
    lines = (
        "12 RUNNING 8 1000 patchline-b\\n13 PENDING 8 1000 patchline-e\\n"
        "14_[1-3] PENDING 8 1000 life-1,patchline-d@1,x\\n"
    )
    environ = programs(
        tmp_path,
        squeue=f"case $* in *--jobs*) printf '{lines}' ;; esac",
        scontrol="echo JobId=$4 JobState=PENDING Restarts=$(($4 - 12))",
    )
    found = queued_with("patchline-a", environ, recorded=[RecordedJob(**{"job": "12"} | recorded)])
    assert [one.job for one in found] == jobs


@pytest.mark.parametrize(
    ("comment", "recorded", "is_own"),
    [
        ("patchline-b", {"name": "patchline-b"}, True),
        ("patchline-b", {"name": "patchline-c"}, False),
        ("", {"name": "patchline-b"}, False),
        ("life-1,patchline-a@3,patchline-e,tag", {"name": "life-1"}, True),
        ("life-1,patchline-a@3,patchline-e,tag", {"name": "patchline-a"}, True),
        ("patchline-b", {}, False),
        ("a note of the user", {"user": 0, "submitted": 1000}, True),
        ("patchline-b", {"name": "patchline-b", "submitted": 999}, True),  # it was requeued three times
        ("gpu", {"user": 0, "submitted": 999}, False),  # so may any job be
        ("", {"user": 0, "submitted": 1001}, False),
        ("", {"user": 1, "submitted": 1000}, False),
    ],
)
def test_what_slurm_says_of_a_number_is_of_the_run(comment: str, recorded: dict[str, Any], is_own: bool) -> None:
    job = parsed(RUNNING.replace("Comment=of JobState=FAILED", f"Comment={comment} "))
    assert job
    assert (job.comment, job.is_recorded(RecordedJob(job="2", **recorded))) == (comment, is_own)


def test_jobs_that_are_ending_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_PAUSE_SECONDS", 0.01)
    squeue = (
        f'n=$(cat "{tmp_path}/n" 2>/dev/null || echo 0); echo $((n + 1)) >"{tmp_path}/n"; '
        '[ "$n" = 2 ] && exit 0; echo "7 COMPLETING 0 9 patchline-a"'
    )
    assert settled_with("patchline-a", programs(tmp_path, squeue=squeue)) == []
    both = "echo '7 COMPLETING 0 9 patchline-a'; echo '8 PENDING 0 9 patchline-a'"
    assert [one.job for one in settled_with("patchline-a", programs(tmp_path, squeue=both))] == ["7", "8"]
    monkeypatch.setattr(slurm, "_ENDING_SECONDS", 0.05)
    with pytest.raises(UserError, match="job 7 is still ending; try again once"):
        settled_with("patchline-a", programs(tmp_path, squeue="echo '7 COMPLETING 0 9 patchline-a'"))


def test_a_silent_or_missing_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = programs(tmp_path, squeue="echo 'slurm_load_jobs error' >&2; exit 1")
    with pytest.raises(UserError, match="squeue does not answer: slurm_load_jobs error; try again"):
        queued(environ)
    with pytest.raises(UserError, match=r"no sbatch on the PATH: run this on a login node"):
        need_sbatch({"PATH": str(tmp_path)})
    monkeypatch.setattr(slurm, "_ANSWER_SECONDS", 0.2)
    with pytest.raises(UserError, match=r"sbatch has not answered for 0\.2 s; try again when Slurm does"):
        submitted([], programs(tmp_path, sbatch="exec sleep 60"))


def test_a_running_job() -> None:
    job = parsed(RUNNING)
    assert job
    assert (job.job, job.state, job.reason, job.nodes, job.starts) == ("2", "RUNNING", "", "n[1-2]", 3)
    assert (job.run_time, job.time_limit, job.log) == ("00:00:12", "00:10:00", "/runs/my run/submit/x-2.out")
    assert not job.is_finished


def test_a_task_of_an_array_has_its_own_name() -> None:
    job = parsed("JobId=9 ArrayJobId=8 ArrayTaskId=1 JobName=a JobState=FAILED Reason=NonZeroExitCode ExitCode=9:0\n")
    assert job
    assert (job.job, job.is_finished, job.exit_code, job.reason) == ("8_1", True, "9:0", "NonZeroExitCode")


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified", "JobId= JobState=", "JobId=3"])
def test_what_is_no_job(text: str) -> None:
    assert parsed(text) is None


def test_the_numbers_on_record(tmp_path: Path) -> None:
    assert numbers_of(tmp_path) == []
    (tmp_path / "submit").mkdir()
    lines = [{"job": 3}, {"job": "4"}, {"job": -5}, {"job": True}, {"job": 1 << 40}, [6], {"job": 7}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "submit" / "submitted.jsonl").write_text(f'{text}{{"job": 8')
    (tmp_path / "submit" / "tries.jsonl").write_text('{"job": 3}\n{"job": 12}\n')
    assert numbers_of(tmp_path) == [12, 7, 3]
    for name in ("exits-20-0-1", "exits-20-1-0", "exits-x-0-0", "exits-5-0", "exits-99999999999-0-0"):
        (tmp_path / "submit" / name).mkdir()
    assert (numbers_of(tmp_path), started_in(tmp_path)) == ([20, 12, 7, 3], [20])
    for number, seconds in ((20, 1000), (5, 3000), (3, 500)):  # Slurm has counted from 1 again since job 20
        exits = tmp_path / "submit" / f"exits-{number}-9-0"
        exits.mkdir()
        (exits / "started").touch()
        os.utime(exits / "started", (seconds, seconds))
    lines = [{"job": 3, "unix_time": 400}, {"job": 6, "unix_time": 4000.5}, {"job": 8, "unix_time": "9999"}]
    with (tmp_path / "submit" / "submitted.jsonl").open("a") as file:
        file.write("".join(f"\n{json.dumps(line)}" for line in lines))
    assert (numbers_of(tmp_path), started_in(tmp_path)) == ([6, 5, 20, 3, 12, 8, 7], [5, 20, 3])


def test_jobs_of_a_folder_and_not_of_the_one_that_it_is_a_copy_of(tmp_path: Path) -> None:
    assert submitted_in(tmp_path) == []
    here = tmp_path.stat().st_ino
    lines: list[dict[str, object]] = [
        {"job": 3},
        {"job": 4, "folder": here},
        {"job": 5, "folder": here + 1},
        {"job": 6, "folder": here, "name": "patchline-a", "submitted": 8},
        {"job": 6, "folder": here, "name": "patchline-a", "submitted": 9, "user": True},
    ]
    lines += [{"job": "8", "folder": here}, {"folder": here}]
    (tmp_path / "submitted.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert submitted_in(tmp_path) == [RecordedJob(job="6", name="patchline-a", submitted=9), RecordedJob(job="4")]
    assert not is_copied(tmp_path)
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert (submitted_in(tmp_path / "copy"), is_copied(tmp_path / "copy")) == ([], True)
    assert list(recorded_in(tmp_path / "copy")) == ["3", "4", "5", "6"]


def failing_reads(monkeypatch: pytest.MonkeyPatch, faults: Iterator[int]) -> None:
    """The next reads of the records and their folder have these faults; 0: none. They are tried again for 0.05 s."""
    quick = RetryConfig(backoff_seconds=0.001, most_backoff_seconds=0.001, deadline_seconds=0.05)
    monkeypatch.setattr("shards.storage.local.RETRIES", quick)

    def faulty(path: Path, *, most_bytes: int) -> object:
        if fault := next(faults, 0):
            raise OSError(fault, os.strerror(fault), str(path))
        return read_tail(path, most_bytes=most_bytes)

    def faulty_list(path: Path) -> Iterator[Path]:
        if fault := next(faults, 0):
            raise OSError(fault, os.strerror(fault), str(path))
        return map(path.joinpath, os.listdir(path))  # noqa: PTH208 - iterdir is replaced

    monkeypatch.setattr(recorded_jobs, "read_tail", faulty)
    monkeypatch.setattr(Path, "iterdir", faulty_list)


@pytest.mark.parametrize("fault", [errno.EIO, errno.ESTALE])
def test_a_record_that_cannot_be_read_is_not_a_record_without_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    """`submit` would queue a second job over the same run, and `cancel` would find none."""
    folder = tmp_path / "submit"
    folder.mkdir()
    line = {"job": 6, "folder": folder.stat().st_ino, "name": "patchline-a"}
    (folder / "submitted.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "exits-20-0-0").mkdir()
    failing_reads(monkeypatch, iter([fault, fault]))
    assert submitted_in(folder) == [RecordedJob(job="6", name="patchline-a")]
    failing_reads(monkeypatch, iter([fault, fault]))
    assert (started_in(tmp_path), numbers_of(tmp_path)) == ([20], [20, 6])
    failing_reads(monkeypatch, repeat(fault))
    for ask in (submitted_in, recorded_in, is_copied, lambda _: started_in(tmp_path), lambda _: numbers_of(tmp_path)):
        with pytest.raises(UserError, match=r"submit.*' cannot be read \(.*\), so the run's jobs are not known; try"):
            ask(folder)


def test_a_record_of_a_colleague(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without access to it, a run is shown without its jobs, but no job is submitted."""
    failing_reads(monkeypatch, repeat(errno.EACCES))
    assert (recorded_in(tmp_path), numbers_of(tmp_path), is_copied(tmp_path)) == ({}, [], False)
    with pytest.raises(UserError, match=r"cannot be read \(Permission denied\).*; ask its owner for access"):
        submitted_in(tmp_path)


@pytest.mark.parametrize("scontrol", [UNKNOWN, "echo 'Job 12_9 not found'; exit 1"])
def test_a_job_that_slurm_has_forgotten(tmp_path: Path, scontrol: str) -> None:
    assert job_facts("12", programs(tmp_path, scontrol=scontrol)) is None


def test_the_tasks_of_an_array(tmp_path: Path) -> None:
    """Pending tasks have the number of the array. The last task to start keeps it."""
    (tmp_path / "array").write_text(ARRAY)
    environ = programs(tmp_path, scontrol=f"cat {tmp_path}/array")
    found = [(one.job, one.number, one.state) for one in tasks_of("1", environ)]
    assert found == [("1_[3-6]", "1", "PENDING"), ("1_2", "4", "RUNNING"), ("1_1", "3", "FAILED")]
    job = job_facts("4", environ)
    assert job
    assert job.job == "1_2"


def test_nodes(tmp_path: Path) -> None:
    lines = "n1|down*|Not responding\\nn2|drained|bad disk|x\\nn2|drained|bad disk|x\\nhalf\\n"
    found = nodes_in("n[1-2]", programs(tmp_path, sinfo=f"printf '{lines}'"))
    assert found == [
        NodeFacts(name="n1", state="down*", reason="Not responding"),
        NodeFacts(name="n2", state="drained", reason="bad disk|x"),
    ]
    assert nodes_in("", programs(tmp_path, sinfo="exit 1")) == []
    assert nodes_in("n1", programs(tmp_path, sinfo="exit 1")) == []

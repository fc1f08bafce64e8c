"""What Slurm 22.05 said of jobs, recorded on a real one, shortened."""

import json
import shutil
from pathlib import Path

import pytest

from jobs.cluster.queue import (
    NodeFacts,
    is_copied,
    job_facts,
    nodes_in,
    numbers_of,
    parsed,
    started_in,
    submitted_in,
    tasks_of,
)
from shards.errors import UserError
from tests.jobs.cluster.test_slurm import SILENT, UNKNOWN, programs

RUNNING = (
    "JobId=2 JobName=pretrain-x UserId=root(0) Priority=42 Account=(null) QOS=(null) JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=1 Restarts=3 BatchFlag=1 ExitCode=0:0 RunTime=00:00:12 TimeLimit=00:10:00 TimeMin=N/A "
    "StartTime=2026-11-23T11:40:43 EndTime=2026-11-23T11:50:43 AllocNode:Sid=localhost:1377 ReqNodeList=n9 "
    "NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=2,node=2,billing=2 "
    "NtasksPerN:B:S:C=0:0:*:* Command=/a b/x.sbatch WorkDir=/a b Comment=of JobState=FAILED "
    "StdOut=/runs/my run/submit/x-2.out Power=\n"
)


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


def test_jobs_of_a_folder_and_not_of_the_one_that_it_is_a_copy_of(tmp_path: Path) -> None:
    assert submitted_in(tmp_path) == []
    here = tmp_path.stat().st_ino
    lines: list[dict[str, object]] = [
        {"job": 3},
        {"job": 4, "folder": here},
        {"job": 5, "folder": here + 1},
        {"job": 6, "folder": here},
    ]
    lines += [{"job": "8", "folder": here}, {"folder": here}]
    (tmp_path / "submitted.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert submitted_in(tmp_path) == ["6", "4"]
    assert not is_copied(tmp_path)
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert (submitted_in(tmp_path / "copy"), is_copied(tmp_path / "copy")) == ([], True)


@pytest.mark.parametrize("scontrol", [UNKNOWN, "echo 'Job 12_9 not found'; exit 1"])
def test_a_job_that_slurm_has_forgotten(tmp_path: Path, scontrol: str) -> None:
    assert job_facts("12", programs(tmp_path, scontrol=scontrol)) is None


@pytest.mark.parametrize("scontrol", [SILENT, "echo 'slurm.conf: file not found' >&2; exit 1", "exit 1"])
def test_a_silent_slurm_is_not_taken_for_a_forgotten_job(tmp_path: Path, scontrol: str) -> None:
    with pytest.raises(UserError, match=r"scontrol does not answer: .*; try again when Slurm does"):
        tasks_of("12", programs(tmp_path, scontrol=scontrol))


ARRAY = """\
JobId=1 ArrayJobId=1 ArrayTaskId=3-6%3 ArrayTaskThrottle=3 JobName=a JobState=PENDING Reason=Resources ExitCode=0:0
JobId=4 ArrayJobId=1 ArrayTaskId=2 JobName=a JobState=RUNNING Reason=None ExitCode=0:0 RunTime=00:00:10 NodeList=n2
JobId=3 ArrayJobId=1 ArrayTaskId=1 JobName=a JobState=FAILED Reason=NonZeroExitCode ExitCode=9:0 NodeList=n2
"""


def test_the_tasks_of_an_array(tmp_path: Path) -> None:
    """The tasks that wait have the number of the array, until the last of them starts with it."""
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

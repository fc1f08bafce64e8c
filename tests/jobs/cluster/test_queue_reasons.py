"""Reasons in plain words, a few lines for an array of any size. The texts of Slurm were recorded on a real one."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from jobs.cluster.queue_reasons import finding_of, findings_of_nodes, findings_of_tasks, num_tasks
from jobs.cluster.slurm import JobFacts, NodeFacts
from shards.errors import Finding

JOB = JobFacts(
    job="12",
    number="12",
    name="pretrain-x",
    state="PENDING",
    reason="",
    nodes="",
    starts=0,
    run_time="00:00:00",
    time_limit="01:00:00",
    start_time="",
    dependency="",
    exit_code="0:0",
    log="",
)


@pytest.mark.parametrize(
    ("reason", "words", "todo"),
    [
        ("Resources", "waits for nodes to become free", ""),
        ("JobHeldUser", "is held by its user", "scontrol release 12"),
        ("launch_failed_requeued_held", "a node could not start it", "scontrol release 12"),
        ("job_requeued_in_held_state", "was requeued, and is held", "scontrol release 12"),
        ("ReqNodeNotAvail,_UnavailableNodes:n2", "down, drained or reserved", "sinfo -R"),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved", "down, drained or reserved", "sinfo -R"),
        ("PartitionTimeLimit", "more time than its partition allows", "scontrol update JobId=12 TimeLimit=LIMIT"),
        ("QOSMaxJobsPerUserLimit", "limit of its QOS or account (QOSMaxJobsPerUserLimit)", "scontrol show assoc_mgr"),
        ("AssocGrpGRESMinutes", "limit of its QOS or account", "ask for more"),
        ("SomethingNew", "waits: SomethingNew", ""),
        ("", "Slurm has not said yet why", ""),
    ],
)
def test_waiting(reason: str, words: str, todo: str) -> None:
    found = finding_of(replace(JOB, reason=reason))
    assert words in found.found
    assert todo in found.todo
    assert bool(found.todo) is bool(todo)


def test_what_it_waits_for() -> None:
    never = finding_of(replace(JOB, reason="DependencyNeverSatisfied", dependency="afterok:1(failed)"))
    expected = "will never start: it waited for the success of job 1, which failed"
    assert never == Finding(found=expected, todo="scancel 12, then submit again")
    after = replace(JOB, reason="Dependency", dependency="afterany:2(unfulfilled),afterany:3_*(unfulfilled)")
    assert finding_of(after).found == "waits for job 2 and job 3_*"
    chain = finding_of(replace(JOB, reason="Dependency", dependency="singleton(unfulfilled)"))
    assert chain.found == "waits for its earlier jobs of the same name"
    begins = finding_of(replace(JOB, reason="BeginTime", start_time="2026-11-23T11:45:43"))
    assert begins.found.startswith("may start again from 2026-11-23 11:45:43 on")


@pytest.mark.parametrize(
    ("state", "exit_code", "words"),
    [
        ("RUNNING", "0:0", "runs for 00:00:00 of 01:00:00 on n1"),
        ("TIMEOUT", "0:0", "was ended at its time limit"),
        ("NODE_FAIL", "0:0", "lost a node"),
        ("FAILED", "2:0", "was refused for a mistake"),
        ("FAILED", "74:0", "ended to be continued, by a fault outside the program"),
        ("FAILED", "78:0", "gave up"),
        ("FAILED", "9:0", "failed with exit code 9:0"),
        ("FAILED", "", "failed with exit code ?"),
        ("COMPLETED", "0:0", "completed"),
        ("RESIZING", "0:0", "is RESIZING"),
    ],
)
def test_other_states(state: str, exit_code: str, words: str) -> None:
    assert finding_of(replace(JOB, state=state, exit_code=exit_code, nodes="n1")).found.startswith(words)


@pytest.mark.parametrize(
    ("exit_code", "run_dir", "todo"),
    [
        ("78:0", "/runs/my run", "patchline doctor '/runs/my run'"),
        ("2:0", "/runs/$(x)", "patchline logs '/runs/$(x)' --lines 20"),
        ("9:0", "/runs/one", "patchline logs /runs/one --lines 20"),
        ("78:0", "", "the log's last lines say why"),
    ],
)
def test_a_command_about_the_run_can_be_pasted(exit_code: str, run_dir: str, todo: str) -> None:
    assert finding_of(replace(JOB, state="FAILED", exit_code=exit_code), run_dir=run_dir).todo == todo


@pytest.mark.parametrize(
    ("reason", "exit_code"), [("JobLaunchFailure", "0:53"), ("RaisedSignal:53", "0:53"), ("JobLaunchFailure", "1:0")]
)
def test_a_job_whose_log_the_node_could_not_open(reason: str, exit_code: str) -> None:
    """There is no log that the message could name."""
    job = replace(JOB, state="FAILED", reason=reason, exit_code=exit_code, log="/runs/my run/submit/x-12.out")
    found = finding_of(job, run_dir="/runs/my run")
    assert found.found.startswith("could not start: its node could not open its log /runs/my run/submit/x-12.out, or")
    assert "patchline preflight --cluster FILE --run-dir '/runs/my run'" in found.todo
    assert "--run-dir '/runs/my run/submit'" in finding_of(job).todo, "of a job without a run, the folder of its log"
    assert "log" not in found.todo


def test_nodes_that_are_not_well() -> None:
    states = ("allocated", "mixed", "idle", "down*", "draining", "allocated*", "planned")
    nodes = [NodeFacts(name=f"n{at}", state=state, reason="none") for at, state in enumerate(states)]
    found = findings_of_nodes([*nodes, NodeFacts(name="n9", state="drained", reason="Duplicate jobid")])
    assert [finding.found for finding in found] == [
        "node n3 is down, does not answer",
        "node n4 is draining",
        "node n5 is allocated, does not answer",
        "node n9 is drained: Duplicate jobid",
    ]
    assert found[3].todo == "once it is repaired: scontrol update NodeName=n9 State=resume"


def tasks(*kinds: tuple[str, str, int]) -> Sequence[JobFacts]:
    """Returns an array with this number of tasks for each state and reason. Pending tasks share one line of Slurm."""
    found = []
    for state, reason, count in kinds:
        names = [f"12_[0-{count - 1}]"] if reason == "Resources" else [f"12_{state[0]}{n}" for n in range(count)]
        exit_code = "9:0" if state == "FAILED" else "0:0"
        found += [replace(JOB, job=name, state=state, reason=reason, exit_code=exit_code, nodes="n1") for name in names]
    return found


def test_an_array() -> None:
    found = findings_of_tasks(
        tasks(
            ("PENDING", "Resources", 900),
            ("RUNNING", "", 6),
            ("COMPLETED", "", 3),
            ("FAILED", "NonZeroExitCode", 2),
            ("PENDING", "BeginTime", 1),
        )
    )
    assert [one.found.partition(" on")[0] for one in found] == [
        *(f"task 12_R{number}: runs for 00:00:00 of 01:00:00" for number in range(4)),
        "2 more tasks running",
        "900 tasks 12_[0-899]: waits for nodes to become free",
        "task 12_P0: may start again from a time that Slurm has not said",
        "2 tasks, such as 12_F0: failed with exit code 9:0",
        "3 tasks, such as 12_C0: completed",
    ]


def test_one_job_and_many_states() -> None:
    running = findings_of_tasks([replace(JOB, job=f"12_{number}", state="RUNNING") for number in (10, 9, 2)])
    assert [one.found[:10].strip(":") for one in running] == ["task 12_2", "task 12_9", "task 12_10"]
    assert findings_of_tasks([JOB])[0].found == "job 12: waits; Slurm has not said yet why"
    found = findings_of_tasks(tasks(*(("PENDING", f"Reason{number}", 2) for number in range(9))))
    assert [one.found for one in found][3:] == [
        "2 tasks, such as 12_P0: waits: Reason3",
        "10 more tasks in other states",
    ]
    held = findings_of_tasks(tasks(("PENDING", "JobHeldUser", 1), ("RUNNING", "", 1)))
    assert (held[0].found[:9], held[1].todo) == ("task 12_R", "scontrol release 12_P0")


@pytest.mark.parametrize(
    ("job", "count"), [("12", 1), ("12_3", 1), ("12_[0-3,7-9%2]", 7), ("12_[5]", 1), ("12_[1-x]", 1)]
)
def test_tasks_in_a_line_of_squeue(job: str, count: int) -> None:
    assert num_tasks(job) == count

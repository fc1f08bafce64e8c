"""Arrays of any size take a few lines."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from jobs.cluster.queue import JobFacts
from jobs.cluster.queue_reasons import findings_of_tasks, num_tasks
from tests.jobs.cluster.test_queue_reasons import JOB


def tasks(*kinds: tuple[str, str, int]) -> Sequence[JobFacts]:
    """So many tasks of each state and reason; those that wait without a reason of their own are one line of Slurm's."""
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
    assert [one.words.partition(" on")[0] for one in found] == [
        *(f"task 12_R{number}: runs for 00:00:00 of 01:00:00" for number in range(4)),
        "2 more tasks running",
        "900 tasks 12_[0-899]: waits for nodes to become free",
        "task 12_P0: may start again from a time that Slurm has not said",
        "2 tasks, such as 12_F0: failed with exit code 9:0",
        "3 tasks, such as 12_C0: completed",
    ]


def test_one_job_and_many_states() -> None:
    running = findings_of_tasks([replace(JOB, job=f"12_{number}", state="RUNNING") for number in (10, 9, 2)])
    assert [one.words[:10].strip(":") for one in running] == ["task 12_2", "task 12_9", "task 12_10"]
    assert findings_of_tasks([JOB])[0].words == "job 12: waits; Slurm has not said yet why"
    found = findings_of_tasks(tasks(*(("PENDING", f"Reason{number}", 2) for number in range(9))))
    assert [one.words for one in found][3:] == [
        "2 tasks, such as 12_P0: waits: Reason3",
        "10 more tasks in other states",
    ]
    held = findings_of_tasks(tasks(("PENDING", "JobHeldUser", 1), ("RUNNING", "", 1)))
    assert (held[0].words[:9], held[1].todo) == ("task 12_R", "scontrol release 12_P0")


@pytest.mark.parametrize(
    ("job", "count"), [("12", 1), ("12_3", 1), ("12_[0-3,7-9%2]", 7), ("12_[5]", 1), ("12_[1-x]", 1)]
)
def test_tasks_in_a_line_of_squeue(job: str, count: int) -> None:
    assert num_tasks(job) == count

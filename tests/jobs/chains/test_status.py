"""`patchline status` of chains, with Slurm's programs as scripts; tests/slurm/test_chain.py has real ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.chains.state import ChainJob, add_job, add_line, plan_json, state_folder
from jobs.chains.status import status_of_chain
from jobs.chains.steps import Unit
from tests.jobs.chains.test_state import PLAN
from tests.jobs.cluster.test_slurm import ARRAY, RUNNING, SILENT, UNKNOWN, programs
from tests.jobs.reports.test_ls import make
from tests.rigs.processes import patchline

UNITS = (
    Unit(name="pack.shards", step="pack", stage="pack", words=(("pack", "x"),), num_parts=8),
    Unit(name="train", step="train", stage="pretrain", words=(("pretrain", "r", "--run-dir=train"),)),
    Unit(name="report", step="report", stage="report", words=(("report", "train"),), after=("train",)),
)
JOB = ChainJob(unit="train", kind="job", round=0, tag="train.e1.r0", job=2)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Makes a chain whose packing is complete, whose training is running, and whose report waits."""
    folder = tmp_path / "a chain"
    state = state_folder(str(folder))
    state.mkdir(parents=True)
    (state / "plan.json").write_text(plan_json(replace(PLAN, units=UNITS, chdir=str(folder))))
    add_line(state, began=True, life="life-1")
    add_job(state, replace(JOB, unit="pack.shards", job=1))
    add_line(state, complete="pack.shards")
    add_job(state, JOB)
    add_job(state, replace(JOB, kind="gate", tag="gate.train.e1.r0", job=3))
    make(folder / "train", step=100)
    return folder


def slurm(chain: Path, *queue: str) -> dict[str, str]:
    """squeue has these lines of the chain, and scontrol knows job 2."""
    folder = chain.parent / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "2").write_text(RUNNING.replace("Comment=of JobState=FAILED", "Comment=life-1 "))
    words = [line.split() for line in queue]
    (folder / "queue").write_text(
        "".join(f"{job} {state} 0 9 life-1,-,{PLAN.name},{tag}\n" for job, state, tag in words)
    )
    return programs(
        folder, scontrol=f'cat "{folder}/$4" 2>&- || {UNKNOWN}', squeue=f'cat "{folder}/queue"', sinfo="true"
    )


def test_a_line_for_each_step_and_for_each_run(chain: Path) -> None:
    ended = patchline("status", str(chain), environ=slurm(chain, "2 RUNNING train.e1.r0", "3 PENDING gate.train.e1.r0"))
    assert (ended.code, ended.errors) == (0, "")
    lines = [line.strip() for line in ended.output.splitlines()]
    assert lines[:5] == [
        f"chain {chain}: 1 of 3 steps complete",
        "pack.shards  complete  (1 job, the last 1)",
        "train        running  (2 jobs, the last 3)",
        "job 2: runs for 00:00:12 of 00:10:00 on n[1-2]",
        "report       waits for its turn",
    ]
    assert lines[6].split()[:4] == ["train", "digits_smoke", "stopped", "100/300"]


def test_a_chain_that_gave_up_says_why_and_what_to_do(chain: Path) -> None:
    (state_folder(str(chain)) / "gave-up").write_text("train saved nothing \x1b[31mnew\n")
    ended = patchline("status", str(chain), environ=slurm(chain))
    first, todo, *_ = ended.output.splitlines()
    assert first.endswith("gave up, 1 of 3 steps complete: train saved nothing \\x1b[31mnew"), ended.output
    assert "> once it is fixed, submit the chain again" in todo


def test_a_branch_that_still_runs_when_another_gave_up_is_named(chain: Path) -> None:
    (state_folder(str(chain)) / "gave-up").write_text("report failed\n")
    environ = slurm(chain, "2 RUNNING train.e1.r0")
    said = [line.strip() for line in patchline("status", str(chain), environ=environ).output.splitlines()]
    assert said[1:3] == [
        "train still has jobs in Slurm, which run to their end",
        "> once it is fixed, submit the chain again: completed steps are kept",
    ]
    assert not status_of_chain(chain, environ).is_over
    assert "still has" not in patchline("status", str(chain), environ=slurm(chain)).output
    assert status_of_chain(chain, slurm(chain)).is_over


def test_a_chain_without_a_job_says_that_it_is_to_be_submitted_again(chain: Path) -> None:
    ended = patchline("status", str(chain), environ=slurm(chain))
    said = [line.strip() for line in ended.output.splitlines()]
    assert said[1:3] == [
        "no job of the chain is left, so it does not continue by itself",
        "> submit the chain again: completed steps are kept",
    ]
    found = json.loads(patchline("status", str(chain), "--json", environ=slurm(chain)).output.splitlines()[0])
    assert found["stalled"]
    (state_folder(str(chain)) / "done").touch()
    assert "no job" not in patchline("status", str(chain), environ=slurm(chain)).output


def test_commands_about_a_run_say_that_a_folder_is_a_chain(chain: Path) -> None:
    for command in ("stop", "save", "doctor"):
        ended = patchline(command, str(chain), environ=slurm(chain))
        said = " ".join(ended.errors.split())
        assert (ended.code, "is a chain: name one of its runs, as `patchline status" in said) == (2, True), said
        assert ("`patchline cancel " in said) == (command != "doctor"), said
    (state_folder(str(chain)) / "gave-up").write_text("train saved nothing new\n")
    ended = patchline("doctor", str(chain), environ=slurm(chain))
    assert "it gave up: train saved nothing new" in " ".join(ended.errors.split())


def test_json_counts_the_tasks_of_arrays(chain: Path) -> None:
    state = state_folder(str(chain))
    add_line(state, began=True, life="life-1")
    add_job(state, replace(JOB, unit="pack.shards", job=9))
    queue = ("9_0 RUNNING pack.shards.e2.r0.p0", "9_[1-4,6%2] PENDING pack.shards.e2.r0.p0")
    ended = patchline("status", str(chain), "--json", environ=slurm(chain, *queue))
    found, run = [json.loads(line) for line in ended.output.splitlines()]
    first = found["steps"][0]
    assert (first["state"], first["running"], first["queued"], first["jobs"]) == ("running", 1, 5, [9])
    assert (found["ending"], found["steps"][1]["state"], run["step"]) == (None, "waits for its turn", 100)


def test_the_tasks_of_an_array_that_run_and_those_that_wait(chain: Path) -> None:
    state = state_folder(str(chain))
    add_line(state, began=True, life="life-1")
    add_job(state, replace(JOB, unit="pack.shards", job=1))
    environ = slurm(chain, "1_2 RUNNING pack.shards.e2.r0.p0", "1_[3-6%3] PENDING pack.shards.e2.r0.p0")
    (chain.parent / "bin" / "1").write_text(ARRAY.replace("ExitCode", "Comment=life-1 ExitCode"))
    lines = [line.strip() for line in patchline("status", str(chain), environ=environ).output.splitlines()]
    assert lines[1:5] == [
        "pack.shards  running: 1 running, 4 in the queue  (1 job, the last 1)",
        "task 1_2: runs for 00:00:10 on n2",
        "4 tasks 1_[3-6]: waits for nodes to become free",
        "task 1_1: failed with exit code 9:0",
    ]


def test_a_slurm_that_does_not_answer_leaves_the_files(chain: Path) -> None:
    """The chain's runs do not ask Slurm again, which would take as long for each run."""
    asks = f"touch {chain.parent}/asked; exit 1"
    environ = programs(chain.parent, squeue="echo away >&2; exit 1", scontrol=asks, sinfo=asks)
    ended = patchline("status", str(chain), environ=environ)
    assert (ended.code, "squeue does not answer: away" in ended.errors) == (0, True)
    assert "train        submitted" in ended.output
    assert not (chain.parent / "asked").exists()
    status = status_of_chain(chain, environ)
    assert not replace(status, steps=status.steps[:1]).is_over, "a job of it may wait"
    assert replace(status, steps=status.steps[:1], complaint="").is_over


def test_a_slurm_that_falls_silent_between_two_questions(chain: Path) -> None:
    environ = slurm(chain, "2 RUNNING train.e1.r0") | programs(chain.parent / "bin", scontrol=SILENT)
    status = status_of_chain(chain, environ)
    assert status.complaint.startswith("scontrol does not answer")
    assert [step.state for step in status.steps] == ["complete", "running", "waits for its turn"]

"""The jobs of a chain for a run, found from the run's folder; test_advance.py has their batch scripts."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.chains.state import ChainJob, add_job, add_line, plan_json, state_folder
from jobs.chains.unit_jobs import ChainTask, chain_tasks, is_same_place
from jobs.chains.units import Unit
from tests.jobs.chains.test_state import PLAN
from tests.rigs.processes import patchline

UNITS = (
    Unit(name="train", step="train", stage="pretrain", words=(("pretrain", "r", "--run-dir=a chain/train"),)),
    Unit(
        name="tune",
        step="tune",
        stage="finetune",
        words=(("finetune", "r", "--run-dir=a chain/tune/0"), ("finetune", "r", "--run-dir=a chain/tune/1")),
    ),
    Unit(name="far", step="far", stage="pretrain", words=(("pretrain", "r", "--run-dir=far"),), links=2),
)
JOB = ChainJob(unit="train", kind="job", round=0, tag="train.e1.r0", job=5, tasks=(0,))


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    folder = tmp_path / "a chain"
    state = state_folder(str(folder))
    state.mkdir(parents=True)
    (state / "plan.json").write_text(plan_json(replace(PLAN, units=UNITS, chdir=str(tmp_path))))
    add_line(state, began=True)
    for job in (
        JOB,
        replace(JOB, round=1, job=9),
        replace(JOB, kind="gate", job=6),
        replace(JOB, unit="tune", job=12, tasks=(0, 1)),
        replace(JOB, unit="tune", round=1, job=20, tasks=(1,), offset=1),
        replace(JOB, unit="far", job=30),
    ):
        add_job(state, job)
    return folder


def test_the_jobs_of_a_run_newest_first(chain: Path) -> None:
    jobs = chain / "chain" / "jobs"
    assert chain_tasks(chain / "train") == [
        ChainTask(job="9", log=jobs / "train-9.out"),
        ChainTask(job="5", log=jobs / "train-5.out"),
    ]
    assert [task.job for task in chain_tasks(chain / "tune" / "0")] == ["12_0"]
    found = chain_tasks(chain / "tune" / "1")
    assert [(task.job, task.log.name) for task in found] == [("20_0", "tune-20_0.out"), ("12_1", "tune-12_1.out")]


def test_a_run_elsewhere_is_found_by_a_log_of_it(chain: Path) -> None:
    far = chain.parent / "far"
    assert chain_tasks(far) == []
    name = f"far-{PLAN.name[-8:]}-30.out"
    logs = [chain.parent / "x.out", chain / "chain" / "jobs" / name]
    assert chain_tasks(far, logs) == [ChainTask(job="30", log=logs[1])]


def test_a_link_to_the_run_and_damaged_files(chain: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(chain / "train")
    assert [task.job for task in chain_tasks(tmp_path / "mine")] == ["9", "5"]
    assert chain_tasks(chain / "nothing") == []
    (chain / "chain" / "plan.json").write_text("{")
    assert chain_tasks(chain / "train") == []


@pytest.mark.parametrize("command", ["stop", "save", "doctor", "logs"])
def test_a_command_for_a_run_says_that_the_folder_is_a_chain(chain: Path, command: str) -> None:
    ended = patchline(command, str(chain))
    said = " ".join(ended.errors.split())
    assert ended.code == 2, said
    assert f"is a chain: name one of its runs, as `patchline status {shlex.quote(str(chain))}` lists them" in said
    cancels = f"or cancel all of its jobs: `patchline cancel {shlex.quote(str(chain))}`" in said
    assert cancels is (command in ("stop", "save"))


def test_one_place_by_two_paths(tmp_path: Path) -> None:
    """Also before the folder of a run is there."""
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to("one")
    assert is_same_place(tmp_path / "link", tmp_path / "one")
    assert is_same_place(tmp_path / "link" / "a" / "b", tmp_path / "one" / "x" / ".." / "a" / "b")
    assert not is_same_place(tmp_path / "link" / "a", tmp_path / "one" / "b")
    assert not is_same_place(tmp_path / "a", tmp_path / "one" / "a")

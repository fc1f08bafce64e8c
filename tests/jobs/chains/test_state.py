"""The state of a chain: what is frozen comes back, a record cut off by a crash still counts, and a run's jobs are found
from its folder."""

import errno
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.chains.state import (
    RECORD,
    ChainJob,
    ChainPlan,
    ChainTask,
    add_job,
    add_line,
    chain_name,
    chain_tasks,
    ending,
    is_chain,
    is_same_place,
    plan_json,
    read_plan_of,
    read_record_of,
    state_folder,
)
from jobs.chains.status import status_of_chain
from jobs.chains.steps import Unit
from shards.errors import UserError
from shards.files.local_files import read_local_file
from shards.storage.retries import RetryConfig
from tests.rigs.processes import patchline

UNITS = (
    Unit(name="pack.scan", step="pack", stage="pack", words=(("pack", "a b", "--x='$(id)'"),), num_parts=4),
    Unit(name="train", step="train", stage="pretrain", words=(("pretrain", "r"),), after=("pack.scan",)),
)
PLAN = ChainPlan(name="patchline-chain-0", units=UNITS, rounds=3, chdir="/here", command=("patchline",))
UNITS_WITH_RUNS = (
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


def test_what_is_frozen_comes_back(tmp_path: Path) -> None:
    state = state_folder(str(tmp_path))
    state.mkdir()
    assert not is_chain(str(tmp_path))
    with pytest.raises(UserError, match="has no chain"):
        read_plan_of(state)
    (state / "plan.json").write_text(plan_json(PLAN))
    assert is_chain(str(tmp_path))
    assert read_plan_of(state) == PLAN
    (state / "plan.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        read_plan_of(state)


def test_the_record_counts_from_the_last_beginning(tmp_path: Path) -> None:
    state = state_folder(str(tmp_path))
    state.mkdir()
    (state / "plan.json").write_text(plan_json(PLAN))
    job = ChainJob(unit="pack.scan", kind="job", round=0, tag="t", job=7, tasks=(0, 3), marks=(0,))
    add_line(state, began=True)
    add_job(state, job)
    add_line(state, complete="pack.scan")
    with (state / RECORD).open("a") as file:
        file.write('"x"\n3\nnull\n{"unit": "train"}\n{"unit": "train", "ki\n')
    found = read_record_of(state)
    assert (found.jobs, found.complete) == ((job,), frozenset({"pack.scan"}))
    assert (found.jobs_of("pack.scan"), found.jobs_of("train"), found.gates_of("pack.scan")) == ([job], [], [])
    assert [step.state for step in status_of_chain(tmp_path, None).steps] == ["complete", "waits for its turn"]
    add_line(state, began=True)
    found = read_record_of(state)
    assert (found.epoch, found.jobs, found.complete) == (2, (), frozenset())
    assert ending(state) == ""
    (state / "gave-up").touch()
    (state / "cancelled").touch()
    assert ending(state) == "cancelled"


def test_one_folder_has_one_name_however_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a chain")
    names = {chain_name(str(tmp_path / path)) for path in ("a chain", "link", "x/../a chain", "a chain/")}
    assert len(names) == 1
    assert chain_name(str(tmp_path / "b")) not in names


def test_a_line_that_a_crash_tore_does_not_swallow_the_next(tmp_path: Path) -> None:
    state = state_folder(str(tmp_path))
    state.mkdir()
    add_line(state, began=True)
    with (state / RECORD).open("ab") as file:
        file.write(b'{"complete": "p\xff"}\n' + b"[" * 200_000 + b'\n{"complete": "pack')
    add_line(state, complete="train")
    assert read_record_of(state).complete == {"train"}


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    folder = tmp_path / "a chain"
    state = state_folder(str(folder))
    state.mkdir(parents=True)
    (state / "plan.json").write_text(plan_json(replace(PLAN, units=UNITS_WITH_RUNS, chdir=str(tmp_path))))
    add_line(state, began=True)
    for job in (
        JOB,
        replace(JOB, round=1, job=3),  # Slurm has counted from 1 again
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
        ChainTask(job="3", log=jobs / "train-3.out"),
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
    assert [task.job for task in chain_tasks(tmp_path / "mine")] == ["3", "5"]
    assert chain_tasks(chain / "nothing") == []
    (chain / "chain" / "plan.json").write_text("{")
    assert chain_tasks(chain / "train") == []


@pytest.mark.parametrize("name", ["plan.json", "record.jsonl"])
def test_a_chain_that_cannot_be_read_is_not_a_chain_without_jobs(
    chain: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`submit` would queue a second job over the same run."""
    quick = RetryConfig(backoff_seconds=0.001, most_backoff_seconds=0.001, deadline_seconds=0.05)
    monkeypatch.setattr("shards.storage.local.RETRIES", quick)

    def faulty(path: Path, *, most_bytes: int) -> bytes:
        if path.name == name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read_local_file(path, most_bytes=most_bytes)

    monkeypatch.setattr("jobs.chains.state.read_local_file", faulty)
    with pytest.raises(UserError, match=r"chain' cannot be read \(Stale file handle\), so its jobs are not known; try"):
        chain_tasks(chain / "train")


@pytest.mark.parametrize("command", ["stop", "save", "doctor", "logs"])
def test_a_command_for_a_run_says_that_the_folder_is_a_chain(chain: Path, command: str) -> None:
    ended = patchline(command, str(chain))
    said = " ".join(ended.errors.split())
    assert ended.code == 2, said
    assert f"is a chain: name one of its runs, as `patchline status {shlex.quote(str(chain))}` lists them" in said
    cancels = f"or cancel all of its jobs: `patchline cancel {shlex.quote(str(chain))}`" in said
    assert cancels is (command in ("stop", "save"))


def test_one_place_by_two_paths(tmp_path: Path) -> None:
    """This is so even before the folder of the run exists."""
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to("one")
    assert is_same_place(tmp_path / "link", tmp_path / "one")
    assert is_same_place(tmp_path / "link" / "a" / "b", tmp_path / "one" / "x" / ".." / "a" / "b")
    assert not is_same_place(tmp_path / "link" / "a", tmp_path / "one" / "b")
    assert not is_same_place(tmp_path / "a", tmp_path / "one" / "a")

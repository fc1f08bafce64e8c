"""A chain's state: what is frozen comes back, and a record that a crash tore still counts."""

from pathlib import Path

import pytest

from jobs.chains.state import (
    RECORD,
    ChainJob,
    ChainPlan,
    add_job,
    add_line,
    chain_name,
    ending,
    is_chain,
    plan_json,
    read_plan_of,
    read_record_of,
    state_folder,
)
from jobs.chains.status import status_of_chain
from jobs.chains.units import Unit
from shards.errors import UserError

UNITS = (
    Unit(name="pack.scan", step="pack", stage="pack", words=(("pack", "a b", "--x='$(id)'"),), num_parts=4),
    Unit(name="train", step="train", stage="pretrain", words=(("pretrain", "r"),), after=("pack.scan",)),
)
PLAN = ChainPlan(name="patchline-chain-0", units=UNITS, rounds=3, chdir="/here", command=("patchline",))


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
    with (state / RECORD).open("a") as file:
        file.write('{"complete": "pack')
    add_line(state, complete="train")
    assert read_record_of(state).complete == {"train"}

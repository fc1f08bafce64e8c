"""The jobs that a chain submitted for a run, and where their logs are, found from the run's folder alone.

The jobs of a chain leave nothing in a run's folder before they start: they are on record in FOLDER/chain.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jobs.chains.file import STATE
from jobs.chains.state import ChainJob, is_chain, read_plan_of, read_record_of, state_folder
from jobs.chains.units import Unit
from shards.errors import UserError

_KIND = "job"
_LEVELS = 2  # a chain's run is by default in FOLDER/STEP or FOLDER/STEP/NUMBER


@dataclass(frozen=True, kw_only=True)
class ChainTask:
    """A job of a chain for one run. `job`: as Slurm names it, `12` or `12_3` of an array. `log`: its log once it has
    started."""

    job: str
    log: Path


def chain_tasks(run_dir: Path, logs: Iterable[Path] = ()) -> list[ChainTask]:
    """Those since the chain's last beginning, newest first; empty if no chain started the run, or if its files cannot
    be read. `logs`: logs of the run that are known, which lead to a chain elsewhere."""
    place = os.path.realpath(run_dir)
    for folder in _folders(Path(place), logs):
        with suppress(OSError, UserError, ValueError):  # a damaged file of a chain tells nothing of the run
            if is_chain(str(folder)) and (found := list(_tasks(folder, place))):
                return sorted(found, key=lambda task: int(task.job.partition("_")[0]), reverse=True)
    return []


def _folders(place: Path, logs: Iterable[Path]) -> dict[Path, None]:
    of_logs = [log.parents[2] for log in logs if log.parts[-3:-1] == (STATE, "jobs")]
    return dict.fromkeys((*place.parents[:_LEVELS], *of_logs))


def _tasks(folder: Path, place: str) -> Iterator[ChainTask]:
    state = state_folder(str(folder))
    plan, record = read_plan_of(state), read_record_of(state)
    for unit in plan.units:
        for number, run_dir in enumerate(unit.run_dirs()):
            if run_dir and os.path.realpath(Path(plan.chdir) / run_dir) == place:
                yield from _of_unit(unit, number, record.jobs, plan.name, state)


def _of_unit(unit: Unit, number: int, jobs: Sequence[ChainJob], chain_name: str, state: Path) -> Iterator[ChainTask]:
    """The jobs of a unit, by the names that jobs/chains/unit_jobs.py gives them."""
    name = f"{unit.name}-{chain_name[-8:]}" if unit.links > 1 else unit.name
    for job in jobs:
        is_of = unit.num_tasks == 1 or number in job.tasks
        if job.unit == unit.name and job.kind == _KIND and job.job > 0 and is_of:
            shown = f"{job.job}_{number - job.offset}" if unit.num_tasks > 1 else f"{job.job}"
            yield ChainTask(job=shown, log=state / "jobs" / f"{name}-{shown}.out")

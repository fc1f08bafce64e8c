"""The jobs of a unit of a chain, and of its gate: as requests for batch scripts, which are pure, and found again with
their logs from the folder of a run alone.

The jobs of a chain leave nothing in a run's folder before they start: they are on record in FOLDER/chain.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from jobs.chains.file import STATE
from jobs.chains.state import GATE, ChainPlan, Record, is_chain, read_plan_of, read_record_of, state_folder
from jobs.chains.units import Unit
from jobs.cluster.batch_script import Piece, Request, pieces_of
from jobs.submittable import SUBMITTED
from shards.errors import UserError

_MOST_RUNS = 24  # of one array: their names are in its comment, of which Slurm takes 1,023 letters
_LEVELS = 2  # a chain's run is by default in FOLDER/STEP or FOLDER/STEP/NUMBER


@dataclass(frozen=True, kw_only=True)
class ChainTask:
    """A job of a chain for one run. `job`: as Slurm names it, `12` or `12_3` of an array. `log`: its log once it has
    started."""

    job: str
    log: Path


def gate_request(unit: Unit, plan: ChainPlan, *, state: Path, tag: str, after: Sequence[int]) -> Request:
    """The job that looks at the unit once all these jobs have ended, however they end."""
    return Request(
        words=("__gate", str(state.parent), unit.name),
        name=f"{GATE}-{unit.name}",
        comment=f"-,{plan.name},{tag}",
        nodes=1,
        time_limit=str(plan.gate_minutes),
        folder=state / "jobs",
        chdir=Path(plan.chdir),
        has_ranks=False,
        cpus=1,
        dependency="afterany:" + ":".join(map(str, after)) if after else "",
        state=str(state / "jobs" / tag),
    )


def requests_of(
    unit: Unit, tasks: Sequence[int], plan: ChainPlan, *, state: Path, tag: str, most: int
) -> list[tuple[Request, Piece]]:
    """The jobs of these tasks of a unit: one, several that continue each other, or an array in pieces. `most`: tasks
    that Slurm allows in one array."""
    pieces = pieces_of(tasks, most=min(most, _MOST_RUNS) if any(unit.names) else most, at_once=unit.at_once)
    if unit.num_tasks == 1:
        pieces = [replace(pieces[0], array="")] * unit.links
    return [
        (_request(unit, piece, plan, state=state, tag=f"{tag}.p{number}"), piece) for number, piece in enumerate(pieces)
    ]


def _request(unit: Unit, piece: Piece, plan: ChainPlan, *, state: Path, tag: str) -> Request:
    return Request(
        words=unit.words[0],
        name=_job_name(unit, plan),
        comment=",".join([*_runs_in(unit, piece), plan.name, tag]),
        nodes=unit.nodes,
        time_limit=unit.time,
        folder=state / "jobs",
        chdir=Path(plan.chdir),
        has_ranks=SUBMITTED[unit.stage].has_ranks,
        cpus=unit.cpus,
        dependency="singleton" if unit.links > 1 else "",
        array=piece.array,
        tail=tuple(_tail(unit, piece)),
        state=str(state / "jobs" / tag.rpartition(".")[0]),
    )


def _job_name(unit: Unit, plan: ChainPlan) -> str:
    """The name of a unit's jobs. Links wait for each other by it, so that no other chain's may be the same."""
    return f"{unit.name}-{plan.name[-8:]}" if unit.links > 1 else unit.name


def _runs_in(unit: Unit, piece: Piece) -> list[str]:
    """The names of the runs in a job, each with its task in an array."""
    if not any(unit.names):
        return ["-"]
    return [f"{unit.names[task]}@{task - piece.offset}" if piece.array else unit.names[task] for task in piece.tasks]


def _tail(unit: Unit, piece: Piece) -> list[str]:
    """Lines of shell that make the words those of the array's task."""
    if not piece.array:
        return []
    lines = [f"patchline_task=$(({piece.offset} + SLURM_ARRAY_TASK_ID))"]
    if unit.num_parts > 1:
        return [*lines, f'set -- "$@" "--part=$patchline_task/{unit.num_parts}"']
    cases = [f"    {task}) set -- {shlex.join(unit.words[task])} ;;" for task in piece.tasks]
    return [*lines, "case $patchline_task in", *cases, "    *) exit 2 ;;", "esac"]


def chain_tasks(run_dir: Path, logs: Iterable[Path] = ()) -> list[ChainTask]:
    """Returns the jobs that a chain has submitted for a run since its last beginning, newest first; none if no chain
    started the run, or if its files cannot be read. `logs`: known logs of the run, which lead to a chain elsewhere."""
    place = Path(os.path.realpath(run_dir))
    of_logs = [log.parents[2] for log in logs if log.parts[-3:-1] == (STATE, "jobs")]
    for folder in dict.fromkeys((*place.parents[:_LEVELS], *of_logs)):
        with suppress(OSError, UserError, ValueError):  # a damaged file of a chain tells nothing of the run
            if is_chain(folder) and (found := list(_tasks(folder, place))):
                return sorted(found, key=lambda task: int(task.job.partition("_")[0]), reverse=True)
    return []


def _tasks(folder: Path, place: Path) -> Iterator[ChainTask]:
    state = state_folder(folder)
    plan, record = read_plan_of(state), read_record_of(state)
    for unit in plan.units:
        for number, run_dir in enumerate(unit.run_dirs()):
            if run_dir and is_same_place(Path(plan.chdir) / run_dir, place):
                for job in _jobs_of_task(unit, number, record):
                    yield ChainTask(job=job, log=state / "jobs" / f"{_job_name(unit, plan)}-{job}.out")


def is_same_place(one: Path, other: Path) -> bool:
    """Whether two paths are of one folder, which need not be there yet: through links, or two mounts of it."""
    one, other = (Path(os.path.realpath(each)) for each in (one, other))
    while one != other:
        with suppress(OSError):
            return one.samefile(other)
        if one.name != other.name:
            return False
        one, other = one.parent, other.parent
    return True


def _jobs_of_task(unit: Unit, number: int, record: Record) -> list[str]:
    """The jobs of one task of a unit, as Slurm names them."""
    jobs = [job for job in record.jobs_of(unit.name) if job.job > 0]
    if unit.num_tasks == 1:
        return [str(job.job) for job in jobs]
    return [f"{job.job}_{number - job.offset}" for job in jobs if number in job.tasks]

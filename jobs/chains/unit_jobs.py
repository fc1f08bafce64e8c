"""The jobs of a unit of a chain, and of its gate, as requests for batch scripts. Pure."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jobs.chains.state import GATE, ChainPlan
from jobs.chains.units import Unit
from jobs.cluster.batch_script import Piece, Request, pieces_of
from jobs.cluster.settings import ClusterConfig
from jobs.submittable import SUBMITTED

_GATE_MARGIN = 30
_MOST_RUNS = 24  # of one array: their names are in its comment, of which Slurm takes 1,023 letters


def gate_cluster(cluster: ClusterConfig) -> ClusterConfig:
    """The settings of gates: a short margin before their short time limit."""
    return replace(cluster, margin_seconds=_GATE_MARGIN)


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
        name=f"{unit.name}-{plan.name[-8:]}" if unit.links > 1 else unit.name,
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

"""The jobs of a unit of a chain, and of its gate, as requests for batch scripts. Pure."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jobs.arrays import Piece, pieces_of
from jobs.batch_script import Request
from jobs.chain_state import GATE, chain_comment
from jobs.chain_units import Unit
from jobs.cluster import ClusterConfig
from jobs.submitted import SUBMITTED, comment_of, submit_folder

GATE_MINUTES = 30  # a gate waits at most 10 of them for Slurm
_GATE_MARGIN = 30


def gate_cluster(cluster: ClusterConfig) -> ClusterConfig:
    """The settings of gates: a short margin before their short time limit."""
    return replace(cluster, margin_seconds=_GATE_MARGIN)


def gate_request(unit: Unit, *, state: Path, chdir: Path, tag: str, after: Sequence[int]) -> Request:
    """The job that looks at the unit once all these jobs have ended, however they end."""
    return Request(
        words=("__gate", str(state.parent), unit.name),
        name=f"{GATE}-{unit.name}",
        comment=f"-,{chain_comment(state)},{tag}",
        nodes=1,
        time_limit=str(GATE_MINUTES),
        folder=state / "jobs",
        chdir=chdir,
        has_ranks=False,
        cpus=1,
        dependency="afterany:" + ":".join(map(str, after)) if after else "",
        state=str(state / "jobs" / tag),
    )


def requests_of(
    unit: Unit, tasks: Sequence[int], *, state: Path, chdir: Path, tag: str, most: int
) -> list[tuple[Request, Piece]]:
    """The jobs of these tasks of a unit: one, several that continue each other, or an array in pieces."""
    pieces = pieces_of(tasks, most=most, at_once=unit.at_once)
    if unit.num_tasks == 1:
        pieces = [replace(pieces[0], array="")] * unit.links
    return [
        (_request(unit, piece, state=state, chdir=chdir, tag=f"{tag}.p{number}"), piece)
        for number, piece in enumerate(pieces)
    ]


def _request(unit: Unit, piece: Piece, *, state: Path, chdir: Path, tag: str) -> Request:
    run_dir = unit.run_dirs()[0] if len(unit.words) == 1 else ""
    run = comment_of([str(submit_folder(str(chdir / run_dir), unit.stage))]) if run_dir else "-"
    return Request(
        words=unit.words[0],
        name=f"{unit.name}-{chain_comment(state)[-8:]}" if unit.links > 1 else unit.name,
        comment=f"{run},{chain_comment(state)},{tag}",
        nodes=unit.nodes,
        time_limit=unit.time,
        folder=state / "jobs",
        chdir=chdir,
        has_ranks=SUBMITTED[unit.stage].has_ranks,
        cpus=unit.cpus,
        dependency="singleton" if unit.links > 1 else "",
        array=piece.array,
        tail=tuple(_tail(unit, piece)),
        state=str(state / "jobs" / tag.rpartition(".")[0]),
    )


def _tail(unit: Unit, piece: Piece) -> list[str]:
    """Lines of shell that make the words those of the array's task."""
    if not piece.array:
        return []
    lines = [f"patchline_task=$(({piece.offset} + SLURM_ARRAY_TASK_ID))"]
    if unit.num_parts > 1:
        return [*lines, f'set -- "$@" "--part=$patchline_task/{unit.num_parts}"']
    cases = [f"    {task}) set -- {shlex.join(unit.words[task])} ;;" for task in piece.tasks]
    return [*lines, "case $patchline_task in", *cases, "    *) exit 2 ;;", "esac"]

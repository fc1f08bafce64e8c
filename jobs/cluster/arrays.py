"""A job array in pieces that Slurm accepts: MaxArraySize bounds the index, and `%` the tasks that run at once. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tasks `offset + index`. `array`: for `--array`; `waits_for`: the piece that must have ended before, or none."""

    offset: int
    array: str
    tasks: tuple[int, ...]
    waits_for: int | None


def pieces_of(tasks: Sequence[int], *, most: int, at_once: int = 0) -> list[Piece]:
    """The tasks, in order and without repeats, in pieces of `most` indexes (0 to most-1); at_once=0: all at once.

    The tasks that may run at once are shared by the pieces. If there are more pieces than that, the pieces form as many
    queues, in each of which one starts after the other.
    """
    groups: dict[int, list[int]] = {}
    for task in tasks:
        groups.setdefault(task // most, []).append(task)
    lanes = min(at_once, len(groups)) if at_once else len(groups)
    pieces = []
    for place, (number, group) in enumerate(sorted(groups.items())):
        offset = number * most
        share = at_once // lanes + (place % lanes < at_once % lanes) if at_once else 0
        limit = f"%{share}" if share else ""
        pieces.append(
            Piece(
                offset=offset,
                array=_ranges([task - offset for task in group]) + limit,
                tasks=tuple(group),
                waits_for=place - lanes if place >= lanes else None,
            )
        )
    return pieces


def tasks_in(job: str) -> list[range]:
    """The numbers of the tasks in a job as squeue shows it: of `12_3`, of `12_[0-3,7%2]`; none of `12`."""
    tasks = job.partition("_")[2].strip("[]").partition("%")[0]
    ends = [part.partition("-") for part in tasks.split(",")]
    known = [(first, last or first) for first, _, last in ends]
    return [range(int(first), int(last) + 1) for first, last in known if _is_number(first) and _is_number(last)]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as Slurm reads them: 0-3,7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)

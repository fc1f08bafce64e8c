"""The tasks of VTAB-1k with their scores: what is shown and written of them, and the means over groups. Pure."""

import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jobs.recipes.paper_vtab import GROUPS, TASKS, VtabTask
from jobs.train.trials import Score
from shards.output.terminal import printable_name


@dataclass(frozen=True, kw_only=True)
class Row:
    """A task, and its run; `lacks`: what is missing of its data."""

    task: VtabTask
    score: Score | None = None
    lacks: str = ""

    @property
    def accuracy(self) -> float | None:
        """None: not known yet, or never."""
        return self.score.accuracy if self.score else None


def facts_of(rows: Sequence[Row]) -> dict[str, Any]:
    """As in vtab.json."""
    return {
        "tasks": {
            row.task.name: {
                "accuracy": row.accuracy,
                "state": row.score.state if row.score else "missing",
                "command": shlex.join(["patchline", *row.score.trial.words]) if row.score else "",
            }
            for row in rows
        },
        **{name: mean_of(rows, tasks) for name, tasks in GROUPS.items()},
        "mean": mean_of(rows, TASKS),
    }


def table_of(rows: Sequence[Row]) -> str:
    """A line for each task, the mean of each whole group, and the mean of all 19, or how many are missing."""
    return lines_of(rows, words=words_of, summary=partial(_summary, rows))


def lines_of(rows: Sequence[Row], *, words: Callable[[Row], str], summary: Callable[[Sequence[VtabTask]], str]) -> str:
    """The table, with these words for each task, and for each group of them and all 19."""
    lines = []
    for name, tasks in GROUPS.items():
        own = [row for row in rows if row.task in tasks]
        lines += [f"{name if row is own[0] else '':<12}  {row.task.name:<20}  {words(row)}" for row in own]
        if own:
            lines.append(f"{'':<12}  {summary(tasks)}")
    lines.append(f"{'all':<12}  {summary(TASKS)}")
    return "".join(f"{line}\n" for line in lines)


def words_of(row: Row) -> str:
    """Its accuracy, or why it has none."""
    if row.accuracy is not None:
        return f"{row.accuracy:.4f}"
    return f"missing: {printable_name(row.lacks)}" if row.lacks else row.score.state if row.score else ""


def _summary(rows: Sequence[Row], tasks: Sequence[VtabTask]) -> str:
    mean, scored = mean_of(rows, tasks), sum(row.accuracy is not None for row in rows if row.task in tasks)
    if mean is None:
        return f"{scored} of {len(tasks)} tasks have a score: no mean"
    return f"{f'mean of {len(tasks)}':<20}  {mean:.4f}"


def mean_of(rows: Sequence[Row], tasks: Sequence[VtabTask]) -> float | None:
    """Over the tasks; None if one of them has no score."""
    found = [row.accuracy for row in rows if row.task in tasks and row.accuracy is not None]
    return statistics.fmean(found) if len(found) == len(tasks) else None

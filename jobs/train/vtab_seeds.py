"""The scores of `patchline vtab --seeds N`: the 19 tasks with each seed, one mean for each, and the mean and deviation
of these, as in the last row of the paper's Table 2. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jobs.recipes.paper_vtab import GROUPS, TASKS, VtabTask
from jobs.train.vtab_rows import Row, facts_of, lines_of, mean_of, words_of

Rows = Mapping[int, Sequence[Row]]


def facts_of_seeds(by_seed: Rows) -> dict[str, Any]:
    """As in vtab.json: of each group and of all tasks the mean over the seeds, which `deviations` has of a sample, and
    in `seeds` what vtab.json has of one."""
    spans: dict[str, Sequence[VtabTask]] = {**GROUPS, "mean": TASKS}
    found = {name: _spread(_means(by_seed, tasks)) for name, tasks in spans.items()}
    return {
        "seeds": [{"seed": seed, **facts_of(rows)} for seed, rows in by_seed.items()],
        **{name: mean for name, (mean, _) in found.items()},
        "deviations": {name: deviation for name, (_, deviation) in found.items()},
    }


def table_of_seeds(by_seed: Rows) -> str:
    """A line for each task, with the mean over the seeds, and one for each group and for all 19 tasks."""
    first = next(iter(by_seed.values()))
    return lines_of(first, words=partial(_task, by_seed), summary=partial(_summary, by_seed))


def _task(by_seed: Rows, first: Row) -> str:
    rows = [row for rows in by_seed.values() for row in rows if row.task is first.task]
    if first.lacks:
        return words_of(first)
    known = [row.accuracy for row in rows if row.accuracy is not None]
    if len(known) == len(rows):
        return _words(_spread(known))
    seed, row = next((seed, row) for seed, row in zip(by_seed, rows, strict=True) if row.accuracy is None)
    return f"{len(known)} of {len(rows)} seeds have a score: seed {seed} {words_of(row)}"


def _summary(by_seed: Rows, tasks: Sequence[VtabTask]) -> str:
    found, num_means = _means(by_seed, tasks), sum(mean is not None for mean in _means(by_seed, tasks))
    if num_means < len(found):
        return f"{num_means} of {len(found)} seeds have a score of all {len(tasks)} tasks: no mean"
    few = " (one seed: no deviation)" if len(found) == 1 else ""
    return f"{f'mean of {len(tasks)}':<20}  {_words(_spread(found))}{few}"


def _means(by_seed: Rows, tasks: Sequence[VtabTask]) -> list[float | None]:
    return [mean_of(rows, tasks) for rows in by_seed.values()]


def _spread(found: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean, and deviation of a sample; None if one is missing, and of one alone."""
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None, None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None


def _words(spread: tuple[float | None, float | None]) -> str:
    mean, deviation = spread
    return f"{mean:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")

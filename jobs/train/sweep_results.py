"""The runs of a sweep that count, their scores, and what is shown and written of them: a table, and sweep.json.

The repetitions in sweep.json count as long as they have its values: a sweep that is started again with other values or
fewer seeds leaves runs behind, in `seeds` and in `earlier`.
"""

import json
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.record import read_leaves
from jobs.submittable import Override
from jobs.train.sweep_plan import SweepPlan
from jobs.train.trials import TrialScore, score_of
from shards.errors import InvalidDataError
from shards.files.local_files import read_local_file
from shards.files.typed_json import parse_json
from shards.output.quantities import plural
from shards.output.terminal import printable_name

_LEAST_FOR_AN_EDGE = 3


def best_of(scores: Sequence[TrialScore]) -> TrialScore | None:
    """The highest score, the first of several; None if none has one."""
    scored = [one for one in scores if one.accuracy is not None]
    return max(scored, key=lambda one: one.accuracy or 0.0) if scored else None


def scores_of(plan: SweepPlan, override: Override) -> tuple[list[TrialScore], list[TrialScore]]:
    """The scores of the tries, and of the repetitions of the best one once there is one."""
    tries = [score_of(one, override) for one in plan.tries()]
    best = best_of(tries)
    if plan.grid and best is None:
        return tries, []
    return tries, [score_of(one, override) for one in plan.repetitions(best.trial.values if best else ())]


def sweep_facts(plan: SweepPlan, tries: Sequence[TrialScore], seeds: Sequence[TrialScore]) -> dict[str, Any]:
    """The results as sweep.json has them."""
    best, accuracies = best_of(tries), [one.accuracy for one in seeds if one.accuracy is not None]
    is_whole = bool(seeds) and len(accuracies) == len(seeds)
    return {
        "stage": plan.stage,
        "recipe": plan.recipe,
        "score": plan.metric,
        "select_on": plan.select_on,
        "held_out": list(plan.held_out),
        "tries": [_facts(one) for one in tries],
        "best": dict(best.trial.values) if best else {},
        "seeds": [{"seed": one.trial.seed, **_facts(one)} for one in seeds],
        "mean": statistics.fmean(accuracies) if is_whole else None,
        "deviation": _deviation(accuracies) if is_whole else None,
    }


def sweep_table(plan: SweepPlan, tries: Sequence[TrialScore], seeds: Sequence[TrialScore]) -> str:
    """A line for each run, the best marked, and the mean of the repetitions."""
    best = best_of(tries)
    width = max([len(printable_name(one.trial.name)) for one in (*tries, *seeds)], default=0)
    lines = [_line(one, width=width, mark="  best" if one is best else "") for one in tries]
    if best:
        lines += [edge for flag, values in plan.grid if (edge := _edge(flag, values, dict(best.trial.values)[flag]))]
    lines += [_line(one, width=width) for one in seeds]
    accuracies = [one.accuracy for one in seeds if one.accuracy is not None]
    if seeds and len(accuracies) == len(seeds):
        what = f"mean of {len(seeds)}" if plan.metric == "accuracy" else f"mean of {len(seeds)} by {plan.metric}"
        few = "" if len(seeds) > 1 else " (one seed: no deviation)"
        lines.append(f"{what}: {statistics.fmean(accuracies):.4f} ± {_deviation(accuracies):.4f}{few}")
    return "".join(f"{line}\n" for line in lines)


def _facts(score: TrialScore) -> dict[str, Any]:
    return {
        "folder": score.trial.name,
        "values": dict(score.trial.values),
        "state": score.state,
        score.trial.metric: score.accuracy,
        "command": shlex.join(["patchline", *score.trial.words]),
    }


def _line(score: TrialScore, *, width: int, mark: str = "") -> str:
    value = f"{score.accuracy:.4f}" if score.accuracy is not None else score.state
    is_over = score.state in ("failed", "done") and score.accuracy is None
    why = f"  {printable_name(score.why)}" if is_over and score.why else ""
    return f"{printable_name(score.trial.name):<{width}}  {value}{mark}{why}"


def _edge(flag: str, values: Sequence[str], best: str) -> str:
    """A hint if the best value is the lowest or the highest of several numbers."""
    try:
        numbers = sorted(float(value) for value in values)
    except ValueError:
        return ""
    if len(numbers) < _LEAST_FOR_AN_EDGE or float(best) not in (numbers[0], numbers[-1]):
        return ""
    which, other = ("lowest", "lower") if float(best) == numbers[0] else ("highest", "higher")
    return f"the best {flag} is the {which} that was tried; try {other} ones, too"


def _deviation(accuracies: Sequence[float]) -> float:
    """The standard deviation of a sample; 0 for one value."""
    return statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0


def sweep_json(facts: dict[str, Any]) -> bytes:
    """One JSON object, indented."""
    return (json.dumps(facts, indent=2, allow_nan=False) + "\n").encode()


_SWEEP, _MOST_BYTES = "sweep.json", 16 << 20
_MOST_NAMED = 3
_KINDS = ("tries", "seeds", "earlier")
_MOVES = "--data.url"  # a dataset may have another address by now


def sweep_of(run_dir: Path) -> Path | None:
    """The folder of the sweep that a run is of, if it has a sweep.json; None: of none."""
    folder = _plain(run_dir)
    sweep = folder.parent.parent
    return sweep if folder.parent.name in _KINDS and (sweep / _SWEEP).is_file() else None


def name_in_sweep(run_dir: Path) -> str:
    """Such as `seeds/0`."""
    folder = _plain(run_dir)
    return f"{folder.parent.name}/{folder.name}"


def read_sweep(sweep: Path) -> dict[str, Any] | None:
    """What its sweep.json says; None if that cannot be read."""
    try:
        found = parse_json(read_local_file(sweep / _SWEEP, most_bytes=_MOST_BYTES))
    except (OSError, ValueError, InvalidDataError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("seeds"), list) else None


def is_repetition(run_dir: Path, facts: Mapping[str, Any] | None) -> bool:
    """Whether the sweep of these facts lists the run among its repetitions, with the values that the run has."""
    name = name_in_sweep(run_dir)
    own = [one for one in facts["seeds"] if isinstance(one, dict) and one.get("folder") == name] if facts else []
    return bool(own) and all(_has_values(run_dir, one.get("values", {})) for one in own)


def left_out(names: Sequence[str], facts: Mapping[str, Any] | None) -> str:
    """The note on runs of a sweep, by these names, that are not its repetitions."""
    if facts is None:
        return f"its {_SWEEP} cannot be read, so its repetitions are not known; the same sweep again writes it"
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    listed = ", ".join(sorted(names)[:_MOST_NAMED])
    return f"{plural(len(names), 'run')} of the sweep that are not its repetitions: {listed}{more}"


def _has_values(folder: Path, values: Any) -> bool:
    """Whether the run's record has the values of these flags. What it does not say is no difference."""
    if not isinstance(values, dict):
        return False
    try:
        leaves = read_leaves(folder / "job.yaml")
    except (OSError, InvalidDataError):
        return not values
    return all(_is_same(leaves.get(_leaf(flag)), value) for flag, value in values.items() if flag != _MOVES)


def _plain(path: Path) -> Path:
    """The path from the root on, without dots, which have no name; links stay."""
    return Path(os.path.normpath(path.absolute()))


def _leaf(flag: str) -> str:
    return f"job.{flag.removeprefix('--').replace('-', '_')}"


def _is_same(recorded: str | None, given: Any) -> bool:
    if recorded is None or given == "None":
        return True
    try:
        return float(recorded) == float(given)
    except (TypeError, ValueError):
        return recorded == str(given)

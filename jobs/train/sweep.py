"""`patchline sweep STAGE RECIPE --flag A B C ...`: runs each point of a grid, then repeats the best with several seeds.

Each run is a separate command in its own folder. If the sweep is started again, it starts missing runs and continues
interrupted ones. With more values or seeds, it runs only the new ones. With fewer seeds, the other repetitions stay in
`seeds`; repetitions with values that are no longer the best move to `earlier`. Only the repetitions that sweep.json
lists count, and only with the values given there.
"""

import json
import logging
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.output import put
from jobs.record import read_leaves
from jobs.resolve import default_job
from jobs.stages import WITH_SMOKE, usage_of
from jobs.submittable import Override, job_of_words, place_of
from jobs.train.sweep_plan import SweepPlan, plan_of
from jobs.train.trials import Trial, TrialScore, make_room, refuse_others, run_all, score_of
from pipeline.shared_settings import RECORD_FILE
from shards.config_values import differences, shown_value
from shards.errors import InvalidDataError, UserError, WillNotSucceedError
from shards.files.local_files import read_local_file, write_whole
from shards.files.typed_json import parse_json
from shards.output.quantities import plural
from shards.output.terminal import printable_name

_LEAST_FOR_AN_EDGE = 3
_SWEEP, _MOST_BYTES = "sweep.json", 16 << 20
_MOST_NAMED = 3
_KINDS = ("tries", "seeds", "earlier")
_MOVES = "--data.url"  # not compared: a dataset may move
log = logging.getLogger(__name__)


def best_of(scores: Sequence[TrialScore]) -> TrialScore | None:
    """Returns the highest score, the first of several equal ones, or None if no run has a score."""
    scored = [one for one in scores if one.accuracy is not None]
    return max(scored, key=lambda one: one.accuracy or 0.0) if scored else None


def scores_of(plan: SweepPlan, override: Override) -> tuple[list[TrialScore], list[TrialScore]]:
    """Returns the scores of the tries, and those of the repetitions of the best try, once there is one."""
    tries = [score_of(one, override) for one in plan.tries()]
    best = best_of(tries)
    if plan.grid and best is None:
        return tries, []
    return tries, [score_of(one, override) for one in plan.repetitions(best.trial.values if best else ())]


def sweep_facts(plan: SweepPlan, tries: Sequence[TrialScore], seeds: Sequence[TrialScore]) -> dict[str, Any]:
    """Returns the results as sweep.json has them."""
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
    """Returns a line for each run, with the best try marked, hints about best values at an edge of the grid, and the
    mean of the repetitions once all have a score."""
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
    """Returns a hint if the best value is the lowest or the highest of several numbers."""
    try:
        numbers = sorted(float(value) for value in values)
    except ValueError:
        return ""
    if len(numbers) < _LEAST_FOR_AN_EDGE or float(best) not in (numbers[0], numbers[-1]):
        return ""
    which, other = ("lowest", "lower") if float(best) == numbers[0] else ("highest", "higher")
    return f"the best {flag} is the {which} that was tried; try {other} ones, too"


def _deviation(accuracies: Sequence[float]) -> float:
    """Returns the standard deviation of a sample, or 0 for one value."""
    return statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0


def sweep_json(facts: dict[str, Any]) -> bytes:
    """Returns the facts as one indented JSON object."""
    return (json.dumps(facts, indent=2, allow_nan=False) + "\n").encode()


def sweep_of(run_dir: Path) -> Path | None:
    """Returns the folder of the sweep that a run belongs to, or None if no sweep.json is there."""
    folder = _plain(run_dir)
    sweep = folder.parent.parent
    return sweep if folder.parent.name in _KINDS and (sweep / _SWEEP).is_file() else None


def name_in_sweep(run_dir: Path) -> str:
    """Returns the run's name in its sweep, such as `seeds/0`."""
    folder = _plain(run_dir)
    return f"{folder.parent.name}/{folder.name}"


def read_sweep(sweep: Path) -> dict[str, Any] | None:
    """Returns the content of sweep.json, or None if it cannot be read or has no list of seeds."""
    try:
        found = parse_json(read_local_file(sweep / _SWEEP, most_bytes=_MOST_BYTES))
    except (OSError, ValueError, InvalidDataError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("seeds"), list) else None


def is_repetition(run_dir: Path, facts: Mapping[str, Any] | None) -> bool:
    """Whether the sweep's facts list the run among the repetitions, with the run's values."""
    name = name_in_sweep(run_dir)
    own = [one for one in facts["seeds"] if isinstance(one, dict) and one.get("folder") == name] if facts else []
    return bool(own) and all(_has_values(run_dir, one.get("values", {})) for one in own)


def left_out(names: Sequence[str], facts: Mapping[str, Any] | None) -> str:
    """Returns a note on runs that are in a sweep's folder but not among its repetitions. `names`: their names."""
    if facts is None:
        return f"its {_SWEEP} cannot be read, so its repetitions are not known; the same sweep again writes it"
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    listed = ", ".join(sorted(names)[:_MOST_NAMED])
    return f"{plural(len(names), 'run')} of the sweep that are not its repetitions: {listed}{more}"


def _has_values(folder: Path, values: Any) -> bool:
    """Whether the run's record has the values of these flags. A flag that the record does not have is not compared."""
    if not isinstance(values, dict):
        return False
    try:
        leaves = read_leaves(folder / RECORD_FILE)
    except (OSError, InvalidDataError):
        return not values
    return all(_is_same(leaves.get(_leaf(flag)), value) for flag, value in values.items() if flag != _MOVES)


def _plain(path: Path) -> Path:
    """Returns the absolute path without `.` and `..`. Symbolic links are kept."""
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


def run(words: list[str], *, override: Override, environ: Mapping[str, str]) -> int:
    """Runs the trials that are not done, writes sweep.json and prints the table. Returns the exit code of the first run
    that failed. Runs that cannot succeed do not count as failed, but they have no score. Raises UserError if a run
    would refuse its settings."""
    if len(words) < 2 or words[0] not in WITH_SMOKE or words[1].startswith("-"):
        raise UserError(f"usage: {usage_of('sweep')}")
    plan = plan_of(words, default_job(words[0], words[1]))
    check(plan, override)
    tries = plan.tries()
    if plan.is_dry:
        repeated = plan.repetitions(_shown(plan, [score_of(one, override) for one in tries]))
        put("".join(f"{shlex.join(['patchline', *one.words])}\n" for one in (*tries, *repeated)))
        return exit_codes.DONE
    if plan.phase != "seeds" and (code := run_all(plan.own(tries), environ, override)):
        return code
    if plan.phase == "tries":
        put(sweep_table(plan, [score_of(one, override) for one in plan.own(tries)], []))
        return exit_codes.DONE
    repeated = plan.own(plan.repetitions(_best(plan, [score_of(one, override) for one in tries])))
    make_room(repeated, override, free=swept_fields(plan, override))
    code = run_all(repeated, environ, override)
    if code == exit_codes.USER_MISTAKE:
        return code  # the run has already said why
    write(plan, override)
    put(sweep_table(plan, *scores_of(plan, override)))
    return code


def check(plan: SweepPlan, override: Override) -> None:
    """Raises UserError if one of the runs would refuse its settings, if a try was already run with other values, or if
    the repetitions have no dataset to be scored on."""
    for trial in plan.tries():
        job_of_words(list(trial.words), override)
    repeated = job_of_words(list(_likely(plan)[0].words), override)
    if plan.phase != "tries" and not repeated.evaluation.url:
        raise UserError("--evaluation.url is missing: the dataset on which the runs with the best values are scored")
    if plan.select_on and place_of(plan.select_on) == place_of(repeated.evaluation.url):
        log.warning(
            "--select-on and --evaluation.url are both %s: the best is scored on what it was chosen on, so its score "
            "is too high; choose on a part of the training set, --data.held-out.share .02",
            printable_name(plan.select_on),
        )
    if not plan.is_dry:
        refuse_others(plan.tries(), override)


def write(plan: SweepPlan, override: Override) -> None:
    """Writes sweep.json from the runs' folders."""
    write_whole(plan.folder / "sweep.json", sweep_json(sweep_facts(plan, *scores_of(plan, override))))


def swept_fields(plan: SweepPlan, override: Override) -> set[str]:
    """Returns the fields of the job in which the first and the last values of the grid differ, including fields that
    depend on these values."""
    last = tuple((flag, values[-1]) for flag, values in plan.grid)
    jobs = [
        asdict(job_of_words(list(plan.repetitions(values)[0].words), override))
        for values in (plan.first_values(), last)
    ]
    return {each.field for each in differences(*jobs)}


def _shown(plan: SweepPlan, tries: Sequence[TrialScore]) -> tuple[tuple[str, str], ...]:
    """Returns the values that --dry-run shows for the repetitions: the best values or, if these are not known yet, the
    first ones. In that case, also logs a note."""
    best = best_of(tries)
    if best and all(one.state in ("done", "failed") for one in tries):
        return best.trial.values
    if plan.grid:
        log.info("the repetitions will have the best values, which are not known yet: here the first stand for them")
    return plan.first_values()


def _likely(plan: SweepPlan) -> list[Trial]:
    """Returns the repetitions, with the first values in place of the best."""
    return plan.repetitions(plan.first_values())


def _best(plan: SweepPlan, tries: Sequence[TrialScore]) -> tuple[tuple[str, str], ...]:
    """Returns the values of the best try. Raises UserError if some tries are not done, and WillNotSucceedError if none
    has a score."""
    if not plan.grid:
        return ()
    waiting = [one for one in tries if one.state not in ("done", "failed")]
    if waiting:
        first = f"the first {shown_value(waiting[0].trial.name)} ({waiting[0].state})"
        raise UserError(f"{len(waiting)} of {len(tries)} tries are not done, {first}; run the sweep with --phase tries")
    best = best_of(tries)
    if best is None:
        raise WillNotSucceedError("no try of the sweep has a score; see the logs of its runs, or sweep other values")
    return best.trial.values

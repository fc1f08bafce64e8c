"""A step of a chain that is a sweep: its tries as an array of jobs, then the best of them with each seed as another.

Which values are best is known once the tries are over: the gate behind them puts them into the words of the
repetitions. The folders are those of `patchline sweep`, so the same sweep can go on without Slurm.
"""

from dataclasses import replace

from jobs.chains.units import Unit, sweep_of
from jobs.submittable import Override
from jobs.train.sweep import swept_fields
from jobs.train.sweep_scores import best_of
from jobs.train.trials import make_room, refuse_others, score_of
from shards.errors import UserError, WillNotSucceedError


def resolved(unit: Unit, override: Override) -> Unit:
    """The unit with the best values in its words, if it repeats the best of a sweep; else the unit. Repetitions of what
    was the best before are put aside. WillNotSucceedError if no try has a score, or if a run has other values."""
    if not unit.best_of:
        return unit
    plan = sweep_of(unit.best_of)
    try:
        refuse_others(plan.tries(), override)
    except UserError as error:
        raise WillNotSucceedError(str(error)) from error
    best = best_of([score_of(trial, override) for trial in plan.tries()])
    if plan.grid and best is None:
        raise WillNotSucceedError(
            f"no try of the sweep {plan.folder} has a score; see the logs of its runs, or sweep other values"
        )
    trials = plan.repetitions(best.trial.values if best else ())
    try:
        make_room(trials, override, free=swept_fields(plan, override))
    except UserError as error:
        raise WillNotSucceedError(str(error)) from error
    return replace(unit, words=tuple(trial.words for trial in trials))

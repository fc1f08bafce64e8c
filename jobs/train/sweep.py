"""`patchline sweep STAGE RECIPE --flag A B C ...`: a run for each point of a grid, then the best with several seeds.

Each run is a command of its own in a folder of its own. The same sweep again runs what is not done, and continues what
was interrupted; with more values or seeds, only those are new.
"""

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from jobs import exit_codes
from jobs.output import put
from jobs.resolve import default_job
from jobs.stages import WITH_SMOKE, usage_of
from jobs.submittable import Override, job_of_words, place_of
from jobs.train.sweep_plan import SweepPlan, plan_of
from jobs.train.sweep_results import best_of, scores_of, sweep_facts, sweep_json, sweep_table
from jobs.train.trials import Trial, TrialScore, make_room, refuse_others, run_all, score_of
from shards.errors import UserError, WillNotSucceedError
from shards.files.local_files import write_whole
from shards.output.terminal import printable_name
from shards.schema.config_values import shown_value
from shards.schema.differences import differences

log = logging.getLogger(__name__)


def run(words: list[str], *, override: Override, environ: Mapping[str, str]) -> int:
    """Runs what is not done, writes sweep.json and prints the table. The exit code of the first run that ends otherwise
    than with 0, but for one that cannot succeed (which is no candidate). UserError for what a run would refuse."""
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
        return code  # the run has said why
    write(plan, override)
    put(sweep_table(plan, *scores_of(plan, override)))
    return code


def check(plan: SweepPlan, override: Override) -> None:
    """UserError for what one of the runs would refuse, for tries that were run with other values, and for repetitions
    that are scored on nothing."""
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
    """Writes sweep.json, from what is in the runs' folders."""
    write_whole(plan.folder / "sweep.json", sweep_json(sweep_facts(plan, *scores_of(plan, override))))


def swept_fields(plan: SweepPlan, override: Override) -> set[str]:
    """The fields of the job in which the points of the grid differ, with those that follow from them."""
    last = tuple((flag, values[-1]) for flag, values in plan.grid)
    jobs = [
        asdict(job_of_words(list(plan.repetitions(values)[0].words), override))
        for values in (plan.first_values(), last)
    ]
    return {each.field for each in differences(*jobs)}


def _shown(plan: SweepPlan, tries: Sequence[TrialScore]) -> tuple[tuple[str, str], ...]:
    """The values of the repetitions for --dry-run: the best, or, before they are known, the first, which is said."""
    best = best_of(tries)
    if best and all(one.state in ("done", "failed") for one in tries):
        return best.trial.values
    if plan.grid:
        log.info("the repetitions will have the best values, which are not known yet: here the first stand for them")
    return plan.first_values()


def _likely(plan: SweepPlan) -> list[Trial]:
    """The repetitions, with the first values in place of the best."""
    return plan.repetitions(plan.first_values())


def _best(plan: SweepPlan, tries: Sequence[TrialScore]) -> tuple[tuple[str, str], ...]:
    """The values of the best try. UserError if some are not over, WillNotSucceedError if none has a score."""
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

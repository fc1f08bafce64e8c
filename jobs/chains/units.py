"""The steps of a chain as units: what is submitted together, and what a gate looks at afterwards.

All functions are pure but one, which resolves links in the paths of runs. A step that is a sweep becomes two units: its
tries as an array of jobs, then the best of them with each seed as another. Which values are best is known once the
tries are over, so the gate behind them puts the values into the arguments of the repetitions. The folders are those of
`patchline sweep`, so the same sweep can go on without Slurm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jobs.arguments import value_in
from jobs.chains.file import INPUTS, STATE, ChainConfig, StepConfig
from jobs.resolve import default_job
from jobs.submittable import SECOND, SUBMITTED, Override, place_of, run_name
from jobs.train.sweep import best_of, swept_fields
from jobs.train.sweep_plan import SweepPlan, plan_of
from jobs.train.trials import make_room, refuse_others, score_of
from shards.errors import UserError, WillNotSucceedError

PHASES = ("scan", "plan", "shards", "merge")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Jobs of one kind. `words`: those of the command, one for all tasks that share a packing (`num_parts` of them),
    or one for each run. `after`: the units that must be complete before."""

    name: str
    step: str
    stage: str
    words: tuple[tuple[str, ...], ...]
    after: tuple[str, ...] = ()
    num_parts: int = 1
    at_once: int = 0
    nodes: int = 1
    time: str = ""
    cpus: int = 0
    links: int = 1
    may_fail: bool = False
    """Whether a run that cannot succeed ends alone, as one of a sweep's tries; else it ends the chain."""
    best_of: tuple[str, ...] = ()
    """The arguments of a sweep whose best values replace the first ones in these words, once its tries are over."""
    names: tuple[str, ...] = ()
    """The names in the queue of the jobs of each of its runs, empty for a stage without a run directory: from where
    the chain was submitted, since a link may point elsewhere on a node."""

    @property
    def num_tasks(self) -> int:
        """The tasks of its array; 1: no array."""
        return max(self.num_parts, len(self.words))

    def outputs(self) -> list[str]:
        """The folder or URL that each of its words writes to, empty for a stage that writes nothing."""
        flag = SUBMITTED[self.stage].out
        return [value_in(words, flag) if flag else "" for words in self.words]

    def run_dirs(self) -> list[str]:
        """The run directory of each of its words, empty for a stage without one."""
        return [value_in(words, "--run-dir") for words in self.words]


def units_of(chain: ChainConfig) -> tuple[Unit, ...]:
    """All units, each after those that it needs. UserError for steps that do not fit each other."""
    units: list[Unit] = []
    last: dict[str, Unit] = {}  # of each step
    before: tuple[str, ...] = ()
    for step in chain.steps:
        needed = dict.fromkeys((*(step.after or before), *(getattr(step, name) for name in INPUTS)))
        unit = Unit(
            name=step.name,
            step=step.name,
            stage=step.stage,
            words=_words(step, Path(chain.folder), last),
            after=tuple(last[name].name for name in needed if name),
            at_once=step.at_once,
            nodes=step.nodes,
            time=step.time,
            cpus=step.cpus,
            links=step.links,
        )
        if step.sweep:
            units += _sweep_units(unit, step.sweep)
        elif step.stage == "pack" and step.tasks > 1:
            units += _packing_units(unit, step.tasks)
        else:
            units.append(unit)
        last[step.name] = units[-1]
        before = (step.name,)
    _refuse_shared(units)
    _refuse_state(units, (Path(chain.folder) / STATE).resolve())
    return tuple(replace(unit, names=tuple(one and run_name(one) for one in unit.run_dirs())) for unit in units)


def _packing_units(unit: Unit, num_tasks: int) -> list[Unit]:
    """A unit for each phase of the packing. The tasks share two of them."""
    units: list[Unit] = []
    for phase in PHASES:
        is_array = phase in ("scan", "shards")
        one = replace(
            unit,
            name=f"{unit.name}.{phase}",
            words=((*unit.words[0], f"--phase={phase}"),),
            after=(units[-1].name,) if units else unit.after,
            num_parts=num_tasks if is_array else 1,
            at_once=unit.at_once if is_array else 0,
        )
        units.append(one)
    return units


def sweep_of(words: Sequence[str]) -> SweepPlan:
    """The sweep of these words, those after `patchline sweep`."""
    return plan_of(words, default_job(words[0], words[1]))


def _sweep_units(unit: Unit, sweep: tuple[str, ...]) -> list[Unit]:
    """The tries, if there is a grid, and the repetitions of the best of them."""
    if len(unit.words) > 1:
        raise UserError(
            f"step {unit.step}: a sweep is of one command, and its `weights:` are of {len(unit.words)} runs"
        )
    command = (*unit.words[0], *sweep)
    plan = sweep_of(command)
    if plan.phase or plan.is_dry:
        raise UserError(f"step {unit.step}: a sweep in jobs takes no --phase, --part or --dry-run; leave it out")
    units: list[Unit] = []
    if tries := plan.tries():
        words = tuple(trial.words for trial in tries)
        units.append(replace(unit, name=f"{unit.name}.tries", words=words, may_fail=True))
    if repetitions := plan.repetitions(plan.first_values()):
        words = tuple(trial.words for trial in repetitions)
        after = (units[-1].name,) if units else unit.after
        units.append(replace(unit, name=f"{unit.name}.seeds", words=words, after=after, best_of=command))
    return units


def _words(step: StepConfig, folder: Path, last: Mapping[str, Unit]) -> tuple[tuple[str, ...], ...]:
    """The arguments of each of the step's runs. `last`: the last unit of each step before it."""
    row, second = SUBMITTED[step.stage], step.recipe
    takes = dict(row.takes)
    if step.stage == "evaluate" and second:  # evaluate RECIPE --weights W, as in earlier versions
        takes["weights"] = "--weights"
    given: list[list[str]] = [list(variant) for variant in step.variants] or [[]]
    for name in INPUTS:
        source = getattr(step, name)
        if not source:
            continue
        wanted = "data" if name == "data" else "run"
        stage = last[source].stage
        if SUBMITTED[stage].gives != wanted:
            what = "dataset" if wanted == "data" else "run"
            raise UserError(f"step {step.name}, {name}: {source} is a step of {stage}, which makes no {what}")
        paths = [f"{out}/weights" if name == "weights" else out for out in last[source].outputs()]
        if len(paths) > 1 and step.variants:
            raise UserError(f"step {step.name} and step {source} both have variants; write a step for each run")
        given = [list(extra) for extra in given for _ in paths] if len(given) == 1 else given
        flag = takes[name]
        for place, extra in enumerate(given):
            path = paths[place % len(paths)]
            extra.insert(0, path if flag == SECOND else f"{flag}={path}")
    is_second_taken = any(getattr(step, name) and flag == SECOND for name, flag in takes.items())
    if bool(second) == is_second_taken:
        allowed = ", or ".join(f"`{name}:`" for name, flag in takes.items() if flag == SECOND)
        raise UserError(f"step {step.name} needs {'either ' + allowed + ' or ' if allowed else ''}`recipe:`")
    words = []
    for place, extra in enumerate(given):
        head = [step.stage, *([second] if second else [extra.pop(0)])]
        rest = [*step.flags, *extra, *_workers(step)]
        if row.out and not value_in(rest, row.out):
            out = folder / step.name / str(place) if len(given) > 1 else folder / step.name
            rest.append(f"{row.out}={out}")
        words.append((*head, *rest))
    return tuple(words)


def _workers(step: StepConfig) -> list[str]:
    has_some = any(flag.partition("=")[0] == "--workers" for flag in step.flags)
    return [f"--workers={step.cpus}"] if step.cpus and step.stage in ("pack", "verify") and not has_some else []


def _refuse_state(units: Sequence[Unit], state: Path) -> None:
    """UserError if a step writes to the folder of the chain's own state."""
    for unit in units:
        for out in unit.outputs():
            if out and "://" not in out and Path(out).resolve().is_relative_to(state):
                flag = SUBMITTED[unit.stage].out
                raise UserError(
                    f"step {unit.step} writes to {out}, where the chain keeps its state; give another {flag}"
                )


def _refuse_shared(units: Sequence[Unit]) -> None:
    """UserError if two steps, or two variants of one, write to one folder."""
    seen: dict[str, tuple[str, str]] = {}
    for unit in units:
        for number, out in enumerate(unit.outputs()):
            if not out:
                continue
            place = place_of(out)
            writer = (unit.step, f"{unit.name}/{number}" if unit.stage != "pack" else "")
            other, _ = seen.setdefault(place, writer)
            if seen[place] != writer:
                both = f"{other} and {unit.step} both" if other != unit.step else f"two variants of {unit.step}"
                raise UserError(f"{both} write to {out}; give each its own folder")


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

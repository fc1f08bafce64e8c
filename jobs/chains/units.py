"""The steps of a chain as units: what is submitted together, and what a gate looks at afterwards.

All functions are pure but one, which resolves links in the paths of runs. A step that is a sweep becomes two units: its
tries as an array of jobs, then the best of them with each seed as another. Which values are best is known once the
tries are over, so the gate behind them puts the values into the arguments of the repetitions. The folders are those of
`patchline sweep`, so the same sweep can go on without Slurm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jobs.chains.file import INPUTS, STATE, ChainConfig, StepConfig
from jobs.resolve import default_job
from jobs.submittable import SECOND, SUBMITTED, Override, run_name, value_in
from jobs.train.sweep import swept_fields
from jobs.train.sweep_plan import SweepPlan, plan_of
from jobs.train.sweep_results import best_of
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

    def run_dirs(self) -> list[str]:
        """The run directory of each of its words, empty for a stage without one."""
        return [value_in(words, "--run-dir") for words in self.words]


def units_of(chain: ChainConfig) -> tuple[Unit, ...]:
    """All units, each after those that it needs. UserError for steps that do not fit each other."""
    outputs: dict[str, list[str]] = {}
    stages: dict[str, str] = {}
    last: dict[str, str] = {}  # of a step, its last unit
    units: list[Unit] = []
    before: tuple[str, ...] = ()
    for step in chain.steps:
        words, outs = _words(step, Path(chain.folder), outputs, stages)
        needed = dict.fromkeys((*(step.after or before), *(getattr(step, name) for name in INPUTS)))
        after = tuple(last[name] for name in needed if name)
        new = _sweep_units(step, words, after) if step.sweep else _units(step, words, after)
        outs = new[-1].run_dirs() if step.sweep else outs
        units += new
        outputs[step.name], stages[step.name], last[step.name] = outs, step.stage, new[-1].name
        before = (step.name,)
    _refuse_shared(units)
    _refuse_state(units, (Path(chain.folder) / STATE).resolve())
    return tuple(replace(unit, names=tuple(one and run_name(one) for one in unit.run_dirs())) for unit in units)


def _units(step: StepConfig, words: list[tuple[str, ...]], after: tuple[str, ...]) -> list[Unit]:
    common = {"step": step.name, "stage": step.stage, "nodes": step.nodes, "time": step.time, "cpus": step.cpus}
    if step.stage != "pack" or step.tasks == 1:
        return [
            Unit(name=step.name, words=tuple(words), after=after, at_once=step.at_once, links=step.links, **common)  # type: ignore[arg-type]
        ]
    units = []
    for phase in PHASES:
        is_array = phase in ("scan", "shards")
        units.append(
            Unit(
                name=f"{step.name}.{phase}",
                words=((*words[0], f"--phase={phase}"),),
                after=after,
                num_parts=step.tasks if is_array else 1,
                at_once=step.at_once if is_array else 0,
                **common,  # type: ignore[arg-type]
            )
        )
        after = (units[-1].name,)
    return units


def sweep_of(words: Sequence[str]) -> SweepPlan:
    """The sweep of these words, those after `patchline sweep`."""
    return plan_of(words, default_job(words[0], words[1]))


def _sweep_units(step: StepConfig, words: list[tuple[str, ...]], after: tuple[str, ...]) -> list[Unit]:
    """The tries, if there is a grid, and the repetitions of the best of them."""
    if len(words) > 1:
        raise UserError(f"step {step.name}: a sweep is of one command, and its `weights:` are of {len(words)} runs")
    command = (*words[0], *step.sweep)
    plan = sweep_of(command)
    if plan.phase or plan.is_dry:
        raise UserError(f"step {step.name}: a sweep in jobs takes no --phase, --part or --dry-run; leave it out")
    common = {"step": step.name, "stage": step.stage, "nodes": step.nodes, "time": step.time, "cpus": step.cpus}
    units = []
    for kind, trials in (("tries", plan.tries()), ("seeds", plan.repetitions(plan.first_values()))):
        unit = Unit(
            name=f"{step.name}.{kind}",
            words=tuple(trial.words for trial in trials),
            after=after,
            at_once=step.at_once,
            may_fail=kind == "tries",
            best_of=command if kind == "seeds" else (),
            **common,  # type: ignore[arg-type]
        )
        units += [unit] * bool(trials)
        after = (units[-1].name,) if units else after
    return units


def _words(
    step: StepConfig, folder: Path, outputs: dict[str, list[str]], stages: dict[str, str]
) -> tuple[list[tuple[str, ...]], list[str]]:
    """The arguments of each of the step's runs, and what each writes."""
    row, second = SUBMITTED[step.stage], step.recipe
    given: list[list[str]] = [list(variant) for variant in step.variants] or [[]]
    for name in INPUTS:
        source = getattr(step, name)
        if not source:
            continue
        wanted = "data" if name == "data" else "run"
        if SUBMITTED[stages[source]].gives != wanted:
            what = "dataset" if wanted == "data" else "run"
            raise UserError(f"step {step.name}, {name}: {source} is a step of {stages[source]}, which makes no {what}")
        paths = [f"{out}/weights" if name == "weights" else out for out in outputs[source]]
        if len(paths) > 1 and step.variants:
            raise UserError(f"step {step.name} and step {source} both have variants; write a step for each run")
        given = [list(extra) for extra in given for _ in paths] if len(given) == 1 else given
        flag = row.takes[name]
        for place, extra in enumerate(given):
            path = paths[place % len(paths)]
            extra.insert(0, path if flag == SECOND else f"{flag}={path}")
    is_second_taken = any(getattr(step, name) and row.takes[name] == SECOND for name in row.takes)
    if bool(second) == is_second_taken:
        allowed = ", or ".join(f"`{name}:`" for name, flag in row.takes.items() if flag == SECOND)
        raise UserError(f"step {step.name} needs {'either ' + allowed + ' or ' if allowed else ''}`recipe:`")
    words, outs = [], []
    for place, extra in enumerate(given):
        head = [step.stage, *([second] if second else [extra.pop(0)])]
        rest = [*step.flags, *extra, *_workers(step)]
        out = value_in(rest, row.out) if row.out else ""
        if row.out and not out:
            out = str(folder / step.name / str(place)) if len(given) > 1 else str(folder / step.name)
            rest.append(f"{row.out}={out}")
        words.append((*head, *rest))
        outs.append(out)
    return words, outs


def _workers(step: StepConfig) -> list[str]:
    has_some = any(flag.partition("=")[0] == "--workers" for flag in step.flags)
    return [f"--workers={step.cpus}"] if step.cpus and step.stage in ("pack", "verify") and not has_some else []


def _refuse_state(units: Sequence[Unit], state: Path) -> None:
    """UserError if a step writes to the folder of the chain's own state."""
    for unit in units:
        flag = SUBMITTED[unit.stage].out
        for out in [value_in(words, flag) for words in unit.words if flag]:
            if out and "://" not in out and Path(out).resolve().is_relative_to(state):
                raise UserError(
                    f"step {unit.step} writes to {out}, where the chain keeps its state; give another {flag}"
                )


def _refuse_shared(units: Sequence[Unit]) -> None:
    """UserError if two steps, or two variants of one, write to one folder."""
    seen: dict[str, tuple[str, str]] = {}
    for unit in units:
        flag = SUBMITTED[unit.stage].out
        for number, words in enumerate(unit.words):
            out = value_in(words, flag) if flag else ""
            if not out:
                continue
            place = out.rstrip("/") if "://" in out else str(Path(out).resolve())
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

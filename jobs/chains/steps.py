"""Turns the steps that CHAIN.yaml lists into units. A unit is a group of jobs that are submitted together.

slurm/chain.example.yaml shows the file. A step that is a sweep becomes up to two units: an array of tries if it has a
grid, then an array that repeats the best try if it has seeds. The best values are known only after the tries, so the
gate that runs after the tries puts them into the arguments of the repetitions. The runs have the same folders as with
`patchline sweep`, so the sweep can also continue without Slurm.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from jobs.arguments import value_in
from jobs.cluster.settings import refuse_wrong_limit
from jobs.mistakes import similar
from jobs.record import read_config
from jobs.resolve import default_job
from jobs.settings import NumLinks, NumNodes
from jobs.submittable import SECOND, SUBMITTED, Override, place_of, run_name, submitted_stage
from jobs.train.sweep import best_of, swept_fields
from jobs.train.sweep_plan import SweepPlan, plan_of
from jobs.train.trials import make_room, refuse_others, score_of
from shards.config_values import Range, refuse_wrong_values, shown_value
from shards.errors import UserError, WillNotSucceedError

STATE = "chain"  # the subfolder of the chain's folder for its state
INPUTS = ("data", "weights", "run")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_FLAG = re.compile(r"--[a-z][a-z0-9_.-]*(=.*)?", re.DOTALL)
PHASES = ("scan", "plan", "shards", "merge")


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """One step of a chain: a stage, its inputs, and the jobs that it gets."""

    name: str
    """Name of the step: lowercase letters, digits, - and _, starting with a letter. Its output goes to FOLDER/NAME."""
    stage: str
    """pack, verify, pretrain, finetune, evaluate, fewshot or report."""
    recipe: str = ""
    """The recipe, as on the command line."""
    flags: tuple[str, ...] = ()
    """More flags of the stage, such as --steps=1000."""
    variants: tuple[tuple[str, ...], ...] = ()
    """Several runs of the step that differ in these flags: an array of jobs, each in FOLDER/NAME/NUMBER."""
    sweep: tuple[str, ...] = ()
    """Arguments of `patchline sweep`, such as --schedule.learning-rate, '.003', '.01', --select-on, URL."""
    data: str = ""
    """The earlier step whose dataset this step uses."""
    weights: str = ""
    """The earlier step whose weights this step uses; if that step has variants, this one has a run for each of them."""
    run: str = ""
    """The earlier step whose run this step reports."""
    after: tuple[str, ...] = ()
    """The steps that must be complete before this one; empty: the previous step."""
    nodes: NumNodes = 1
    """Nodes of each job."""
    time: str = ""
    """Time limit of each job; empty: that of the cluster's settings."""
    cpus: Annotated[int, Range(0, 4096, zero="the cluster's")] = 0
    """CPUs of each process; packing uses the same number of workers."""
    tasks: Annotated[int, Range(1, 1_000_000)] = 1
    """Number of tasks that share a packing, as an array of jobs."""
    at_once: Annotated[int, Range(0, 1_000_000, zero="all")] = 0
    """Number of tasks or variants that run at the same time."""
    links: NumLinks = 1
    """Number of jobs in a row that continue a training run, for clusters that forbid requeueing."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="steps.")
        if not _NAME.fullmatch(self.name) or self.name == STATE:
            raise UserError(
                f"name is {shown_value(self.name)}; allowed: small letters, digits, - and _, a letter first, at most "
                f"32 of them, and not {STATE!r}"
            )
        takes = submitted_stage(self.stage).takes
        for name in INPUTS:
            if getattr(self, name) and name not in takes:
                raise UserError(
                    f"step {self.name}: {self.stage} takes no `{name}:`; allowed: {', '.join(takes) or 'none'}"
                )
        for flag in (*self.flags, *(flag for variant in self.variants for flag in variant)):
            if not _FLAG.fullmatch(flag):
                raise UserError(f"step {self.name}: flags has {shown_value(flag)}; allowed: --name=value or --switch")
        if self.time:
            refuse_wrong_limit(self.time, what=f"step {self.name}: time")
        for name, stages in (("tasks", ("pack",)), ("links", ("pretrain", "finetune"))):
            if getattr(self, name) > 1 and self.stage not in stages:
                raise UserError(
                    f"step {self.name}: {name} is of {' and '.join(stages)}, not of {self.stage}; leave it out"
                )
        if self.sweep and (self.stage not in ("pretrain", "finetune") or self.variants or self.links > 1):
            raise UserError(f"step {self.name}: sweep is of pretrain and finetune, without variants and links")
        if self.variants and self.links > 1:
            raise UserError(
                f"step {self.name}: links is of one run, not of variants; leave it out: the gate submits again each "
                "variant that is not complete"
            )
        if self.variants and not SUBMITTED[self.stage].has_ranks:
            raise UserError(f"step {self.name}: {self.stage} has no variants; write a step for each")
        if self.nodes > 1 and not SUBMITTED[self.stage].has_ranks:
            raise UserError(f"step {self.name}: {self.stage} runs on one node; leave out `nodes`, or use `tasks`")


@dataclass(frozen=True, kw_only=True)
class ChainConfig:
    """A chain: its folder and its steps."""

    folder: str = ""
    """Folder of the chain, on storage that all nodes share: its state is in FOLDER/chain, a step's output in
    FOLDER/NAME."""
    rounds: Annotated[int, Range(0, 100)] = 3
    """How many times in a row the missing part of a step is submitted again although the last jobs saved nothing
    new."""
    steps: tuple[StepConfig, ...] = ()
    """The steps, each after the steps that it needs."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
        if not self.folder or "://" in self.folder or not self.folder.isprintable():
            raise UserError(f"folder is {shown_value(self.folder)}; give a folder that all nodes share")
        if not self.steps:
            raise UserError("steps is missing: the list of steps, as in `patchline example chain.yaml`")
        known: list[str] = []
        for step in self.steps:
            if step.name in known:
                raise UserError(f"two steps have the name {step.name}; give each its own")
            for other in (*step.after, *(getattr(step, name) for name in INPUTS)):
                if other and other not in known:
                    near = similar(other, known)
                    meant = f"did you mean {near[0]}? " if near else ""
                    raise UserError(
                        f"step {step.name} names {shown_value(other)}; {meant}allowed: a step before it: "
                        f"{', '.join(known) or 'there is none'}"
                    )
            known.append(step.name)


def read_chain(path: Path) -> ChainConfig:
    """Reads a chain from a YAML file. Raises UserError with the line of each mistake."""
    example = "the output of `patchline example chain.yaml`"
    of_step = tuple(each.name for each in fields(StepConfig) if each.name not in ("name", "stage"))
    optional = {"StepConfig": of_step, "ChainConfig": ("rounds",)}
    return read_config(
        path, ChainConfig, example=example, todo=f"give a chain, such as your copy of {example}", optional=optional
    )


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Jobs that are submitted together. `words`: the arguments of each run. Tasks that share a packing (in `num_parts`
    parts) share one entry. `after`: the units that must be complete first."""

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
    """Whether the chain continues if one of these runs cannot succeed. True for the tries of a sweep; otherwise such a
    run ends the chain."""
    best_of: tuple[str, ...] = ()
    """The arguments of a sweep. Until its tries are over, `words` has the first value of each swept flag as a
    placeholder; the best values then replace them."""
    names: tuple[str, ...] = ()
    """The name that the jobs of each run have in the queue; empty for a stage without a run directory. The names are
    computed where the chain is submitted, since a link may point elsewhere on a node."""

    @property
    def num_tasks(self) -> int:
        """The number of tasks in the unit's array; 1 if the unit is not an array."""
        return max(self.num_parts, len(self.words))

    def outputs(self) -> list[str]:
        """Returns the folder or URL that each entry of `words` writes to, or an empty string for a stage that writes
        nothing."""
        flag = SUBMITTED[self.stage].out
        return [value_in(words, flag) if flag else "" for words in self.words]

    def run_dirs(self) -> list[str]:
        """Returns the run directory of each entry of `words`, or an empty string for a stage without one."""
        return [value_in(words, "--run-dir") for words in self.words]


def units_of(chain: ChainConfig) -> tuple[Unit, ...]:
    """Returns all units, each after the units that it needs. Raises UserError for steps that do not fit together."""
    units: list[Unit] = []
    last: dict[str, Unit] = {}  # the last unit of each step
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
    """Returns a unit for each phase of a packing. The tasks share the phases `scan` and `shards`; the others run in one
    job."""
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
    """Returns the sweep that these arguments of `patchline sweep` describe."""
    return plan_of(words, default_job(words[0], words[1]))


def _sweep_units(unit: Unit, sweep: tuple[str, ...]) -> list[Unit]:
    """Returns a unit of tries if there is a grid, and a unit that repeats the best try if there are seeds."""
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
    """Returns the arguments of each of the step's runs. `last`: the last unit of each earlier step."""
    row, second, takes = SUBMITTED[step.stage], step.recipe, SUBMITTED[step.stage].takes
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
    """Raises UserError if a step writes to the folder of the chain's state."""
    for unit in units:
        for out in unit.outputs():
            if out and "://" not in out and Path(out).resolve().is_relative_to(state):
                flag = SUBMITTED[unit.stage].out
                raise UserError(
                    f"step {unit.step} writes to {out}, where the chain keeps its state; give another {flag}"
                )


def _refuse_shared(units: Sequence[Unit]) -> None:
    """Raises UserError if two steps, or two variants of one step, write to the same folder."""
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
    """Returns the unit. If it repeats the best try of a sweep, the returned unit has the best values in its arguments,
    and runs that repeated an earlier best are moved aside. Raises WillNotSucceedError if no try has a score, or if an
    existing run has other values."""
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

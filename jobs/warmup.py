"""Scales the warm-up of a run that is shorter than its recipe, as with `--steps 3` of 300."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.training.settings.job import TrainingJob
from shards.config_values import whole_number
from shards.errors import UserError

if TYPE_CHECKING:
    from jobs.job_files import Tree

Job = TypeVar("Job", bound=TrainingJob)
_WARMUP = "schedule.warmup-steps"


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """The length of a run and of its warm-up."""

    steps: int
    warmup: int


def with_warmup(stage: str, default: Any, values: Mapping[str, Any], *, extends: bool = False) -> tuple[Any, str]:
    """The job that a command starts from, with a warm-up that fits the `values` of its flags, and a note for the user
    (empty if nothing changed). A warm-up in the flags wins; jobs without a schedule stay as they are.

    An existing run keeps its warm-up if the command has the same steps or `extends` it.
    """
    if stage == "plan":
        training, note = _scaled_by_flags(default.training, values, prefix="--training.")
        return (replace(default, training=training), note) if note else (default, "")
    if not isinstance(default, TrainingJob):
        return default, ""
    run_dir = values.get("--run-dir") or default.run_dir
    recorded = _recorded(Path(run_dir) / "job.yaml")
    if recorded and (extends or recorded.steps == values.get("--steps")):
        return _kept(default, recorded.warmup, values, run_dir=run_dir)
    return (default, "") if extends else _scaled_by_flags(default, values)


def scaled(recipe: TrainingJob, *, steps: int, keep: str) -> tuple[TrainingJob, str]:
    """The recipe with its warm-up scaled to a run of `steps`, to the nearest step, and a note for the user; the flag
    `keep` keeps the recipe's warm-up. It never grows: a longer run needs no longer warm-up (the paper's 7 and 14 epochs
    have the same). Call it if the user gave steps but no warm-up."""
    own = recipe.schedule.warmup_steps
    warmup = min(own, round(own * steps / recipe.steps))
    if steps < 1 or warmup == own:
        return recipe, ""
    note = f"warm-up scaled from {own} to {_steps(warmup)}: the run has {steps} of the recipe's {recipe.steps} steps"
    may_stay = own < steps or recipe.schedule.decay == "constant"
    return _warmed_up(recipe, warmup), f"{note} ({keep} keeps it)" if may_stay else note


def shortened(job: Job, *, steps: int) -> Job:
    """The job with at most these steps, and a warm-up and a cooldown in proportion."""
    if job.steps <= steps:
        return job
    fitted, _ = scaled(job, steps=steps, keep="")
    cooldown = min(steps - fitted.schedule.warmup_steps, round(job.schedule.cooldown_steps * steps / job.steps))
    return replace(job, schedule=replace(fitted.schedule, cooldown_steps=cooldown), steps=steps)


def _steps(number: int) -> str:
    return f"{number} {'step' if number == 1 else 'steps'}"


def _scaled_by_flags(recipe: TrainingJob, values: Mapping[str, Any], *, prefix: str = "--") -> tuple[TrainingJob, str]:
    steps, flag = values.get(f"{prefix}steps"), f"{prefix}{_WARMUP}"
    if steps is None or flag in values:
        return recipe, ""
    return scaled(recipe, steps=steps, keep=f"{flag} {recipe.schedule.warmup_steps}")


def _kept(recipe: TrainingJob, warmup: int, values: Mapping[str, Any], *, run_dir: str) -> tuple[TrainingJob, str]:
    """The recipe with the warm-up of the run in the run directory."""
    own = recipe.schedule.warmup_steps
    if warmup == own or warmup >= recipe.steps or f"--{_WARMUP}" in values:
        return recipe, ""
    return _warmed_up(recipe, warmup), f"warm-up {_steps(warmup)}, as the run in {run_dir} began (the recipe: {own})"


def _recorded(path: Path) -> _Recorded | None:
    """The lengths in a run's record; None if it cannot be read."""
    if not path.is_file():
        return None
    from jobs.job_files import read_tree  # noqa: PLC0415 - YAML, only for runs that are continued

    try:
        tree = read_tree(path)
    except UserError:
        return None
    steps, warmup = _number_in(tree, "job", "steps"), _number_in(tree, "job", "schedule", "warmup_steps")
    return None if warmup is None else _Recorded(steps=steps or 0, warmup=warmup)


def _number_in(tree: "Tree", *names: str) -> int | None:
    """The whole number at a path of fields; None if it is missing or no such number."""
    found: Tree | None = tree
    for name in names:
        found = getattr(found, "entries", {}).get(name)
    return whole_number(getattr(found, "text", ""))


def _warmed_up(recipe: TrainingJob, warmup_steps: int) -> TrainingJob:
    return replace(recipe, schedule=replace(recipe.schedule, warmup_steps=warmup_steps))

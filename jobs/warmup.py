"""The warm-up of a run whose length is not its recipe's: in proportion where it is shorter, `--steps 3` of 300."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.training.config import TrainingJob

_STEPS, _WARMUP, _RUN_DIR = "--{}steps", "--{}schedule.warmup-steps", "--run-dir"


def with_warmup(stage: str, default: Any, words: Sequence[str], *, extends: bool = False) -> tuple[Any, str]:
    """The job that a command starts from, its warm-up made to fit the words after it, and what to tell the user (empty
    where nothing changed). The words' own warm-up wins; jobs without a schedule stay as they are.

    `extends`: the command continues a finished run with more steps, which keeps the warm-up that it had.
    """
    if stage == "plan":
        training, note = _scaled_by_words(default.training, words, prefix="training.")
        return (replace(default, training=training), note) if note else (default, "")
    if not isinstance(default, TrainingJob):
        return default, ""
    return _kept(default, words) if extends else _scaled_by_words(default, words)


def scaled(recipe: TrainingJob, *, steps: int, keep: str) -> tuple[TrainingJob, str]:
    """The recipe with the warm-up that a run of `steps` has, its share of the run to the nearest step, and what to tell
    the user, who keeps the recipe's with `keep`. Never longer than the recipe's: a longer run needs no longer warm-up
    (the paper's 7 and 14 epochs have the same). For callers whose user named steps and no warm-up."""
    own = recipe.schedule.warmup_steps
    warmup = min(own, round(own * steps / recipe.steps))
    if steps < 1 or warmup == own:
        return recipe, ""
    note = f"warm-up scaled from {own} to {warmup} steps: the run has {steps} of the recipe's {recipe.steps} steps"
    may_stay = own < steps or recipe.schedule.decay == "constant"
    return _warmed_up(recipe, warmup), f"{note} ({keep} keeps it)" if may_stay else note


def _scaled_by_words(recipe: TrainingJob, words: Sequence[str], *, prefix: str = "") -> tuple[TrainingJob, str]:
    steps, flag = _value(words, _STEPS.format(prefix)), _WARMUP.format(prefix)
    if steps is None or not steps.isdecimal() or _value(words, flag) is not None:
        return recipe, ""
    return scaled(recipe, steps=int(steps), keep=f"{flag} {recipe.schedule.warmup_steps}")


def _kept(recipe: TrainingJob, words: Sequence[str]) -> tuple[TrainingJob, str]:
    """The recipe with the warm-up of the run that lies in the command's run directory."""
    run_dir, own = _value(words, _RUN_DIR) or recipe.run_dir, recipe.schedule.warmup_steps
    recorded = _recorded_warmup(Path(run_dir) / "job.yaml")
    if recorded in (None, own) or recorded >= recipe.steps or _value(words, _WARMUP.format("")) is not None:
        return recipe, ""
    return _warmed_up(recipe, recorded), f"warm-up {recorded} steps, as the run in {run_dir} began (the recipe: {own})"


def _recorded_warmup(path: Path) -> Any:
    """The warm-up in a run's record; None where there is none to be read."""
    import yaml  # noqa: PLC0415 - for runs that are extended alone

    try:
        warmup = yaml.safe_load(path.read_bytes())["job"]["schedule"]["warmup_steps"]
    except (OSError, yaml.YAMLError, LookupError, TypeError):
        return None
    return warmup if isinstance(warmup, int) else None


def _warmed_up(recipe: TrainingJob, warmup_steps: int) -> TrainingJob:
    return replace(recipe, schedule=replace(recipe.schedule, warmup_steps=warmup_steps))


def _value(words: Sequence[str], flag: str) -> str | None:
    """The value of a flag, as `--flag VALUE` or `--flag=VALUE`, the last where it is given twice; None without it."""
    found = None
    for at, word in enumerate(words):
        name, is_assigned, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if is_assigned else next(iter(words[at + 1 :]), "")
    return found

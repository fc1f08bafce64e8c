"""A warm-up in proportion to a run that is made shorter than its recipe: `--steps 3` of a recipe of 300 steps. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.training.config import TrainingJob

_STEPS, _WARMUP = "--{}steps", "--{}schedule.warmup-steps"


def scaled_warmup(recipe: TrainingJob, *, steps: int) -> int:
    """Warm-up steps of the recipe's share of a run of `steps`, to the nearest; never more than the recipe's own, since
    a longer run needs no longer warm-up (the paper's 7 and 14 epochs have the same)."""
    return min(recipe.schedule.warmup_steps, round(recipe.schedule.warmup_steps * steps / recipe.steps))


def warmup_in_command(stage: str, words: Sequence[str], default: Any) -> tuple[list[str], str]:
    """`warmup_in_words` for a stage whose second word stands for `default`; the words as they are where it has no
    warm-up."""
    if stage == "plan":
        return warmup_in_words(words, default.training, prefix="training.")
    return warmup_in_words(words, default) if isinstance(default, TrainingJob) else (list(words), "")


def warmup_in_words(words: Sequence[str], recipe: TrainingJob, *, prefix: str = "") -> tuple[list[str], str]:
    """A command's words after its recipe, with the flag for a scaled warm-up where they shorten the run and name no
    warm-up; and what to tell the user, empty where nothing was added. `prefix`: before the flags (`training.`)."""
    steps, warmup = (_value(words, flag.format(prefix)) for flag in (_STEPS, _WARMUP))
    if warmup is not None or steps is None or not steps.isdecimal():
        return list(words), ""
    scaled, note = _scaled(recipe, int(steps), keep=f"{_WARMUP.format(prefix)} {recipe.schedule.warmup_steps}")
    return [*words, _WARMUP.format(prefix), str(scaled)] if note else list(words), note


def warmup_in_fields(fields: Mapping[str, Any], recipe: TrainingJob) -> tuple[dict[str, Any], str]:
    """The same for what a YAML job says beside its recipe, a mapping of fields to values or to such mappings."""
    steps, schedule = fields.get("steps"), fields.get("schedule") or {}
    if not isinstance(steps, int) or not isinstance(schedule, Mapping) or "warmup_steps" in schedule:
        return dict(fields), ""
    scaled, note = _scaled(recipe, steps, keep=f"schedule.warmup_steps: {recipe.schedule.warmup_steps}")
    return {**fields, "schedule": {**schedule, "warmup_steps": scaled}} if note else dict(fields), note


def _scaled(recipe: TrainingJob, steps: int, *, keep: str) -> tuple[int, str]:
    """The warm-up and what to tell the user, who keeps the recipe's with `keep`; empty where it is the recipe's."""
    own, scaled = recipe.schedule.warmup_steps, scaled_warmup(recipe, steps=steps)
    if steps < 1 or scaled == own:
        return own, ""
    shorter = f"the run has {steps} of the recipe's {recipe.steps} steps"
    is_possible = own < steps or recipe.schedule.decay == "constant"
    return (
        scaled,
        f"warm-up scaled from {own} to {scaled} steps: {shorter}{f' ({keep} keeps it)' if is_possible else ''}",
    )


def _value(words: Sequence[str], flag: str) -> str | None:
    """The value of a flag, as `--flag VALUE` or `--flag=VALUE`, the last where it is given twice; None without it."""
    found = None
    for at, word in enumerate(words):
        name, is_assigned, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if is_assigned else next(iter(words[at + 1 :]), "")
    return found

"""A published model's name beside sizes of the recipe's own, which the name does not change. Pure."""

from collections.abc import Sequence
from typing import Any

from pipeline.models.config import NAMES, RESNETS, SIZES, ModelConfig


def kept_sizes(job: Any, words: Sequence[str]) -> str:
    """What to tell a user who gave `--model.name` to a recipe with sizes of its own; empty if there is nothing to tell.
    The words may give these sizes, too."""
    training = getattr(job, "training", job)  # that of a plan
    model, prefix = getattr(training, "model", None), "--model." if training is job else "--training.model."
    given = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    if not isinstance(model, ModelConfig) or f"{prefix}name" not in given or model.name not in NAMES:
        return ""
    kept, flags = [], []
    for field, own in _published(model.name).items():
        flag = f"{prefix}{field.replace('_', '-')}"
        here = getattr(model, field)
        if here not in (None, own) and flag not in given:
            kept.append(f"{field.replace('_', ' ')} {_shown(here)} ({_shown(own)})")
            flags.append(f"{flag} {_shown(own)}")
    if not kept:
        return ""
    return (
        f"{prefix}name {model.name} leaves the recipe's own sizes as they are (in brackets: those of "
        f"{model.name}): {', '.join(kept)}; for {model.name} itself, add {' '.join(flags)}"
    )


def _published(name: str) -> dict[str, Any]:
    resnet = RESNETS.get(name)
    sizes = vars(SIZES[name]) if name in SIZES else {}
    return sizes | ({"resnet_units": resnet.units, "resnet_factor": resnet.factor} if resnet else {})


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)

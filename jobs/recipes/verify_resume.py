"""Recipes of `patchline verify-resume`: every training recipe; jobs/resolve.py shortens it."""

from collections.abc import Callable
from dataclasses import fields
from typing import Literal

from jobs.recipes import finetune, pretrain
from jobs.settings.models import VerifyResumeJob
from pipeline.training.settings.job import TrainingJob


def of_training(word: str, training: TrainingJob, *, command: Literal["pretrain", "finetune"]) -> VerifyResumeJob:
    """The trial of a training job, in a folder of its own."""
    own = {field.name: getattr(training, field.name) for field in fields(TrainingJob)}
    return VerifyResumeJob(**{**own, "run_dir": ""}, recipe=word, command=command)


def _tried(
    name: str, recipe: Callable[[], TrainingJob], command: Literal["pretrain", "finetune"]
) -> Callable[[], VerifyResumeJob]:
    """The trial's recipe of a training recipe; its help is that recipe's."""

    def trial() -> VerifyResumeJob:
        return of_training(name, recipe(), command=command)

    trial.__doc__ = recipe.__doc__
    return trial


RECIPES: dict[str, Callable[[], VerifyResumeJob]] = {
    **{name: _tried(name, recipe, "pretrain") for name, recipe in pretrain.RECIPES.items()},
    **{name: _tried(name, recipe, "finetune") for name, recipe in finetune.RECIPES.items()},
}

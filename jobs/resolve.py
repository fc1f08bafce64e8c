"""The job that the second word of a command stands for: a recipe, a record, a URL or a path."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from jobs.recipes.smoke import SUFFIX, smoke
from jobs.record import read_record
from jobs.stages import PATH, STAGES, URL, WEIGHTS, WITH_SMOKE
from shards.errors import UserError


def default_job(stage: str, module: ModuleType, word: str) -> Any:
    """The job that a stage's second word stands for: a recipe, a record, a URL or a path."""
    if STAGES[stage].second == WEIGHTS:
        return module.PredictJob(weights=word)
    is_file = word.endswith((".yaml", ".yml"))
    if STAGES[stage].second in (URL, PATH):
        kind = getattr(module, f"{stage.capitalize()}Job")
        if word == STAGES[stage].second:  # help, which is of no place in particular
            return kind()
        if is_file:
            return read_record(Path(word), stage=stage, kind=kind)
        return kind(url=word) if STAGES[stage].second == URL else kind(path=word)
    recipes: dict[str, Callable[[], Any]] = importlib.import_module(f"jobs.recipes.{stage}").RECIPES
    if word in recipes:
        return recipes[word]()
    if stage in WITH_SMOKE and word.removesuffix(SUFFIX) in recipes:
        return smoke(recipes[word.removesuffix(SUFFIX)]())
    if is_file and stage == "plan":
        return importlib.import_module("jobs.recipes.plan").of_record(Path(word))
    if is_file:
        kind = type(next(iter(recipes.values()))())
        return read_record(Path(word), stage=stage, kind=kind)
    raise UserError(f"unknown recipe {word!r} of patchline {stage}; allowed are {', '.join(recipes)}, or a job.yaml")

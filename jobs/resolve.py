"""The job that the second word of a command stands for: a recipe, a record, a URL or a path."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from jobs.mistakes import unknown_recipe
from jobs.recipes.smoke import SUFFIX, smoke
from jobs.stages import PATH, RECIPE, STAGES, URL, WITH_SMOKE


def default_job(stage: str, module: ModuleType, word: str) -> Any:
    """The job that a stage's second word stands for: a recipe, a record, a URL or a path."""
    is_file = word.endswith((".yaml", ".yml"))
    second = STAGES[stage].second
    if second != RECIPE:
        kind = getattr(module, f"{stage.capitalize()}Job")
        if word == second:  # help, which is of no place in particular; or there is no second word
            return kind()
        if is_file and second in (URL, PATH):
            return _read_record(Path(word), stage=stage, kind=kind)
        return kind(**{STAGES[stage].field: word})
    recipes: dict[str, Callable[[], Any]] = importlib.import_module(f"jobs.recipes.{stage}").RECIPES
    if word in recipes:
        return recipes[word]()
    if stage in WITH_SMOKE and word.removesuffix(SUFFIX) in recipes:
        return smoke(recipes[word.removesuffix(SUFFIX)]())
    if is_file and stage == "plan":
        return importlib.import_module("jobs.recipes.plan").of_record(Path(word))
    if is_file:
        kind = type(next(iter(recipes.values()))())
        return _read_record(Path(word), stage=stage, kind=kind)
    raise unknown_recipe(word, stage, list(recipes))


def _read_record(path: Path, *, stage: str, kind: type[Any]) -> Any:
    from jobs.record import read_record  # noqa: PLC0415 - pydantic and YAML, which few commands need

    return read_record(path, stage=stage, kind=kind)

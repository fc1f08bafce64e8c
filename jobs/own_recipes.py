"""The user's own recipes: `my_recipes.py:my_vit` is the function my_vit of that file, which returns a job.

The file is executed, like any script that a user names. It is found by its path only.
"""

import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from jobs.recipes.smoke import SUFFIX, smoke
from pipeline.training.settings.job import TrainingJob
from shards.errors import UserError

_WORD = re.compile(r"(?P<file>.+\.py)(:(?P<name>\w*))?")
_PREFIX = "patchline_own_"  # no module of this name exists, whatever the file is called


def is_own(word: str) -> bool:
    """Whether a word names a Python file."""
    return _WORD.fullmatch(word) is not None


def own_job(word: str, *, kinds: tuple[type, ...], has_smoke: bool) -> Any:
    """The job that FILE.py:FUNCTION returns. `has_smoke`: FUNCTION_smoke is its smoke size.

    UserError if there is no such file or function, if it fails, or if it returns anything but one of the `kinds`.
    """
    match = _WORD.fullmatch(word)
    if match is None:
        raise UserError(f"{word} is not FILE.py:FUNCTION")
    path, name = Path(match["file"]), match["name"] or ""
    recipes = _recipes(_loaded(path))
    is_small = has_smoke and name not in recipes and name.removesuffix(SUFFIX) in recipes
    recipe = recipes.get(name.removesuffix(SUFFIX) if is_small else name)
    if recipe is None:
        there = ", ".join(f"{match['file']}:{known}" for known in recipes) or "none"
        what = f"has no function {name!r} without arguments" if name else "is a file; a recipe is a function in it"
        raise UserError(f"{path} {what}. It has: {there}")
    job = _run(recipe, path)
    if not isinstance(job, kinds):
        allowed = " or ".join(kind.__name__ for kind in kinds)
        raise UserError(f"{word} returned a {type(job).__name__}; a recipe returns the whole job, here a {allowed}")
    return smoke(job) if is_small and isinstance(job, TrainingJob) else job


def _loaded(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{path} is not a file; your own recipe is FILE.py:FUNCTION, with the path of a Python file")
    name = f"{_PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise UserError(f"{path} cannot be loaded as Python")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[name] = module  # where the file's dataclasses look up names
    _run(lambda: loader.exec_module(module), path)
    return module


def _recipes(module: ModuleType) -> dict[str, Callable[[], Any]]:
    """The functions that the file defines and that need no arguments."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        if all(_is_optional(parameter) for parameter in inspect.signature(value).parameters.values())
    }


def _is_optional(parameter: inspect.Parameter) -> bool:
    is_rest = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return is_rest or parameter.default is not inspect.Parameter.empty


def _run(function: Callable[[], Any], path: Path) -> Any:
    """What the user's code returns. If it fails, UserError with a traceback of the user's file only."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.absolute())]
        lines = "".join([*traceback.format_list(own), *traceback.format_exception_only(error)]).rstrip()
        raise UserError(f"{path} failed:\n{lines.replace(str(path.absolute()), str(path))}") from error

"""Turns the second word of a command into a job: a recipe, a YAML file, a user's own recipe, a URL or a path.

`my_recipes.py:my_vit` is the function `my_vit` in that file, which returns a job. The file is executed, like any script
that a user names. It is found only by its path. If the words of `patchline show` or `patchline diff` name no stage, the
stage is found from the recipe or file.
"""

import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from jobs.mistakes import unknown_recipe
from jobs.recipes import recipes_in
from jobs.recipes.shorter import shortened, smoke
from jobs.stages import STAGES, WITH_SMOKE, job_class, recipes_of
from pipeline.models.config import SMOKE
from pipeline.shared_settings import RECORD_FILE
from pipeline.training.settings.job import TrainingJob
from shards.errors import UserError
from shards.files.looks import is_a_file

_WORD = re.compile(r"(?P<file>.+\.py)(:(?P<name>\w*))?")
_PREFIX = "patchline_own_"  # keeps the file's name from hiding a module
PLAN, VERIFY_RESUME = OF_TRAINING = ("plan", "verify-resume")  # these stages take the recipes and files of training
_TRAINING = WITH_SMOKE
WITH_RECIPES = tuple(name for name, stage in STAGES.items() if stage.recipes and name not in OF_TRAINING)
SHOWN = tuple(name for name, stage in STAGES.items() if (stage.recipes or stage.takes_file) and name not in OF_TRAINING)


def is_own(word: str) -> bool:
    """Whether a word names a Python file."""
    return _WORD.fullmatch(word) is not None


def own_job(word: str, *, kinds: tuple[type, ...], has_smoke: bool) -> Any:
    """Returns the job that FILE.py:FUNCTION returns. With `has_smoke`, FUNCTION_smoke is its smoke size.

    Raises UserError if there is no such file or function, if it fails, or if it returns anything but one of the
    `kinds`.
    """
    match = _WORD.fullmatch(word)
    if match is None:
        raise UserError(f"{word} is not FILE.py:FUNCTION")
    path, name = Path(match["file"]), match["name"] or ""
    recipes = recipes_in(vars(_loaded(path)))
    is_small = has_smoke and name not in recipes and name.removesuffix(SMOKE) in recipes
    recipe = recipes.get(name.removesuffix(SMOKE) if is_small else name)
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
    sys.modules[name] = module  # dataclasses in the file look up names here
    _run(lambda: loader.exec_module(module), path)
    return module


def _run(function: Callable[[], Any], path: Path) -> Any:
    """Returns what the user's code returns. If it fails, raises UserError with a traceback of the user's file only."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.absolute())]
        lines = "".join([*traceback.format_list(own), *traceback.format_exception_only(error)]).rstrip()
        raise UserError(f"{path} failed:\n{lines.replace(str(path.absolute()), str(path))}") from error


def default_job(stage: str, word: str) -> Any:
    """Returns the job that a stage's second word names. For an empty word, as in help, returns the default job of a
    stage without recipes. Raises UserError if the word names no job of this stage."""
    if stage in OF_TRAINING:
        return _job_of_training(stage, word)
    record = Path(word) / RECORD_FILE
    if stage in WITH_RECIPES:
        is_run = not is_own(word) and not has_recipe(stage, word) and is_a_file(record)  # a recipe takes precedence
        path = record if is_run else Path(word)
        return file_job(stage, path) if is_run or is_file(word) else recipe_job(stage, word)
    if is_file(word) and STAGES[stage].takes_file:
        return _read(stage, Path(word), recipe=None)
    if stage == "evaluate" and word:
        is_evaluation = is_a_file(record) and _is_evaluation(record)
        return _read(stage, record, recipe=None) if is_evaluation else _evaluation_of(word)
    field = STAGES[stage].field
    return job_class(stage)(**({field: word} if field and word else {}))


def _is_evaluation(record: Path) -> bool:
    """Whether a job.yaml is the record of an evaluation. If it is, the evaluation is repeated. Otherwise the record
    belongs to a run, whose weights are evaluated."""
    from jobs.record import open_job  # noqa: PLC0415 - loads YAML, which most commands do not need

    return open_job(record).stage == "evaluate"


def _evaluation_of(weights: str) -> Any:
    """Returns the job that evaluates these weights. The weights say how images are prepared and which loss is used."""
    from pipeline.models.conversion.open_any import usage_for  # noqa: PLC0415 - loads torch, not needed for help

    job, usage = job_class("evaluate")(weights=weights), usage_for(weights)
    return replace(job, loss=usage.loss, data=replace(job.data, transform=usage.transform))


def stages_of(word: str) -> tuple[str, ...]:
    """Returns the stages that a recipe, a YAML file or a user's own recipe may belong to."""
    if is_file(word):
        from jobs.record import open_job  # noqa: PLC0415 - loads YAML, which most commands do not need

        file = open_job(Path(word))
        if file.stage or not file.recipe:
            return (file.stage,) if file.stage else ()
        found = tuple(stage for stage in WITH_RECIPES if has_recipe(stage, file.recipe))
        if not found:
            raise UserError(f"{word}, recipe: no stage has a recipe {file.recipe!r}; `patchline STAGE` lists them")
        return found
    if not is_own(word):
        return tuple(stage for stage in WITH_RECIPES if has_recipe(stage, word))
    kinds = {stage: job_class(stage) for stage in WITH_RECIPES}
    job = own_job(word, kinds=tuple(dict.fromkeys(kinds.values())), has_smoke=True)
    return tuple(stage for stage, kind in kinds.items() if isinstance(job, kind))


def _job_of_training(of: str, word: str) -> Any:
    """Returns the job of `plan` or `verify-resume` (`of`) for the training job that `word` names."""
    stages = stages_of(word)
    training = [stage for stage in _TRAINING if stage in stages]
    if training:
        from jobs.recipes.of_training import plan_of, trial_of  # noqa: PLC0415 - loads every recipe's module
        from jobs.settings.runs import TRIAL_STEPS  # noqa: PLC0415 - only these two stages need it

        job = file_job(training[0], Path(word)) if is_file(word) else recipe_job(training[0], word)
        if of == PLAN:
            return plan_of(word, job)
        trial = trial_of(word, job, command="finetune" if training[0] == "finetune" else "pretrain")
        return shortened(trial, steps=TRIAL_STEPS)
    if stages:
        what = "record" if is_file(word) else "recipe"
        wanted = "a plan is" if of == PLAN else "verify-resume takes those"
        raise UserError(f"{word} is a {what} of the stage {stages[0]!r}; {wanted} of {' or '.join(_TRAINING)}")
    if is_file(word):
        raise UserError(f"{word} names neither a stage nor a recipe; add `recipe: NAME`, or `stage: {_TRAINING[0]}`")
    raise unknown_recipe(word, of, list(recipes_of(of)))


def is_file(word: str) -> bool:
    """Whether a word names a YAML file."""
    return word.endswith((".yaml", ".yml"))


def file_job(stage: str, path: Path) -> Any:
    """Returns the job in a YAML file of a stage with recipes."""
    return _read(stage, path, recipe=partial(recipe_job, stage))


def recipe_job(stage: str, word: str) -> Any:
    """Returns the job of a recipe, of its smoke size, or of FILE.py:FUNCTION. Raises UserError if the stage has no such
    recipe."""
    if is_own(word):
        return own_job(word, kinds=(job_class(stage),), has_smoke=stage in WITH_SMOKE)
    if has_recipe(stage, word):
        known = recipes_of(stage)
        return known[word]() if word in known else smoke(known[word.removesuffix(SMOKE)]())
    others = [other for other in WITH_RECIPES if has_recipe(other, word)]
    if others:
        raise UserError(f"{word!r} is a recipe of patchline {' and of patchline '.join(others)}, not of {stage}")
    raise unknown_recipe(word, stage, list(recipes_of(stage)))


def has_recipe(stage: str, word: str) -> bool:
    """Whether a stage has a recipe of this name, or one whose smoke size has this name."""
    known = recipes_of(stage)
    base = word.removesuffix(SMOKE)
    return word in known or (stage in WITH_SMOKE and base in known and not base.endswith(SMOKE))


def _read(stage: str, path: Path, *, recipe: Callable[[str], Any] | None) -> Any:
    from jobs.record import read_record  # noqa: PLC0415 - loads YAML, which most commands do not need

    return read_record(path, stage=stage, kind=job_class(stage), recipe=recipe)


def split_stage(words: list[str]) -> tuple[str, list[str]]:
    """Returns the stage in the first word (empty: none), and the words after it. Raises UserError for `plan` and
    `verify-resume`, which have no jobs of their own."""
    if words and words[0] in OF_TRAINING:
        what = "a plan" if words[0] == PLAN else words[0]
        raise UserError(f"{what} has no job of its own; leave out the word {words[0]}")
    return (words[0], words[1:]) if words and words[0] in SHOWN else ("", words)


def job_of(word: str, stage: str) -> Any:
    """Returns the job that a word names in a given stage."""
    if stage not in SHOWN:
        raise UserError(f"{word} is of the stage {stage!r}; allowed: {', '.join(SHOWN)}")
    return default_job(stage, file_of(word))


def stages_found(word: str) -> tuple[str, ...]:
    """Returns the stages that a word can belong to. Raises UserError if there are none."""
    stages = stages_of(file_of(word))
    if stages:
        return stages
    if is_file(file_of(word)):
        raise UserError(f"{word} names neither a stage nor a recipe; add `recipe: NAME`, or `stage: pretrain`")
    raise UserError(
        f"{word!r} is neither a recipe of any stage nor a YAML file, a run directory or FILE.py:FUNCTION; "
        "`patchline STAGE` lists the recipes of a stage"
    )


def file_of(word: str) -> str:
    """Returns the path of job.yaml if the word is a run directory, otherwise the word itself: a dataset's folder may
    have the same name as a recipe."""
    record = Path(word) / RECORD_FILE
    return str(record) if word and is_a_file(record) else word

"""The job that a word means if no stage is named, for `patchline show` and `patchline diff`."""

from pathlib import Path
from typing import Any

from jobs.resolve import OF_TRAINING, PLAN, default_job, is_file, stages_of
from jobs.stages import STAGES
from shards.errors import UserError

SHOWN = tuple(name for name, stage in STAGES.items() if (stage.recipes or stage.takes_file) and name not in OF_TRAINING)


def split_stage(words: list[str]) -> tuple[str, list[str]]:
    """The stage in the first word (empty: none), and the words after it."""
    if words and words[0] in OF_TRAINING:
        what = "a plan" if words[0] == PLAN else words[0]
        raise UserError(f"{what} has no job of its own; leave out the word {words[0]}")
    return (words[0], words[1:]) if words and words[0] in SHOWN else ("", words)


def job_of(word: str, stage: str) -> Any:
    """The job that a word means in a known stage."""
    if stage not in SHOWN:
        raise UserError(f"{word} is of the stage {stage!r}; allowed: {', '.join(SHOWN)}")
    return default_job(stage, file_of(word))


def stages_found(word: str) -> tuple[str, ...]:
    """The stages that a word can belong to, at least one. UserError if there is none."""
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
    """The word itself, or the job.yaml of a run directory. Other folders do not count: a dataset may have the name of
    its recipe."""
    record = Path(word) / "job.yaml"
    return str(record) if word and record.is_file() else word

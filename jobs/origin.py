"""Where the job of a training command is from, as the start of its run puts on record."""

from pathlib import Path

from jobs.resolve import has_recipe, is_file, is_own
from pipeline.runs.starts import Origin, last_origin


def origin_of(stage: str, word: str) -> Origin:
    """The origin that follows from the second word of `patchline STAGE`, which names a recipe, a YAML file, or a run
    whose record is replayed."""
    if is_own(word) or has_recipe(stage, word):
        return Origin(recipe=word)
    if not is_file(word):
        return last_origin(Path(word))
    from jobs.record import open_job  # noqa: PLC0415 - YAML, which most commands do without

    file = open_job(Path(word))
    if file.is_record:
        return last_origin(Path(word).parent)
    return Origin(recipe=file.recipe, file=word)


def shown_origin(origin: Origin) -> str:
    """Such as `digits_smoke`, `my_recipes.py:my_vit` or `my.yaml`, without the folder."""
    return Path(origin.recipe).name if is_own(origin.recipe) else origin.recipe or Path(origin.file).name

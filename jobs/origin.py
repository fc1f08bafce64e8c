"""Tells which recipe the job of a training command comes from: the one recorded at the start of its run, or else the
nearest.

A record has every field, but does not name its recipe. It is compared with the recipe that was recorded when the run
started, if this version has a recipe of that name. Otherwise it is compared with the recipe of its stage from which it
differs in the fewest fields. The comparison ignores fields that say where a run computes or where its data is (paths,
URLs, device, threads), and values that a run decides when it starts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jobs.record import Leaves, leaves_of, open_job
from jobs.resolve import has_recipe, is_file, is_own, recipe_job
from jobs.stages import WITH_SMOKE, recipes_of
from pipeline.models.config import SMOKE
from pipeline.runs.starts import NO_ORIGIN, Origin, last_origin

_MOST_CHANGED = 16  # a record with more changes has no nearest recipe
_PLACES = (
    *("run_dir", "data.url", "data.mix", "initial.weights", "evaluation.url", "checkpoint.url", "device", "threads"),
    *("engine.precision", "micro_batch", "model.num_classes", "fewshot.url", "fewshot.test_url"),
    "teacher.sha256",  # teacher.weights counts: a run with a teacher is another run
)
_Fact = tuple[str, str | float]  # a field's name and value


def origin_of(stage: str, word: str) -> Origin:
    """Returns the origin of a job, given the second word of `patchline STAGE`: a recipe, a YAML file, or a run whose
    record is replayed."""
    if is_own(word) or has_recipe(stage, word):
        return Origin(recipe=word)
    if not is_file(word):
        return last_origin(Path(word))
    file = open_job(Path(word))
    if file.is_record:
        return last_origin(Path(word).parent)
    return Origin(recipe=file.recipe, file=word)


def shown_origin(origin: Origin) -> str:
    """Returns a short name such as `digits_smoke`, `my_recipes.py:my_vit` or `my.yaml`, without the folder."""
    return Path(origin.recipe).name if is_own(origin.recipe) else origin.recipe or Path(origin.file).name


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """The nearest recipe's name (empty: no recipe is near), and how many fields differ from it. `file` is the
    FILE.py:FUNCTION or the YAML file that the job comes from instead (empty: none). `is_recorded`: whether the run
    recorded its origin."""

    recipe: str
    num_changed: int
    file: str = ""
    is_recorded: bool = False

    def words(self) -> str:
        """Returns a text such as `digits_smoke +3` or `my_recipes.py:my_vit`, or `own` if no recipe is near."""
        if self.file or not self.recipe:
            return self.file or "own"
        return f"{self.recipe} +{self.num_changed}" if self.num_changed else self.recipe


def prepare_recipes() -> None:
    """Reads all recipes now. Without this, each thread that calls `nearest` would read them, because the cache has no
    lock."""
    for stage in WITH_SMOKE:
        _recipes(stage)


def nearest(stage: str, leaves: Leaves, origin: Origin = NO_ORIGIN) -> Nearest:
    """Returns the recipe of a training stage that a run is compared with. `leaves` has the fields of the run's
    record."""
    own = _facts({name.removeprefix("job."): text for name, text in leaves.items() if name.startswith("job.")})
    known = _recipes(stage)
    mask = known.mask_of(own)
    if origin.recipe in known.masks:
        num_changed = len(own) - (known.masks[origin.recipe] & mask).bit_count()
        return Nearest(recipe=origin.recipe, num_changed=num_changed, is_recorded=True)
    name, of_recipe = max(known.masks.items(), key=lambda one: (one[1] & mask).bit_count())
    num_changed = len(own) - (of_recipe & mask).bit_count()
    recipe = name if num_changed <= _MOST_CHANGED else ""
    return Nearest(recipe=recipe, num_changed=num_changed, file=shown_origin(origin), is_recorded=origin != NO_ORIGIN)


@dataclass(frozen=True, kw_only=True)
class _Recipes:
    """The fields of recipes as bits of integers, which makes it fast to compare a thousand runs with sixty recipes."""

    bits: Mapping[_Fact, int]
    masks: Mapping[str, int]

    def mask_of(self, facts: Iterable[_Fact]) -> int:
        """Returns the bits of those facts that any recipe has."""
        return sum(1 << self.bits[fact] for fact in facts if fact in self.bits)


@cache
def _recipes(stage: str) -> _Recipes:
    """Returns all recipes of a stage, followed by their smoke sizes."""
    known = list(recipes_of(stage))
    small = [f"{name}{SMOKE}" for name in known if not name.endswith(SMOKE)] if stage in WITH_SMOKE else []
    names = [*known, *(name for name in small if name not in known)]
    facts = {name: _facts(leaves_of(recipe_job(stage, name))) for name in names}
    bits = {fact: number for number, fact in enumerate(dict.fromkeys(one for own in facts.values() for one in own))}
    masks = {name: sum(1 << bits[fact] for fact in own) for name, own in facts.items()}
    return _Recipes(bits=bits, masks=masks)


def _facts(leaves: Leaves) -> frozenset[_Fact]:
    return frozenset((name, _plain(text)) for name, text in leaves.items() if not is_place(name))


def is_place(name: str) -> bool:
    """Whether a field says where a run computes or where its data is, or is decided when it starts."""
    return name.startswith(_PLACES) and any(name == place or name.startswith(f"{place}.") for place in _PLACES)


def _plain(text: str) -> str | float:
    """Returns a number as a float, so that 1e-5 equals 1.0e-05, and any other text as it is."""
    if text[:1].isdigit() or text[:1] in "-.":
        try:
            return float(text)
        except ValueError:
            return text
    return text

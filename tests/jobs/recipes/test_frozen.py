"""No recipe changes in silence: each is compared, fully resolved, with its frozen copy."""

import inspect
from collections.abc import Iterator
from difflib import unified_diff
from itertools import islice
from typing import Any

from jobs.record import read_record
from shards.errors import UserError
from tests.jobs.recipes.freeze import ALL, FOLDER, RECIPES, path_of, resolved
from tests.rigs.faults import assert_none, differs, every_fault

HOW = "If the change is meant, say so in the changelog and run: python -m tests.jobs.recipes.freeze"
MOST_LINES = 8  # of the difference of one recipe


def difference(before: str, now: str) -> Iterator[str]:
    """The lines that are gone, with a minus, and those that are new; the first of many."""
    lines = unified_diff(before.splitlines(), now.splitlines(), n=0, lineterm="")
    changed = [line for line in islice(lines, 2, None) if not line.startswith("@@")]
    yield from (f"    {line}" for line in changed[:MOST_LINES])
    if len(changed) > MOST_LINES:
        yield f"    and {len(changed) - MOST_LINES} more lines"


def changed_recipes() -> Iterator[str]:
    for stage, name in ALL:
        path = path_of(stage, name)
        if not path.exists():
            yield f"patchline {stage} {name} is new"
        elif (now := resolved(stage, name)) != (before := path.read_text()):
            yield "\n".join([f"patchline {stage} {name} is another run than before:", *difference(before, now)])


def test_a_recipe_is_what_it_was() -> None:
    assert_none(changed_recipes(), todo=HOW)


def copies_that_are_no_records() -> Iterator[str]:
    for stage, name in ALL:
        job: Any = RECIPES[stage][name]()
        try:
            if read_record(path_of(stage, name), stage=stage, kind=type(job)) != job:
                yield f"{path_of(stage, name).name}, read as a record, is another job than patchline {stage} {name}"
        except UserError as error:
            yield str(error)


def test_a_copy_is_a_record_of_the_recipe() -> None:
    assert_none(copies_that_are_no_records(), todo=HOW)


@every_fault
def test_a_recipe_says_where_it_is_from() -> Iterator[str]:
    for stage, name in ALL:
        said = inspect.getdoc(RECIPES[stage][name]) or ""
        yield from differs(f"the name of the function of {stage} {name}", RECIPES[stage][name].__name__, name)
        for word in ("Source: ", "Expected") if stage in ("pretrain", "finetune") else ():
            if word not in said:
                yield f"the docstring of the recipe {name} of {stage} lacks {word!r}"


def test_no_copy_is_of_a_recipe_that_is_gone() -> None:
    gone = {path.name for path in FOLDER.iterdir()} - {path_of(*one).name for one in ALL}
    assert_none((f"{FOLDER.name}/{name} is a copy of no recipe" for name in sorted(gone)), todo=HOW)

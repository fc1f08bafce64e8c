"""Writes docs/reference/recipes.md from the docstrings of the recipes, which say where each comes from.

python -m docs.recipes_page
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

from docs.models_tables import markdown
from jobs.recipes import finetune, pack, pretrain

WIDTH = 120
PAGE = Path(__file__).resolve().parent / "reference" / "recipes.md"
STAGES: dict[str, Mapping[str, Callable[[], Any]]] = {
    "pack": pack.RECIPES,
    "pretrain": pretrain.RECIPES,
    "finetune": finetune.RECIPES,
}
_HEAD = """\
# Recipes

Each recipe is a function with its source, what its authors published, and where it differs from theirs. This page is
written from them by `python -m docs.recipes_page`. [unverified] marks a value that is not published. None of the
published results has been reproduced here: each takes the dataset and a cluster. `patchline show RECIPE` prints every
setting of a recipe, and `patchline plan RECIPE` what it costs.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(part for stage in STAGES for part in _sections(stage))])


def _sections(stage: str) -> Iterator[str]:
    """A section for each module that has recipes of the stage: what they share, and a row for each."""
    yield f"## patchline {stage}\n"
    recipes = STAGES[stage].items()
    for module, group in groupby(recipes, key=lambda item: inspect.getmodule(item[1])):
        about = _about(module.__doc__ or "") if module else []
        yield "\n".join(f"{_filled(part)}\n" for part in about)
        rows = ((f"`{name}`", *_described(recipe)) for name, recipe in group)
        yield markdown(("Recipe", "What it is", "Source and published result"), rows)


def _about(text: str) -> list[str]:
    """The paragraphs and list items of a module's docstring, without the command that all its recipes share."""
    parts = re.split(r"\n\n|\n(?=- )", re.split(r"Commands? of each:", text)[0])
    return [" ".join(part.split()) for part in parts if part.strip()]


def _filled(part: str) -> str:
    """A paragraph or a list item in lines of at most WIDTH."""
    indent = "  " if part.startswith("- ") else ""
    return fill(cell(part), WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _described(recipe: Callable[[], Any]) -> tuple[str, str]:
    """The summary of a recipe, and the rest of its docstring."""
    summary, _, rest = (inspect.getdoc(recipe) or "").partition("\n\n")
    return cell(" ".join(summary.split())), cell(" ".join(rest.split()))


def cell(text: str) -> str:
    """Text as a table shows it."""
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE}\n")

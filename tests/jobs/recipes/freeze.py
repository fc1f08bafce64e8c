"""Frozen copies of every recipe, fully resolved: `python -m tests.jobs.recipes.freeze` writes them again."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from jobs.recipes import finetune, pack, pretrain

FOLDER = Path(__file__).resolve().parent / "frozen"
RECIPES: Mapping[str, Mapping[str, Callable[[], Any]]] = {
    "pack": pack.RECIPES,
    "pretrain": pretrain.RECIPES,
    "finetune": finetune.RECIPES,
}
ALL = [(stage, name) for stage, recipes in RECIPES.items() for name in recipes]


def resolved(stage: str, name: str) -> str:
    """Every field of a recipe's job, as a job record that `patchline STAGE FILE.yaml` would run."""
    job = RECIPES[stage][name]()
    fields = TypeAdapter(type(job)).dump_python(job, mode="json")
    text: str = yaml.safe_dump({"stage": stage, "job": fields}, sort_keys=False, default_flow_style=None, width=120)
    return text


def path_of(stage: str, name: str) -> Path:
    """The path of a recipe's copy."""
    return FOLDER / f"{stage}-{name}.yaml"


def freeze() -> None:
    """Writes all copies, and removes those of deleted recipes."""
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.yaml"):
        path.unlink()
    for stage, name in ALL:
        path_of(stage, name).write_text(resolved(stage, name))


if __name__ == "__main__":
    freeze()

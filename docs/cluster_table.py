"""Prints the table of cluster.yaml in docs/reference/slurm.md, from the dataclasses that read the file.

python -m docs.cluster_table
"""

import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

from docs.models_tables import markdown
from docs.recipes_page import cell
from jobs.cluster.settings import ClusterConfig
from jobs.flags import sentences
from shards.config_values import Range, without_range


def settings() -> str:
    """Every setting of a cluster, with its default, what is allowed, and its effect."""
    return markdown(("Setting", "Default", "Allowed", "Effect"), _rows(ClusterConfig(), prefix=""))


def _rows(config: Any, *, prefix: str) -> Iterator[tuple[str, ...]]:
    said = sentences(type(config))
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _rows(value, prefix=f"{prefix}{field.name}.")
        else:
            yield f"`{prefix}{field.name}`", _default(value), _allowed(field.type), cell(said[field.name])


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    shown = ", ".join(value) if isinstance(value, tuple) else str(value)
    return f"`{shown}`" if shown else ""


def _allowed(kind: Any) -> str:
    """What a type allows, such as `0 to 100`. The page describes the forms of texts."""
    ranges = [str(rule) for rule in get_args(kind) if isinstance(rule, Range)]
    if ranges:
        return ranges[0]
    plain = without_range(kind)
    if get_origin(plain) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(plain))
    return "yes, no" if plain is bool else "a list" if get_origin(plain) is tuple else "a text"


if __name__ == "__main__":
    sys.stdout.write(settings())

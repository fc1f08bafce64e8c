"""Holds the recipes: functions that return a whole job, with its source and its expected result in the docstring."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def recipes_in(names: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Returns the recipes among the names of a module, ours or a user's: its public functions that need no
    arguments."""
    return {
        name: value
        for name, value in names.items()
        if inspect.isfunction(value) and value.__module__ == names["__name__"] and not name.startswith("_")
        if value.__code__.co_argcount == len(value.__defaults__ or ())
        if value.__code__.co_kwonlyargcount == len(value.__kwdefaults__ or {})
    }

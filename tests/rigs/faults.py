"""One rule over many files, fields or recipes is one test, whose failure lists every fault, one a line.

@every_fault
def test_names_are_short() -> Iterator[str]:
    for path in PATHS:
        if len(path.name) > 20:
            yield f"{path}: its name has {len(path.name)} characters"
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import ParamSpec

import pytest

P = ParamSpec("P")


def every_fault(rule: Callable[P, Iterator[str]]) -> Callable[P, None]:
    """Makes a test of a rule that yields its faults."""

    @wraps(rule)
    def test(*args: P.args, **kwargs: P.kwargs) -> None:
        assert_none(rule(*args, **kwargs))

    return test


def assert_none(faults: Iterable[str], *, todo: str = "") -> None:
    """Fails with all faults, each once, and with what to do about them."""
    if found := list(dict.fromkeys(faults)):
        count = "1 fault:" if len(found) == 1 else f"{len(found)} faults:"
        pytest.fail("\n".join(filter(None, [count, *found, todo])), pytrace=False)


def differs(what: str, value: object, expected: object) -> Iterator[str]:
    """A fault if a value is not the expected one; for a dataclass, one for each field that differs."""
    if value == expected:
        return
    if is_dataclass(expected) and type(value) is type(expected) is not type:
        for field in fields(expected):
            yield from differs(f"{what}.{field.name}", getattr(value, field.name), getattr(expected, field.name))
    else:
        yield f"{what} is {value}, expected {expected}"

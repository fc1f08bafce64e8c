"""A pytest plugin: `--part 3/6` runs the third of six parts of the selected tests.

Groups (tests/rigs/groups.py) stay whole. Their seconds in the last recorded run (tests/long/results.json) balance the
parts; a group that was never recorded counts as `UNKNOWN_SECONDS`.
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from tests.rigs.groups import group_of

RESULTS = Path(__file__).resolve().parents[1] / "long" / "results.json"
UNKNOWN_SECONDS = 30.0


def part_from(text: str) -> tuple[int, int]:
    """Parses `3/6` into (3, 6)."""
    found = re.fullmatch(r"([1-9]\d{0,2})/([1-9]\d{0,2})", text)
    part, num_parts = (int(number) for number in found.groups()) if found else (1, 0)
    if part > num_parts:
        raise pytest.UsageError(f"--part is {text}; allowed: I/N with I from 1 to N, for example 3/6")
    return part, num_parts


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--part`."""
    parser.addoption("--part", default="", metavar="I/N", help="run the I-th of N parts of the selected tests")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests of the other parts."""
    if not config.getoption("part"):
        return
    part, num_parts = part_from(config.getoption("part"))
    groups = {group_of(item.nodeid) for item in items}
    chosen = divided(groups, num_parts, recorded_seconds())[part - 1]
    others = [item for item in items if group_of(item.nodeid) not in chosen]
    items[:] = [item for item in items if group_of(item.nodeid) in chosen]
    config.hook.pytest_deselected(items=others)


def divided(groups: Collection[str], num_parts: int, seconds: Mapping[str, float]) -> list[set[str]]:
    """Divides the groups into parts of similar duration: the longest group goes first, into the shortest part."""
    parts: list[set[str]] = [set() for _ in range(num_parts)]
    totals = [0.0] * num_parts
    for group in sorted(groups, key=lambda name: (-seconds.get(name, UNKNOWN_SECONDS), name)):
        shortest = totals.index(min(totals))
        parts[shortest].add(group)
        totals[shortest] += seconds.get(group, UNKNOWN_SECONDS)
    return parts


def recorded_seconds() -> dict[str, float]:
    """The seconds of each group in the last recorded run of the long part."""
    if not RESULTS.exists():
        return {}
    recorded: dict[str, float] = json.loads(RESULTS.read_text())["seconds"]
    return recorded

"""A pytest plugin for pytest-xdist (`-n 2 --dist loadfile`): which tests share a worker, and which begin first.

The tests of a file stay together, because they share fixtures. So do all tests of Ceph, which takes long to start; they
are known by their ids. Tests that are marked `alone` begin: while one runs, the other workers wait. Groups with slow
tests come next, so that no worker is left with a long one at the end. Those of Slurm, which mostly wait, are spread
between them: while one worker waits, another computes.
"""

import fcntl
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
SERVERS = {"rgw": "ceph"}
"""The marker of the tests that share a server, and a word in their ids."""
SLOW = 100
"""What a slow test weighs, in other tests; more, if its own time limit in seconds is more."""
BETWEEN = 3
"""Of the groups that come first, this many between two of Slurm: they end with the first half of the run."""


@pytest.hookimpl(wrapper=True)  # sorts after -m, -k and --part: only selected tests weigh
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Sorts the tests in a worker, since groups are sent out in the order of the tests."""
    yield
    for item in items:
        for marker, word in SERVERS.items():
            if item.get_closest_marker(marker) and group_of(item.nodeid) != word:
                raise pytest.UsageError(f"{item.nodeid} is marked {marker}, and its id must have {word} in it")
    if not hasattr(config, "workerinput"):
        return
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    ordered = sorted(groups.values(), key=weight, reverse=True)
    waiting = [group for group in ordered if any(item.get_closest_marker("slurm") for item in group)]
    ordered = spread(waiting, [group for group in ordered if group not in waiting])
    items[:] = [item for group in ordered for item in sorted(group, key=_late)]


def spread(some: Sequence[T], others: Sequence[T]) -> list[T]:
    """All of both in their order: after each `BETWEEN` of the others, one of some."""
    ordered: list[T] = []
    for number in range(max(len(some), -(-len(others) // BETWEEN))):
        ordered += [*others[number * BETWEEN : (number + 1) * BETWEEN], *some[number : number + 1]]
    return ordered


def _late(item: pytest.Item) -> bool:
    """Those that run alone come first: nobody has begun a long test yet that they would have to wait for."""
    return not item.get_closest_marker("alone")


def group_of(nodeid: str) -> str:
    """A server's word, or the test's file."""
    return next((word for word in SERVERS.values() if word in nodeid), nodeid.partition("::")[0])


def weight(items: list[pytest.Item]) -> tuple[bool, int]:
    """Whether a group has tests that run alone, and how long its tests take, roughly."""
    slow = sum(_weight(item) for item in items)
    return any(item.get_closest_marker("alone") for item in items), slow


def _weight(item: pytest.Item) -> int:
    if not item.get_closest_marker("slow"):
        return 1
    limit = item.get_closest_marker("timeout")
    return max(SLOW, int(limit.args[0]) if limit else 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Sends out our groups where pytest-xdist would send out files."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # noqa: PLC0415  # not everywhere

    class Groups(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside pytest-timeout's: waiting is no time of the test's own
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Runs a test beside those of other workers, or alone."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    how = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with _locked(item.config.rootpath, item.config.inipath or Path(__file__), how):
        return (yield)


@contextmanager
def _locked(door: Path, room: Path, how: int) -> Iterator[None]:
    """Who waits for the room stands in the door, so that nobody passes. A folder and a file that are there anyway."""
    with _opened(door) as outside, _opened(room) as inside:
        fcntl.flock(outside, fcntl.LOCK_EX)
        try:
            fcntl.flock(inside, how)
        finally:
            fcntl.flock(outside, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(inside, fcntl.LOCK_UN)  # closing is not enough: forked children have the same open file


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    number = os.open(path, os.O_RDONLY)
    try:
        yield number
    finally:
        os.close(number)

"""A pytest plugin: no process outlives the test that started it, least of all one whose time ran out.

Servers that a fixture of several tests started live until that fixture ends them. When a test's time runs out its
processes are ended first, so that whatever waits for them (a pool, a `with`) returns, and its fixtures end as always.
"""

import signal
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any

import pytest

from tests.rigs.own_processes import OwnProcesses

OWN = OwnProcesses()


@pytest.fixture(autouse=True)
def _processes_end_with_their_test() -> Iterator[None]:
    """The first of a test's own fixtures to begin, and so the last to end."""
    yield
    OWN.end()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    """Keep what a fixture of several tests has started."""
    if fixturedef.scope == "function":
        return (yield)
    before = {process.identity for process in OWN.living()}
    value = yield
    OWN.keep(process for process in OWN.living() if process.identity not in before)
    return value


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Generator[None, object, object]:
    """pytest-timeout's alarm fails the test where it waits; before that, end what it may wait for."""
    timer = yield
    fails = signal.getsignal(signal.SIGALRM)

    def ends_and_fails(number: int, frame: FrameType | None) -> None:
        OWN.end()
        if callable(fails):
            fails(number, frame)

    if callable(fails):
        signal.signal(signal.SIGALRM, ends_and_fails)
    return timer

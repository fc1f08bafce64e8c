"""A pytest plugin: no process outlives the test that started it, even if the test times out.

Servers started by a fixture that several tests share live until that fixture ends them. When a test times out, its
processes are ended first, so that everything that waits for them (a pool, a `with`) returns, and its fixtures end as
usual.
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
    """The first of a test's own fixtures to start, and so the last to end."""
    yield
    OWN.end()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    """Keeps processes started by a fixture that several tests share."""
    if fixturedef.scope == "function":
        return (yield)
    before = {process.identity for process in OWN.living()}
    value = yield
    OWN.keep(process for process in OWN.living() if process.identity not in before)
    return value


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Generator[None, object, object]:
    """pytest-timeout's alarm fails the test where it waits. This ends the processes it may be waiting for first."""
    timer = yield
    fails = signal.getsignal(signal.SIGALRM)

    def ends_and_fails(number: int, frame: FrameType | None) -> None:
        OWN.end()
        if callable(fails):
            fails(number, frame)

    if callable(fails):
        signal.signal(signal.SIGALRM, ends_and_fails)
    return timer

"""A pytest plugin: CPU-seconds including child processes, which hardly change on a busy machine.

`--cpu-seconds N` lists the N most expensive tests, the N most expensive shared fixtures and the sum of each folder at
the end. A fixture that several tests share (of a class, a module, a package or the session), and whatever is made
inside `METER.apart`, counts apart from the test that happened to start it.
"""

import resource
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.rigs.ends import OWN

_TEST, _SHARED = "cpu_seconds", "cpu_seconds_apart"
_BEFORE = pytest.StashKey[float]()


def used_so_far() -> float:
    """CPU-seconds of this process, its living descendants, and those that were waited for."""
    mine = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in mine) + sum(process.cpu_seconds for process in OWN.living())


class Meter:
    """CPU-seconds of tests, and apart from them those of what several tests share."""

    def __init__(self) -> None:
        self._apart = 0.0
        self._made: list[tuple[str, str, float]] = []

    def of_tests(self) -> float:
        """CPU-seconds so far that do not count apart."""
        return used_so_far() - self._apart

    @contextmanager
    def apart(self, name: str, scope: str) -> Iterator[None]:
        """Counts the block under this name. A block within it counts under its own."""
        before = self.of_tests()
        try:
            yield
        finally:
            seconds = self.of_tests() - before
            self._apart += seconds
            self._made.append((name, scope, seconds))

    def made(self) -> list[tuple[str, str, float]]:
        """The name, scope and CPU-seconds of each block since the last call."""
        made, self._made = self._made, []
        return made


METER = Meter()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--cpu-seconds`."""
    words = "list the N tests and the N shared fixtures that take most CPU"
    parser.addoption("--cpu-seconds", type=int, default=0, metavar="N", help=words)


@pytest.hookimpl(wrapper=True, trylast=True)  # inside the hook of groups.py, which waits for other workers
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Notes the time before the test's first fixture."""
    item.stash[_BEFORE] = METER.of_tests()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Counts fixtures that several tests share apart from the test that starts them."""
    if fixturedef.scope == "function":
        return (yield)
    place = fixturedef.baseid or "pytest"
    with METER.apart(f"{place}::{request.fixturename}", fixturedef.scope):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Puts the numbers into the report of the last phase, which also reaches pytest from a worker of pytest-xdist."""
    report = yield
    if report.when == "teardown" and _BEFORE in item.stash:
        report.user_properties.append((_TEST, METER.of_tests() - item.stash[_BEFORE]))
        report.user_properties += [(_SHARED, one) for one in METER.made()]
    return report


@dataclass
class Costs:
    """CPU-seconds by name, added up over the reports of all workers."""

    tests: Counter[str] = field(default_factory=Counter)
    shared: Counter[tuple[str, str]] = field(default_factory=Counter)  # by name and scope
    times: Counter[tuple[str, str]] = field(default_factory=Counter)
    folders: Counter[str] = field(default_factory=Counter)

    def add(self, report: pytest.TestReport) -> None:
        """Adds a test and what it started. A shared fixture counts in the folder of the file that defines it."""
        properties: list[tuple[str, Any]] = report.user_properties
        for kind, value in properties:
            if kind == _TEST:
                self.tests[report.nodeid] += value
                self.folders[folder_of(report.nodeid)] += value
            elif kind == _SHARED:
                name, scope, seconds = value
                self.shared[name, scope] += seconds
                self.times[name, scope] += 1
                self.folders[folder_of(name)] += seconds


def folder_of(name: str) -> str:
    """The folder in the id of a test or a fixture."""
    place = PurePosixPath(name.partition("::")[0])
    return (place.parent if place.suffix == ".py" else place).as_posix()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Lists the most expensive tests, the most expensive shared fixtures, then the folders."""
    if not (most := config.getoption("--cpu-seconds")):
        return
    costs = Costs()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                costs.add(report)
    total, shared = costs.folders.total(), costs.shared.total()
    terminalreporter.section(f"seconds of CPU: {total:.0f}, {shared:.0f} of them in shared fixtures")
    for name, seconds in costs.tests.most_common(most):
        terminalreporter.line(f"{seconds:8.2f}  {name}")
    terminalreporter.section("seconds of CPU: shared fixtures, how often each was made, its scope")
    for key, seconds in costs.shared.most_common(most):
        terminalreporter.line(f"{seconds:8.2f}  {costs.times[key]:3d} x {key[1]:8}  {key[0]}")
    terminalreporter.section("seconds of CPU: folders")
    for name, seconds in costs.folders.most_common():
        terminalreporter.line(f"{seconds:8.2f}  {name}")

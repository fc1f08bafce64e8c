"""A pytest plugin: what each test costs in seconds of CPU, its processes included, which a busy machine hardly changes.

`--cpu-seconds N` ends the run with the N dearest tests and the sum of each folder. What a fixture of several tests
costs is counted for the first of them.
"""

import resource
from collections import Counter
from collections.abc import Generator
from pathlib import PurePosixPath

import pytest

from tests.rigs.ends import OWN

_NAME = "cpu_seconds"
_BEFORE: dict[str, float] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--cpu-seconds`."""
    parser.addoption("--cpu-seconds", type=int, default=0, metavar="N", help="list the N tests that take most CPU")


def used_so_far() -> float:
    """Of this process, its living descendants, and those that somebody has waited for."""
    mine = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in mine) + sum(process.cpu_seconds for process in OWN.living())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    """Before the first of its fixtures."""
    _BEFORE[nodeid] = used_so_far()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The report of the last phase carries the number, from a worker of pytest-xdist too."""
    report = yield
    if report.when == "teardown" and item.nodeid in _BEFORE:
        report.user_properties.append((_NAME, used_so_far() - _BEFORE.pop(item.nodeid)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The dearest tests, then the folders."""
    if not (most := config.getoption("--cpu-seconds")):
        return
    costs, folders = Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, seconds in getattr(report, "user_properties", ()):
                if name == _NAME:
                    costs[report.nodeid] = seconds
    for nodeid, seconds in costs.items():
        folders[PurePosixPath(nodeid.split("::")[0]).parent.as_posix()] += seconds
    terminalreporter.section(f"seconds of CPU: {costs.total():.0f}")
    for counted, number in ((costs, most), (folders, None)):
        for name, seconds in counted.most_common(number):
            terminalreporter.line(f"{seconds:8.2f}  {name}")

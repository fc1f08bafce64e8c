"""A pytest plugin: the CPU-seconds of each test including its child processes, which hardly change on a busy machine.

`--cpu-seconds N` lists the N most expensive tests and the sum of each folder at the end. A fixture shared by several
tests counts for the first of them.
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
    """Adds `--cpu-seconds`."""
    parser.addoption("--cpu-seconds", type=int, default=0, metavar="N", help="list the N tests that take most CPU")


def used_so_far() -> float:
    """CPU-seconds of this process, its living descendants, and those that were waited for."""
    mine = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in mine) + sum(process.cpu_seconds for process in OWN.living())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    """Notes the time before the test's first fixture."""
    _BEFORE[nodeid] = used_so_far()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Puts the number into the report of the last phase, which also reaches pytest from a worker of pytest-xdist."""
    report = yield
    if report.when == "teardown" and item.nodeid in _BEFORE:
        report.user_properties.append((_NAME, used_so_far() - _BEFORE.pop(item.nodeid)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Lists the most expensive tests, then the folders."""
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

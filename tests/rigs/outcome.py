"""A pytest plugin: how a run ended, in the last lines of its output and, with `--outcome FILE`, as a JSON record.

The record of one part (`--part 3/6`) joins those of the other parts in the same file.
"""

import json
import os
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.groups import SERVERS, group_of
from tests.rigs.long_parts import part_from

CHECKOUT = Path(__file__).resolve().parents[2]
MOST_LINES = 30
"""Lines about failures at the end of the output, so that the last 40 lines of a log show them."""
MOST_WIDTH = 200
SIMULATED = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
Report = pytest.TestReport | pytest.CollectReport
Reports = Sequence[Report]
BEGAN = pytest.StashKey[float]()
TESTED = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--outcome`."""
    parser.addoption("--outcome", default="", metavar="FILE", help="write how the run ended to a JSON file")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Notes the time and, for the record, what is tested: a commit may come while the tests run."""
    session.config.stash[BEGAN] = time.monotonic()
    if session.config.getoption("outcome") and not hasattr(session.config, "workerinput"):
        session.config.stash[TESTED] = circumstances()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside pytest's own, so that it comes after all other sections
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Generator[None, None, None]:
    """Writes the record, then lists what failed in the last lines. A worker has some of the reports, and does not."""
    yield
    if hasattr(config, "workerinput"):
        return
    reports = [report for of_kind in terminalreporter.stats.values() for report in of_kind]
    reports = [report for report in reports if isinstance(report, Report)]
    if path := config.getoption("outcome"):
        write_record(Path(path), config, reports)
    if failed := [report for report in reports if report.outcome == "failed"]:
        terminalreporter.section(f"what failed: {len(failed)}", red=True, bold=True)
        for line in last_lines([(report.nodeid, first_line(report)) for report in failed]):
            terminalreporter.line(line)


def last_lines(failed: list[tuple[str, str]]) -> Iterator[str]:
    """At most `MOST_LINES` lines: each failed test and the first line of its error; names alone if that is too much. A
    test that ends its worker is run, and listed, several times."""
    failed = list(dict.fromkeys(failed))
    if 2 * len(failed) <= MOST_LINES:
        for name, error in failed:
            yield from (name[:MOST_WIDTH], f"    {error}"[:MOST_WIDTH])
        return
    shown = failed if len(failed) <= MOST_LINES else failed[: MOST_LINES - 1]
    yield from (f"{name}: {error}"[:MOST_WIDTH] for name, error in shown)
    if len(shown) < len(failed):
        yield f"and {len(failed) - len(shown)} more"


def first_line(report: Report) -> str:
    """Returns the first line of a failed test's error that says something; with the next, if it announces a list."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    when = getattr(report, "when", "call")
    line, *others = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    if line.endswith(":") and others:
        line = f"{line} {others[0]}"
    return f"in its {when}: {line}" if when in ("collect", "setup", "teardown") else line


def write_record(path: Path, config: pytest.Config, reports: Reports) -> None:
    """Writes the record of a run, or puts that of a part into the file of all parts."""
    seconds = round(time.monotonic() - config.stash[BEGAN])
    record = config.stash[TESTED] | counted(reports) | {"seconds": seconds}
    part = config.getoption("part")
    path.write_text(json.dumps(joined(path, part, record, reports) if part else record, indent=1) + "\n")


def joined(path: Path, part: str, record: dict[str, Any], reports: Reports) -> dict[str, Any]:
    """Returns the file's content with this part in it: parts of the same division, and the seconds of each group.

    The seconds, by which the groups are divided, change with the last part of a whole run alone: all of its parts must
    come from one division, or a group would be in two of them or in none.
    """
    before = json.loads(path.read_text()) if path.exists() else {"parts": {}, "seconds": {}}
    _, num_parts = part_from(part)
    groups: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        groups[group_of(report.nodeid)] += getattr(report, "duration", 0.0)
    record = record | {"groups": {name: round(number, 1) for name, number in sorted(groups.items())}}
    others = {name: other for name, other in before["parts"].items() if part_from(name)[1] == num_parts}
    parts = dict(sorted({**others, part: record}.items()))
    servers = SERVERS.values()
    seconds = {name: kept for name, kept in before["seconds"].items() if name in servers or (CHECKOUT / name).exists()}
    if _is_whole(parts, num_parts) and not _is_whole(others, num_parts):
        for one in parts.values():
            seconds |= one.get("groups", {})
    return {
        "command": f"make test-long PARTS={num_parts}",
        "parts": parts,
        "seconds": dict(sorted(seconds.items())),
    }


def _is_whole(parts: dict[str, Any], num_parts: int) -> bool:
    """Whether all parts are there, and of one commit."""
    return len(parts) == num_parts and len({one["commit"] for one in parts.values()}) == 1


def counted(reports: Reports) -> dict[str, Any]:
    """The number of passed tests, each failed test with its error, and each skipped test with its reason."""
    return {
        "passed": sum(one.outcome == "passed" and getattr(one, "when", "") == "call" for one in reports),
        "failed": [{"test": one.nodeid, "error": first_line(one)} for one in reports if one.outcome == "failed"],
        "skipped": [{"test": one.nodeid, "reason": reason_of(one)} for one in reports if one.outcome == "skipped"],
    }


def reason_of(report: Report) -> str:
    """Why a test was skipped."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


def circumstances() -> dict[str, Any]:
    """The commit, and what decides how long the tests take: the CPU, its cores, and the CPU that it simulates."""
    changes = _git("status", "--porcelain", "--", ".", ":!tests/long/*.json")  # which runs write
    commit = _git("rev-parse", "HEAD") + (" with changes" if changes else "")
    cpu = dict(re.findall(r"^(model name|flags)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE))
    kinds = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in cpu.get("flags", "").split()]
    simulated = {name: os.environ[name] for name in SIMULATED if name in os.environ}
    return {
        "commit": commit,
        "cpu": cpu.get("model name", "unknown"),
        "cores": os.cpu_count(),
        "kinds": kinds,
    } | simulated


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    return done.stdout.strip()

"""Runs arms in turn, each a command that writes a report, and computes medians, quartiles and aims.

An arm that fails or times out is recorded as failed, and the others continue. Results are written after every round, so
that an interrupted run keeps what it has.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import run
from shards.files.local_files import write_whole

Report = dict[str, Any]
Round = dict[str, Report]
POLL_SECONDS = 0.5  # seconds between polls of the memory: rare enough to leave both cores to the arms
_SHOWN = (
    *("cpu_seconds_per_1000", "images_per_second", "first_batch_seconds", "cpu_seconds", "wall_seconds"),
    *("whole_wall_seconds", "whole_peak_bytes", "peak_bytes"),
)


def measured(command: Sequence[str], report: Path, *, seconds: float) -> Report:
    """Runs an arm to its end, measured from outside. No other child may be running (see measure.run)."""
    report.unlink(missing_ok=True)
    try:
        whole = run(["timeout", "--kill-after=10", f"{seconds:g}", *command], poll_seconds=POLL_SECONDS)
        said: Report = json.loads(report.read_text())
    except RuntimeError as error:
        head, _, output = str(error).partition("\n")
        return _failed(output.strip() or f"ended with {head.rpartition(' ')[2].rstrip(':')}")
    except (OSError, ValueError) as error:
        return _failed(f"{type(error).__name__}: {error}")
    return {f"whole_{name}": value for name, value in asdict(whole).items()} | said


def reported(command: Sequence[str], report: Path, *, seconds: float, environment: dict[str, str]) -> Report:
    """Runs an arm that measures itself; daemons may be running as children of this process."""
    report.unlink(missing_ok=True)
    try:
        subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=seconds, check=True
        )
        said: Report = json.loads(report.read_text())
    except subprocess.CalledProcessError as error:
        return _failed(str(error.stderr).strip() or f"ended with {error.returncode}")
    except (subprocess.TimeoutExpired, OSError, ValueError) as error:
        return _failed(f"{type(error).__name__}: {error}")
    return said


def _failed(message: str) -> Report:
    """Shows the message on the screen. Only the part before its colon, which contains no path, goes into the
    results."""
    last = message.splitlines()[-1]
    sys.stderr.write(f"{last}\n")
    return {"failed": last.partition(":")[0][:80]}


def in_turn(
    names: Sequence[str], arm: Callable[[str], Report], *, rounds: int, keep: Callable[[list[Round]], None]
) -> list[Round]:
    """A B C, B C A, ...: one warm-up round that is not counted, then `rounds` that are; calls `keep` after each."""
    done: list[Round] = []
    began = time.monotonic()
    for number in range(rounds + 1):
        turned = [names[(place + number) % len(names)] for place in range(len(names))]
        one = {}
        for name in turned:
            one[name] = arm(name)
            say(f"{name:36s} {_line(one[name])}")
        done.append({name: one[name] for name in names})
        minutes = (time.monotonic() - began) / 60
        whole = minutes / (number + 1) * (rounds + 1)
        say(f"round {number} of {rounds} done after {minutes:.1f} min of about {whole:.1f}")
        if number:
            keep(done[1:])
    return done[1:]


def say(line: str) -> None:
    """Writes a line of progress."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _line(report: Report) -> str:
    shown = [f"{name} {report[name]:.4g}" for name in _SHOWN if name in report]
    return report.get("failed", "") or ", ".join(shown) or "done"


def values(rounds: Sequence[Round], name: str, figure: str) -> list[float]:
    """A figure of an arm in every round in which the arm did not fail."""
    return [one[name][figure] for one in rounds if figure in one.get(name, {})]


def ratios(rounds: Sequence[Round], name: str, other: str, figure: str) -> list[float]:
    """A figure of an arm divided by the same figure of another arm in the same round."""
    both = [one for one in rounds if figure in one.get(name, {}) and figure in one.get(other, {})]
    return [one[name][figure] / one[other][figure] for one in both]


def spread(found: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile; empty if there are no values."""
    if len(found) < 2:
        return [round(value, 4) for value in found] * 3
    return [round(value, 4) for value in statistics.quantiles(found, n=4, method="inclusive")]


def summary(rounds: Sequence[Round], figures: Sequence[str]) -> dict[str, Report]:
    """For every arm, the spread of each figure and the number of rounds in which it failed."""
    names = {name: None for one in rounds for name in one}
    return {
        name: {figure: spread(values(rounds, name, figure)) for figure in figures}
        | {"failed_rounds": sum("failed" in one[name] for one in rounds)}
        for name in names
    }


@dataclass(frozen=True, kw_only=True)
class Aim:
    """A goal for a figure, and its measured values, one per round."""

    what: str
    limit: float
    found: Sequence[float]
    at_least: bool = False

    def row(self) -> Report:
        """The aim as it is kept in the results."""
        spread_found = spread(self.found)
        is_met = None
        if spread_found:
            is_met = spread_found[1] >= self.limit if self.at_least else spread_found[1] <= self.limit
        bound = "at least" if self.at_least else "at most"
        return {"what": self.what, "aim": f"{bound} {self.limit:g}", "found": spread_found, "met": is_met}


def aims_table(rows: Sequence[Report]) -> str:
    """Aims and measured values as Markdown."""
    lines = ["| | aim | measured (quartiles) | met |", "|---|---|---|---|"]
    for row in rows:
        met = {True: "yes", False: "**no**", None: "not measured"}[row["met"]]
        lines.append(f"| {row['what']} | {row['aim']} | {cell(row['found'])} | {met} |")
    return "\n".join(lines) + "\n"


def cell(found: Sequence[float]) -> str:
    """Median and quartiles as text."""
    if not found:
        return "-"
    low, middle, high = (f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}" for value in found)
    return f"{middle} ({low} to {high})"


def write(out: Path | None, result: Mapping[str, Any]) -> None:
    """Writes the results, whole or not at all."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, f"{json.dumps(result, indent=1)}\n".encode())

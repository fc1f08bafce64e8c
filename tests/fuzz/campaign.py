"""Feeds cases to a reader in child processes; what fails is tried again in a new one, made shorter and kept."""

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.fuzz.cases import Case, as_data, make_case, shorter
from tests.fuzz.child import Outcome, make_files, serve
from tests.fuzz.targets import Target
from tests.rigs.forks import forks

WALL_SECONDS = 60.0
_FILES_SECONDS = 300.0
_CASES_A_CHILD = 1000
Item = Case | tuple[int, int]  # a case, or the seed and the number of one


class Child:
    """A process that reads; a new one takes its place when it dies or does not answer."""

    def __init__(self, target: Target, root: Path, folder: Path) -> None:
        self.target, self.root, self.folder = target, root, folder
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._num_cases = 0

    def outcome(self, item: Item) -> Outcome:
        """How the case ended; a process that dies or hangs is a failure too."""
        if self._num_cases == _CASES_A_CHILD:
            self.close()
        connection = self._connection or self._start()
        self._num_cases += 1
        try:
            connection.send(item)
            if connection.poll(WALL_SECONDS):
                outcome: Outcome = connection.recv()
                return outcome
            found = Outcome(kind="failed", what=f"hangs for {WALL_SECONDS:.0f} s")
        except (EOFError, ConnectionError):
            assert self._process
            self._process.join(WALL_SECONDS)
            errors = (self.folder / "stderr").read_text(errors="replace")[-4000:]
            found = Outcome(kind="failed", what=f"the process ended with {self._process.exitcode}", detail=errors)
        self.close()
        return found

    def close(self) -> None:
        """Ends the process."""
        if self._process and self._connection:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = self._connection = None
        self._num_cases = 0

    def _start(self) -> Connection:
        context = forks()
        self._connection, other = context.Pipe()
        self._process = context.Process(
            target=serve, args=(other, self.target.name, self.root, self.folder), daemon=True
        )
        self._process.start()
        other.close()
        return self._connection


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A case that failed, as short as it was made, and how it ended."""

    case: Case
    outcome: Outcome


@dataclass(kw_only=True)
class Tally:
    """What became of the cases of one target: `outcomes` counts them by words, `findings` has one of each failure.

    `not_repeated`: failures that a new process did not show again.
    """

    num_cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)
    not_repeated: Counter[str] = field(default_factory=Counter)


@contextmanager
def child_of(target: Target, root: Path, folder: Path) -> Iterator[Child]:
    """A child process for the cases of a target, and its folder, which is removed at the end."""
    child = Child(target, root, folder)
    try:
        yield child
    finally:
        child.close()
        shutil.rmtree(folder, ignore_errors=True)


def valid_files(root: Path) -> Path:
    """Makes the valid files of all targets below `root`."""
    process = forks().Process(target=make_files, args=(root,))
    process.start()
    process.join(_FILES_SECONDS)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"the valid files could not be made (exit code {process.exitcode})")
    return root


def fuzz(child: Child, tally: Tally, *, seed: int, first: int, goes_on: Callable[[int], bool]) -> int:
    """Runs the cases from number `first` on while `goes_on` says so of their numbers; returns the next number."""
    number = first
    while goes_on(number):
        outcome = child.outcome((seed, number))
        tally.num_cases += 1
        tally.outcomes[f"{outcome.kind}: {outcome.what}"] += 1
        if outcome.kind == "failed" and outcome.what not in tally.findings:
            _look_closer(child, tally, outcome, seed=seed, number=number)
        number += 1
    return number


def _look_closer(child: Child, tally: Tally, outcome: Outcome, *, seed: int, number: int) -> None:
    """Runs a case that failed in a new process, and shorter ones, as long as they fail alike."""
    valid = child.root / child.target.valid
    case = make_case(child.target, valid, seed=seed, number=number)
    child.close()
    again = child.outcome(case)
    if again.kind != "failed":
        tally.not_repeated[outcome.what] += 1
        return
    while fewer := next((one for one in shorter(case) if child.outcome(one).what == again.what), None):
        case = fewer
    tally.findings[outcome.what] = Finding(case=replace(case, outcome=again.what), outcome=again)


def keep(finding: Finding, valid: Path, folder: Path) -> Path:
    """Writes a finding as data: one file for each way in which a reader fails."""
    case = as_data(finding.case, valid)
    name = hashlib.sha256(f"{case.way} {case.outcome}".encode()).hexdigest()[:8]
    path = folder / f"{case.target.replace(' ', '-')}-{name}.json"
    if not path.exists():
        path.write_text(case.to_json())
    return path

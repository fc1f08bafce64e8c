"""What `patchline watch CHAIN` shows: the table of the chain, and which of its runs is drawn below it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jobs.chains.state import is_chain
from jobs.chains.status import ChainStatus, lines_of, runs_of, status_of_chain
from jobs.monitor.status import Status, status_of
from jobs.reports.ls import run_at

_MOST_RUNS = 256
_RUNNING = "running"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What Slurm and the files said. `run_dir`: the run that is drawn, None for a chain of which none runs; `status`:
    its jobs, None if Slurm was not asked; `chain`: None for a run."""

    run_dir: Path | None
    status: Status | None
    chain: ChainStatus | None = None


def answer_of(folder: Path, environ: Mapping[str, str] | None) -> Answer:
    """Of a run or a chain. `environ`: None without Slurm. UserError if Slurm does not answer about a run, or the chain
    cannot be read."""
    if not is_chain(str(folder)):
        return Answer(run_dir=folder, status=status_of(folder, environ) if environ is not None else None)
    chain = status_of_chain(folder, environ)
    run_dir, can_ask = run_of(chain), environ is not None and not chain.complaint
    return Answer(run_dir=run_dir, status=status_of(run_dir, environ) if run_dir and can_ask else None, chain=chain)


def run_of(chain: ChainStatus) -> Path | None:
    """The run of a chain that runs, of several the one that was seen last; without one, that of a step whose job runs,
    as between two tries."""
    now, found = time.time(), []
    names = {step.name for step in chain.steps if step.state == _RUNNING}
    for path, unit in list(runs_of(chain.folder).items())[:_MOST_RUNS]:
        run = run_at(path, path, now)
        if run and (run.facts.state == _RUNNING or unit in names):
            found.append((run.facts.state == _RUNNING, run.facts.last_seen or 0.0, path))
    return max(found)[2] if found else None


def table_lines(chain: ChainStatus, *, columns: int, most: int) -> list[str]:
    """The chain's table in at most so many lines: without the complete steps, if there are too many."""
    lines = lines_of(chain, columns=columns)
    if len(lines) > most:
        lines = lines_of(chain, columns=columns, is_short=True)
    if len(lines) > most > 0:
        lines = [*lines[: most - 1], f"    ... {len(lines) - most + 1} more lines in `patchline status`"]
    return lines[:most]


def chain_line(chain: ChainStatus) -> str:
    """The chain in a line of a log."""
    done = sum(step.state == "complete" for step in chain.steps)
    going = [
        f"{step.name} {step.state}" for step in chain.steps if step.state not in ("complete", "waits for its turn")
    ]
    return "  ".join([f"{done}/{len(chain.steps)} steps complete", chain.ending or ", ".join(going[:4])]).rstrip()

"""Where a chain stands, for `patchline status FOLDER`: its steps from the files, and their jobs from one question to
squeue."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs.chain_state import (
    CANCELLED,
    DONE,
    GATE,
    GAVE_UP,
    ChainStep,
    chain_comment,
    chain_steps,
    ending,
    read_plan_of,
    state_folder,
)
from jobs.queue_jobs import facts_of
from jobs.queue_reasons import Finding, finding_of
from jobs.screen import wrapped
from jobs.slurm import QueuedJob, queued
from shards.errors import UserError
from shards.local_file import read_local_file
from shards.quantities import plural
from shards.terminal import printable_name

log = logging.getLogger(__name__)
_MOST_MESSAGE = 1 << 14
_MOST_LINES = 6  # of what is said about one step
_RUNS = ("RUNNING", "COMPLETING")


@dataclass(frozen=True, kw_only=True)
class StepStatus:
    """A unit of a chain. `state`: complete, running, in the queue, submitted (its jobs have ended, its gate has not
    looked yet), or waits for its turn. `jobs`: all that were submitted for it, its gates too; `running` and `queued`:
    how many jobs and tasks of arrays run and wait, without the gates."""

    name: str
    stage: str
    state: str
    jobs: tuple[int, ...]
    running: int
    queued: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True)
class ChainStatus:
    """A chain. `ending`: done, gave-up or cancelled, empty while it goes on; `message`: why it gave up."""

    folder: Path
    ending: str
    message: str
    steps: tuple[StepStatus, ...]


def status_of_chain(folder: Path, environ: Mapping[str, str] | None) -> ChainStatus:
    """What the files and, with an environment, Slurm say; the files alone if it does not answer. UserError if the
    frozen chain cannot be read."""
    state, queue = state_folder(str(folder)), list[QueuedJob]()
    try:
        queue = queued(chain_comment(state), environ) if environ is not None else []
    except UserError as error:
        log.warning("%s", error)
        environ = None
    how, message = ending(state), ""
    if how == GAVE_UP:
        message = read_local_file(state / GAVE_UP, most_bytes=_MOST_MESSAGE).decode(errors="replace").strip()
    steps = tuple(_step(step, queue, environ) for step in chain_steps(str(folder)))
    return ChainStatus(folder=folder, ending=how, message=message, steps=steps)


def _step(step: ChainStep, queue: Sequence[QueuedJob], environ: Mapping[str, str] | None) -> StepStatus:
    mine = [one for one in queue if one.tag.startswith(f"{step.name}.e")]
    running = sum(num_tasks(one.job) for one in mine if one.state in _RUNS)
    waiting = sum(num_tasks(one.job) for one in mine) - running
    state, findings = step.state, list[Finding]()
    if step.state == "waiting":
        state = "waits for its turn"
    elif step.state == "submitted":
        state = "running" if running else "in the queue" if waiting else "submitted"
        kinds = ("job",) if mine else ("job", GATE)
        asked = [[job.job for job in step.jobs if job.kind == kind][-1:] for kind in kinds]
        findings = _said_of([number for one in asked for number in one], environ) if environ is not None else []
    return StepStatus(
        name=step.name,
        stage=step.stage,
        state=state,
        jobs=tuple(job.job for job in step.jobs),
        running=running,
        queued=waiting,
        findings=tuple(findings),
    )


def num_tasks(job: str) -> int:
    """How many tasks a line of squeue stands for: 1 for `12` and `12_3`, 7 for `12_[0-3,7-9%2]`. Pure."""
    _, is_array, tasks = job.partition("_[")
    if not is_array:
        return 1
    ranges = [part.partition("-") for part in tasks.rstrip("]").partition("%")[0].split(",")]
    ends = [(first, last or first) for first, _, last in ranges]
    known = [int(last) - int(first) + 1 for first, last in ends if (first + last).isdecimal()]
    return max(1, sum(known))


def _said_of(numbers: Sequence[int], environ: Mapping[str, str]) -> list[Finding]:
    found = []
    for number in numbers:
        if job := facts_of(str(number), environ):
            said = finding_of(job)
            found.append(Finding(words=f"job {number}: {said.words}", todo=said.todo))
    return found


def runs_of(folder: Path) -> list[Path]:
    """The run directories of its training steps that are there."""
    plan = read_plan_of(state_folder(str(folder)))
    found = [Path(run_dir) for unit in plan.units for run_dir in unit.run_dirs() if run_dir]
    there = [Path(plan.chdir) / one for one in found]
    return [path for path in there if (path / "job.yaml").exists() or (path / "submit").exists()]


def lines_of(status: ChainStatus, *, columns: int) -> list[str]:
    """As they are shown: how the chain stands, and a line for each step. Pure."""
    done = sum(step.state == "complete" for step in status.steps)
    count = f"{done} of {plural(len(status.steps), 'step')} complete"
    name = printable_name(str(status.folder))
    words = {
        DONE: f"chain {name}: done",
        GAVE_UP: f"chain {name}: gave up, {count}: {status.message}",
        CANCELLED: f"chain {name}: cancelled, {count}",
        "": f"chain {name}: {count}",
    }
    lines = wrapped(words[status.ending], columns, most_lines=_MOST_LINES)
    if status.ending in (GAVE_UP, CANCELLED):
        lines += wrapped("    > once it is mended, submit the chain again: what is complete stays", columns)
    width = max(len(step.name) for step in status.steps)
    for step in status.steps:
        tasks = [f"{step.running} running"] * bool(step.running) + [f"{step.queued} in the queue"] * bool(step.queued)
        more = f": {', '.join(tasks)}" if step.running + step.queued > 1 else ""
        jobs = f"  ({plural(len(step.jobs), 'job')}, the last {step.jobs[-1]})" if step.jobs else ""
        lines += wrapped(f"    {step.name:<{width}}  {step.state}{more}{jobs}", columns)
        for finding in step.findings:
            for text in filter(None, (finding.words, finding.todo and f"> {finding.todo}")):
                lines += [f"        {part}" for part in wrapped(text, columns - 8)]
    return lines


def chain_json(status: ChainStatus) -> dict[str, Any]:
    """As one object."""
    return {
        "chain": str(status.folder),
        "ending": status.ending or None,
        "message": status.message or None,
        "steps": [asdict(step) for step in status.steps],
    }

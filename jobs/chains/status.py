"""Reports the state of a chain, for `patchline status FOLDER`. The steps are read from the chain's files, their jobs
from one call of squeue, and the faults of a job from scontrol."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs.chains.state import CANCELLED, DONE, GAVE_UP, Record, ending, read_plan_of, read_record_of, state_folder
from jobs.chains.steps import Unit
from jobs.cluster.queue_reasons import findings_of_tasks, num_tasks
from jobs.cluster.recorded_jobs import RecordedJob
from jobs.cluster.slurm import QueuedJob, queued_with, tasks_of
from jobs.output import advice, wrapped
from pipeline.shared_settings import RECORD_FILE
from shards.errors import Finding, UserError
from shards.files.local_files import read_local_file
from shards.output.quantities import plural
from shards.output.terminal import printable_name

_MOST_MESSAGE = 1 << 14
_MOST_LINES = 6  # the message about the whole chain is cut after this many lines
_RUNS = ("RUNNING", "COMPLETING")
_UNDER_WAY = ("running", "in the queue", "submitted")


@dataclass(frozen=True, kw_only=True)
class StepStatus:
    """A unit of a chain. `state`: complete, running, in the queue, submitted (its jobs have ended, but its gate has not
    run yet), or waits for its turn. `jobs`: the numbers of all jobs that were submitted for it, including gates.
    `running`, `queued`: how many jobs and array tasks are running and waiting, without gates."""

    name: str
    stage: str
    state: str
    jobs: tuple[int, ...]
    running: int
    queued: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True)
class ChainStatus:
    """The state of a chain. `ending`: done, gave-up or cancelled; empty if it has not ended. `message`: why it gave up.
    `complaint`: why Slurm did not answer. `is_stalled`: whether the chain has not ended, but Slurm has no job that
    would continue it."""

    folder: Path
    ending: str
    message: str
    steps: tuple[StepStatus, ...]
    complaint: str = ""
    is_stalled: bool = False

    @property
    def left(self) -> list[str]:
        """The steps that still have jobs although the chain has ended."""
        return [step.name for step in self.steps if self.ending and (step.running or step.queued)]

    @property
    def is_over(self) -> bool:
        """Whether no step has a job or will get one. A chain that has not ended is not over while Slurm does not
        answer. A chain that gave up in one branch may still have jobs in another."""
        if self.is_stalled or (self.ending and not self.left):
            return True
        return not (self.complaint or any(step.state in _UNDER_WAY for step in self.steps))


def status_of_chain(folder: Path, environ: Mapping[str, str] | None) -> ChainStatus:
    """Returns what the chain's files say and, if `environ` is given, what Slurm says. If Slurm does not answer, returns
    only what the files say, with the reason in `complaint`. Raises UserError if the frozen chain cannot be read."""
    state, queue, complaint = state_folder(folder), list[QueuedJob](), ""
    plan = read_plan_of(state)
    try:
        queue = queued_with(plan.name, environ) if environ is not None else []
    except UserError as error:
        environ, complaint = None, str(error)
    how, message = ending(state), ""  # read after the queue, since a job leaves the queue after it ends the chain
    if how == GAVE_UP:
        message = read_local_file(state / GAVE_UP, most_bytes=_MOST_MESSAGE).decode(errors="replace").strip()
    record, steps = read_record_of(state), list[StepStatus]()
    for unit in plan.units:
        dirs = unit.run_dirs()
        run_dir = str(Path(plan.chdir) / dirs[0]) if len(dirs) == 1 and dirs[0] else ""
        try:
            steps.append(_step(unit, record, queue, environ, run_dir=run_dir))
        except UserError as error:  # Slurm is not asked about the units that follow
            environ, complaint = None, str(error)
            steps.append(_step(unit, record, queue, None, run_dir=run_dir))
    is_stalled = not how and not queue and environ is not None and state.stat().st_uid == os.getuid()
    return ChainStatus(
        folder=folder, ending=how, message=message, steps=tuple(steps), complaint=complaint, is_stalled=is_stalled
    )


def _step(
    unit: Unit, record: Record, queue: Sequence[QueuedJob], environ: Mapping[str, str] | None, *, run_dir: str
) -> StepStatus:
    jobs, gates = record.jobs_of(unit.name), record.gates_of(unit.name)
    mine = [one for one in queue if one.tag.startswith(f"{unit.name}.e")]
    running = sum(num_tasks(one.job) for one in mine if one.state in _RUNS)
    waiting = sum(num_tasks(one.job) for one in mine) - running
    findings = list[Finding]()
    if unit.name in record.complete:
        state = "complete"
    elif not (jobs or gates):
        state = "waits for its turn"
    else:
        state = "running" if running else "in the queue" if waiting else "submitted"
        asked = jobs[-1:] if mine else [*jobs[-1:], *gates[-1:]]
        findings = (
            _said_of([job.job for job in asked], run_dir, environ, life=record.life) if environ is not None else []
        )
    return StepStatus(
        name=unit.name,
        stage=unit.stage,
        state=state,
        jobs=tuple(job.job for job in (*jobs, *gates)),
        running=running,
        queued=waiting,
        findings=tuple(findings),
    )


def _said_of(numbers: Sequence[int], run_dir: str, environ: Mapping[str, str], *, life: str) -> list[Finding]:
    found = []
    for number in numbers:
        recorded = RecordedJob(job=str(number), name=life)
        if tasks := [one for one in tasks_of(recorded.job, environ) if one.is_recorded(recorded)]:
            found += findings_of_tasks(tasks, run_dir=run_dir)
    return found


def runs_of(folder: Path) -> dict[Path, str]:
    """Returns the directories of the chain's runs that have begun, each with the name of its unit."""
    plan = read_plan_of(state_folder(folder))
    found = {Path(plan.chdir) / run_dir: unit.name for unit in plan.units for run_dir in unit.run_dirs() if run_dir}
    return {path: name for path, name in found.items() if _is_begun(path)}


def _is_begun(run_dir: Path) -> bool:
    try:
        return any((run_dir / name).exists() for name in (RECORD_FILE, "submit"))
    except PermissionError:  # a colleague's run
        return True


def lines_of(status: ChainStatus, *, columns: int, is_short: bool = False) -> list[str]:
    """Returns the lines to show: the state of the chain, then its steps. `is_short` leaves out complete steps. Pure."""
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
    if status.left:
        verb = "has" if len(status.left) == 1 else "have"
        lines += wrapped(f"    {', '.join(status.left)} still {verb} jobs in Slurm, which run to their end", columns)
    if status.ending in (GAVE_UP, CANCELLED):
        lines += wrapped("    > once it is fixed, submit the chain again: completed steps are kept", columns)
    if status.is_stalled:
        lines += wrapped("    no job of the chain is left, so it does not continue by itself", columns)
        lines += wrapped("    > submit the chain again: completed steps are kept", columns)
    width = max(len(step.name) for step in status.steps)
    for step in status.steps:
        if is_short and step.state == "complete":
            continue
        counts = ((step.running, "running"), (step.queued, "in the queue"))
        tasks = [f"{count} {where}" for count, where in counts if count]
        more = f": {', '.join(tasks)}" if step.running + step.queued > 1 else ""
        jobs = f"  ({plural(len(step.jobs), 'job')}, the last {step.jobs[-1]})" if step.jobs else ""
        lines += wrapped(f"    {step.name:<{width}}  {step.state}{more}{jobs}", columns)
        for finding in step.findings:
            lines += [f"        {part}" for part in wrapped(finding.found, columns - 8)]
            lines += [f"        {part}" for part in advice(finding.todo, columns - 8)]
    return lines


def chain_json(status: ChainStatus) -> dict[str, Any]:
    """Returns the chain's state as one JSON object."""
    return {
        "chain": str(status.folder),
        "ending": status.ending or None,
        "message": status.message or None,
        "complaint": status.complaint or None,
        "stalled": status.is_stalled,
        "steps": [asdict(step) for step in status.steps],
    }

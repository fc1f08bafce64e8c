"""`patchline status [RUN|CHAIN...]`: shows the state of runs and chains, what their jobs wait for, and the commands
that fix faults.

For a stage without a run directory, such as packing, give the folder or URL that it writes. Its jobs in the queue have
a name made from that path.
"""

import json
import logging
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.chains.state import chain_tasks, is_chain
from jobs.chains.status import chain_json, lines_of, runs_of, status_of_chain
from jobs.chains.steps import STATE
from jobs.cluster.queue_reasons import finding_of, findings_of_nodes
from jobs.cluster.recorded_jobs import RecordedJob, numbers_of, recorded_in
from jobs.cluster.slurm import JobFacts, job_facts, nodes_in, queued_with
from jobs.monitor.ask import is_begun, is_there, why_unreadable
from jobs.monitor.log_signs import AGAIN, FULL, SAME_COMMAND
from jobs.monitor.logs import newest_log
from jobs.output import put
from jobs.reports.facts import last_try, said_of_last_try
from jobs.reports.ls import Run, as_json, run_at, run_table
from jobs.stages import usage_of
from jobs.submittable import SUBMIT_FOLDER, output_name, run_name
from shards.errors import Finding, InvalidDataError, UserError
from shards.files.local_files import read_tail
from shards.files.looks import is_a_folder
from shards.output.terminal import columns_of, printable_name

Outputs = Mapping[str, Sequence[JobFacts]]
log = logging.getLogger(__name__)
_MOST_JOBS = 4  # the newest jobs of a run that are shown, besides all pending and running ones
# Slurm calls such a job failed, since it ends with 78: nothing is to start it again.
_STOPPED = Finding(found="was stopped by the run's file STOP, as asked", todo="submit again to continue")
_MOST_ASKED, _LOG_BYTES = 64, 1 << 16
_PIPE_COLUMNS = 160


@dataclass(frozen=True, kw_only=True)
class Status:
    """A run's jobs, newest first, and the findings about them, most important first. `complaint` says why Slurm does
    not answer."""

    jobs: tuple[JobFacts, ...]
    findings: tuple[Finding, ...]
    complaint: str = ""

    @property
    def next_job(self) -> JobFacts | None:
        """The newest pending or running job."""
        return next((job for job in self.jobs if not job.is_finished), None)


def run(words: list[str], *, environ: Mapping[str, str]) -> int:
    """Prints tables or, with --json, one line for each chain, run and output. Returns 0 if every run could be read,
    else 2. Raises UserError for a folder that is neither a run nor a chain."""
    unknown = [word for word in words if word.startswith("-") and word != "--json"]
    if unknown:
        raise UserError(f"there is no flag {unknown[0]}; usage: {usage_of('status')}")
    named = [word for word in words if word != "--json"] or ["."]
    has_slurm = shutil.which("scontrol", path=environ.get("PATH")) is not None
    unreadable = {word: why for word in named if (why := why_unreadable(Path(word)))}
    for word, why in unreadable.items():
        log.error("%s cannot be read: %s; ask its owner for access", printable_name(word), why)
    # If only the folder `submit` cannot be read, the run is shown without its jobs.
    named = [word for word in named if word not in unreadable or not why_unreadable(Path(word), parts=("", STATE))]
    outputs = outputs_in(named, environ) if has_slurm else {}
    folders = [Path(word) for word in named if word not in outputs]
    now = time.time()
    asked = environ if has_slurm else None
    chains = [status_of_chain(folder, asked) for folder in folders if is_chain(folder)]
    silence = next((chain.complaint for chain in chains if chain.complaint), "")
    shown = _statuses(_runs(folders, now), asked, silence)
    if silence := silence or next((status.complaint for _, status in shown if status.complaint), ""):
        log.warning("%s", silence)
    if "--json" in words:
        lines = [chain_json(chain) for chain in chains] + [_as_json(found, status) for found, status in shown]
        lines += [{"output": word, "jobs": [asdict(job) for job in jobs]} for word, jobs in outputs.items()]
        put("".join(json.dumps(line) + "\n" for line in lines))
        return exit_codes.USER_MISTAKE if unreadable else exit_codes.DONE
    columns = columns_of(sys.stdout) or _PIPE_COLUMNS
    put("".join(f"{line}\n" for chain in chains for line in lines_of(chain, columns=columns)))
    put("".join(f"{line}\n" for line in output_lines(outputs)))
    if shown:
        told = [replace(found, findings=status.findings, state=state_of(found, status)) for found, status in shown]
        put(run_table(told, now=now, columns=columns))
    if not has_slurm:
        log.info("no Slurm on this machine, so nothing is known of jobs")
    return exit_codes.USER_MISTAKE if unreadable else exit_codes.DONE


def _statuses(
    runs: Sequence[tuple[Run, Path]], environ: Mapping[str, str] | None, silence: str
) -> list[tuple[Run, Status]]:
    """Returns the statuses of all runs. Once Slurm has failed to answer, it is not called again, since each call takes
    seconds. `silence` says why Slurm did not answer before (empty: it did)."""
    found = []
    for one, path in runs:
        try:
            status = status_of(path, None if silence else environ)
        except UserError as error:
            silence, status = str(error), status_of(path, None)
        found.append((one, replace(status, complaint=silence)))
    return found


def _runs(folders: Sequence[Path], now: float) -> list[tuple[Run, Path]]:
    """Returns the runs among the folders, and the runs of the chains among them. Raises UserError for a folder that is
    neither a run nor a chain."""
    named = [(path, path) for path in folders if not is_chain(path)]
    of_chains = [(folder, path) for folder in folders if is_chain(folder) for path in runs_of(folder)]
    found = []
    for root, path in named + of_chains:
        is_below = path.is_relative_to(root.absolute()) and path != root
        run_there = run_at(root.absolute() if is_below else path, path, now) if is_a_folder(path) else None
        if run_there is not None and (is_begun(path) or why_unreadable(path)):
            found.append((run_there, path))
        elif root == path:
            raise UserError(
                f"{str(path)!r} is neither a run nor a chain: it has no job.yaml and no chain/plan.json; "
                "`patchline ls DIR` lists the runs in a folder"
            )
    return found


def _as_json(found: Run, status: Status) -> dict[str, Any]:
    findings = [{"words": one.found, "todo": one.todo} for one in status.findings]
    of_jobs = {"continued_by": status.next_job.job if status.next_job else None, "jobs": list(map(asdict, status.jobs))}
    return as_json(found) | of_jobs | {"findings": findings, "complaint": status.complaint or None}


def state_of(found: Run, status: Status) -> str:
    """Returns the run's state, taking its jobs into account. A failed run that a job will continue is `interrupted`. A
    run that never started is `not started` if it has a pending or running job, or if Slurm does not answer."""
    others = {"failed": "interrupted", "never started": "not started"} if status.next_job else {}
    if status.complaint:
        others = {"never started": "not started"}
    return others.get(found.facts.state, found.facts.state)


def status_of(run_dir: Path, environ: Mapping[str, str] | None) -> Status:
    """Returns what Slurm and the folder say about the run's jobs. If `environ` is None, Slurm is not called. Raises
    UserError if Slurm does not answer."""
    jobs = jobs_of(run_dir, environ) if environ is not None else []
    line, _ = last_try(run_dir)
    stopped = str(line.get("job")) if line and line["end"] == "told to stop" else ""
    findings = []
    for job in jobs:
        found = _STOPPED if job.job == stopped and job.state == "FAILED" else finding_of(job, run_dir=str(run_dir))
        starts = f", start {job.starts + 1}" if job.starts else ""
        findings.append(Finding(found=f"job {job.job}{starts}: {found.found}", todo=found.todo))
        if not job.is_finished and environ is not None:
            findings += findings_of_nodes(nodes_in(job.nodes, environ))
    return Status(jobs=tuple(jobs), findings=(*_of_folder(run_dir, jobs), *findings))


def jobs_of(run_dir: Path, environ: Mapping[str, str]) -> list[JobFacts]:
    """Returns the run's four newest jobs, and all others that are pending or running, newest first. Raises UserError if
    Slurm does not answer."""
    recorded, run = recorded_in(run_dir / SUBMIT_FOLDER), run_name(str(run_dir))
    named = [RecordedJob(job=str(number), name=run) for number in numbers_of(run_dir)[:_MOST_ASKED]]
    logs = [path] if (path := newest_log(run_dir)) else []
    of_chain = [task.recorded for task in chain_tasks(run_dir, logs)[:_MOST_ASKED]]
    asked = {one.job: one for one in (*(recorded.get(one.job, one) for one in named), *of_chain)}
    found = [(job_facts(one.job, environ), one) for one in asked.values()]
    known = {job.job: job for job, one in found if job and job.is_recorded(one)}
    newest = sorted(known.values(), key=lambda job: (job.submitted or 0, int(job.job.partition("_")[0])), reverse=True)
    return [job for place, job in enumerate(newest) if place < _MOST_JOBS or not job.is_finished]


def _of_folder(run_dir: Path, jobs: Sequence[JobFacts]) -> list[Finding]:
    """Returns findings from the run's files that the table of runs does not show."""
    found = []
    if is_there(run_dir / "STOP"):
        words = "is asked to stop, and stays stopped, by its file STOP; to continue, delete it and submit again"
        found.append(Finding(found=words, todo=f"rm {shlex.quote(str(run_dir / 'STOP'))}"))
    if is_there(run_dir / "submit" / "gave-up"):
        words = "has given up: tries in a row saved nothing new; once it is fixed, submit again"
        found.append(Finding(found=words, todo=f"patchline doctor {shlex.quote(str(run_dir))}"))
    if ended := said_of_last_try(run_dir):
        found.append(Finding(found=ended))
    path = None if _is_done(run_dir) else newest_log(run_dir, jobs)  # a finished run needs no explanation
    with suppress(OSError, InvalidDataError):
        tail = read_tail(path, most_bytes=_LOG_BYTES) if path else None
        text = tail.data.decode(errors="replace") if tail else ""
        said = [(pattern.search(text), words, todo.replace(AGAIN, SAME_COMMAND)) for pattern, _, words, todo in FULL]
        found += [Finding(found=f"its log says: {it[0]}; {words}", todo=todo) for it, words, todo in said if it]
    return found


def _is_done(run_dir: Path) -> bool:
    """Whether the run has made all steps of its job. A run that is extended still has the marker of fewer steps."""
    found = run_at(run_dir, run_dir, time.time()) if is_there(run_dir / "DONE") else None
    return found is not None and found.facts.state == "done"


def outputs_in(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, list[JobFacts]]:
    """Returns the words that are outputs of pending or running jobs, each with its jobs. Runs and chains are left out.
    Returns an empty dictionary if Slurm does not answer."""
    others = [word for word in words if not is_chain(word) and not is_begun(Path(word))]
    try:
        found = {word: queued_with(output_name(word), environ) for word in others}
        facts = {word: [job_facts(one.job, environ) for one in jobs] for word, jobs in found.items()}
    except UserError:
        return {}
    return {word: known for word, jobs in facts.items() if (known := [job for job in jobs if job])}


def output_lines(outputs: Outputs) -> list[str]:
    """Returns lines about each job: its state, the command that fixes a fault, and where its log is."""
    lines = []
    for word, jobs in outputs.items():
        lines.append(printable_name(word))
        for job in jobs:
            found = finding_of(job)
            lines.append(f"  job {job.job}, {printable_name(job.name)}: {printable_name(found.found)}")
            if found.todo:
                lines.append(f"  > {printable_name(found.todo)}")
            if job.log:
                lines.append(f"  its log: {printable_name(job.log)}")
    return lines

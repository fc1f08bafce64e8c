"""`patchline stop` and `save`: ask a run, by files in its folder, to do something.

A stage without a run directory, such as packing, has no such folder: its jobs are found in the queue by what they
write, which may be a URL.
"""

import logging
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.chains.state import is_chain, refuse_chain
from jobs.cluster.queue import JobFacts, is_copied, job_facts
from jobs.cluster.queue_reasons import finding_of
from jobs.cluster.slurm import queued_with
from jobs.output import work_in
from jobs.record import MOST_BYTES
from jobs.reports.ls import run_at
from jobs.submittable import SUBMIT_FOLDER, output_name
from pipeline.runs.facts import RunFacts
from shards.errors import InvalidDataError, UserError
from shards.local_file import read_local_file
from shards.output.terminal import printable_name

Outputs = Mapping[str, Sequence[JobFacts]]


def outputs_in(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, list[JobFacts]]:
    """The words that are no runs and no chains, but what jobs that wait or run are to write, with these jobs. None of
    them if Slurm does not answer."""
    others = [word for word in words if not is_chain(word) and not _is_run(Path(word))]
    try:
        found = {word: queued_with(output_name(word), environ) for word in others}
        facts = {word: [job_facts(one.job, environ) for one in jobs] for word, jobs in found.items()}
    except UserError:
        return {}
    return {word: known for word, jobs in facts.items() if (known := [job for job in jobs if job])}


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("job.yaml", "submit"))


def output_lines(outputs: Outputs) -> list[str]:
    """Each job, what it waits for, where its log is, and the command that fixes it."""
    lines = []
    for word, jobs in outputs.items():
        lines.append(printable_name(word))
        for job in jobs:
            found = finding_of(job)
            lines.append(f"  job {job.job}, {printable_name(job.name)}: {printable_name(found.words)}")
            lines += [f"  > {printable_name(found.todo)}"] * bool(found.todo)
            lines += [f"  its log: {printable_name(job.log)}"] * bool(job.log)
    return lines


def outputs_json(outputs: Outputs) -> list[dict[str, Any]]:
    """One object for each output."""
    return [{"output": word, "jobs": [asdict(job) for job in jobs]} for word, jobs in outputs.items()]


log = logging.getLogger(__name__)


def run(words: list[str], *, command: str) -> int:
    """Does what the command says with the run. UserError for what is no run, or cannot be asked."""
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError(f"usage: patchline {command} RUN")
    run_dir = Path(words[0])
    facts = facts_at(run_dir)
    work_in(run_dir)
    if command == "save":
        _save(run_dir, facts)
    else:
        _stop(run_dir, facts)
    return exit_codes.DONE


def facts_at(run_dir: Path) -> RunFacts:
    """What the folder says. UserError if it is no run."""
    found = run_at(run_dir, run_dir, time.time()) if (run_dir / "job.yaml").exists() else None
    if found is None:
        shown = shlex.quote(str(run_dir))
        refuse_chain(str(run_dir), hint=f", or cancel all of its jobs: `patchline cancel {shown}`")
        raise UserError(
            f"{str(run_dir)!r} is no run: it has no job.yaml; `patchline ls DIR` lists the runs in a folder"
        )
    return found.facts


def _stop(run_dir: Path, facts: RunFacts) -> None:
    if facts.state == "done":
        log.info("%s is done; there is nothing to stop", _shown(run_dir))
        return
    _refuse_copy(run_dir, facts)
    _write(run_dir / "STOP")
    when = "at its next step it saves and stops" if facts.state == "running" else "it stays stopped, in any job"
    log.info("%s: %s; to continue, delete %s and start it again", _shown(run_dir), when, _shown(run_dir / "STOP"))


def _save(run_dir: Path, facts: RunFacts) -> None:
    _refuse_copy(run_dir, facts)
    if facts.state != "running":
        raise UserError(f"{str(run_dir)!r} is {facts.state}, and only a running one can save; see `patchline status`")
    _write(run_dir / "SAVE")
    log.info("%s: it saves at its next step, and goes on", _shown(run_dir))


def _refuse_copy(run_dir: Path, facts: RunFacts) -> None:
    """UserError for a copy that looks as if it ran, because the run did when it was copied."""
    if facts.state == "running" and (original := _original_of(run_dir)):
        raise UserError(
            f"{str(run_dir)!r} is a copy of {original}, which is another run, and what is asked here does not reach "
            "it; give the folder of the run itself"
        )


def _original_of(run_dir: Path) -> str:
    """What a folder is a copy of; empty if it is none. The first line of a run's record names its folder, and each
    submission its inode."""
    with suppress(OSError, InvalidDataError):
        head = read_local_file(run_dir / "job.yaml", most_bytes=MOST_BYTES).decode(errors="replace").partition("\n")[0]
        named = Path(head.split(" ", 3)[-1]).parent  # `# patchline STAGE PATH`
        if named.is_absolute() and (named / "job.yaml").exists() and not named.samefile(run_dir):
            return repr(str(named))
    return "another folder" if is_copied(run_dir / SUBMIT_FOLDER) else ""


def _write(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666))
        os.utime(path)
    except OSError as error:
        raise UserError(
            f"cannot write {str(path)!r}: {error.strerror}; do it as the user who started the run"
        ) from error


def _shown(path: Path) -> str:
    return printable_name(str(path))

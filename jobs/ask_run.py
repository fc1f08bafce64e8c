"""`patchline stop`, `save` and `cancel`: ask a run, by files in its folder or by Slurm, to do something."""

import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from jobs import exit_codes
from jobs.ls import run_at
from jobs.queue_jobs import facts_of, numbers_of
from jobs.slurm import ran
from pipeline.training.run_facts import RunFacts
from shards.errors import UserError
from shards.terminal import printable_name

log = logging.getLogger(__name__)
_MOST_CANCELLED = 256


def run(words: list[str], *, command: str, environ: Mapping[str, str]) -> int:
    """Does what the command says with the run. UserError for what is no run, or cannot be asked."""
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError(f"usage: patchline {command} RUN")
    run_dir = Path(words[0])
    facts = facts_at(run_dir)
    if command == "cancel":
        _cancel(run_dir, environ)
    elif command == "save":
        _save(run_dir, facts)
    else:
        _stop(run_dir, facts)
    return exit_codes.DONE


def facts_at(run_dir: Path) -> RunFacts:
    """What the folder says. UserError if it is no run."""
    found = run_at(run_dir, run_dir, time.time()) if (run_dir / "job.yaml").exists() else None
    if found is None:
        raise UserError(
            f"{str(run_dir)!r} is no run: it has no job.yaml; `patchline ls DIR` lists the runs in a folder"
        )
    return found.facts


def _stop(run_dir: Path, facts: RunFacts) -> None:
    if facts.state == "done":
        log.info("%s is done; there is nothing to stop", _shown(run_dir))
        return
    _write(run_dir / "STOP")
    when = "at its next step it saves and stops" if facts.state == "running" else "it stays stopped, in any job"
    log.info("%s: %s; to continue, delete %s and start it again", _shown(run_dir), when, _shown(run_dir / "STOP"))


def _save(run_dir: Path, facts: RunFacts) -> None:
    if facts.state != "running":
        raise UserError(f"{str(run_dir)!r} is {facts.state}, and only a running one can save; see `patchline status`")
    _write(run_dir / "SAVE")
    log.info("%s: it saves at its next step, and goes on", _shown(run_dir))


def _cancel(run_dir: Path, environ: Mapping[str, str]) -> None:
    """The jobs that wait first: one of a chain would start as the one before it ends."""
    if shutil.which("scancel", path=environ.get("PATH")) is None:
        raise UserError("no scancel on the PATH: run this on a login node of the cluster, or use `patchline stop RUN`")
    jobs = [job for number in numbers_of(run_dir)[:_MOST_CANCELLED] if (job := facts_of(number, environ))]
    jobs = sorted((job for job in jobs if not job.is_finished), key=lambda job: job.state != "PENDING")
    if not jobs:
        log.info("%s has no job that waits or runs", _shown(run_dir))
        return
    for job in jobs:
        done = ran(["scancel", job.job], environ)
        if done.returncode != 0:
            said = " ".join(done.stderr.split())[:300]
            raise UserError(f"scancel {job.job} failed: {said}; cancelled before: see `patchline status {run_dir}`")
        log.info("cancelled job %s, which was %s", job.job, job.state)
    if any(job.state == "RUNNING" for job in jobs):
        log.info("its ranks may have had no time to save; `patchline stop RUN` is what saves first")


def _write(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644))
        os.utime(path)
    except OSError as error:
        raise UserError(
            f"cannot write {str(path)!r}: {error.strerror}; do it as the user who started the run"
        ) from error


def _shown(path: Path) -> str:
    return printable_name(str(path))

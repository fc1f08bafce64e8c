"""`patchline doctor`: says what is missing on this machine for a run and what to do about it, or what went wrong with a
run."""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import exit_codes
from jobs.monitor.ask import why_unreadable
from jobs.monitor.causes import causes_of
from jobs.monitor.evidence import Evidence, evidence_of
from jobs.monitor.gpu_trial import measure
from jobs.output import advice, json_of_checks, put, table_of_checks
from jobs.settings.runs import DoctorJob
from pipeline.machine.checks import local_checks
from pipeline.machine.probes import Probe, run_probes
from shards.errors import Finding, UserError
from shards.output.terminal import columns_of, printable_name, wrapped_text

log = logging.getLogger(__name__)
_MOST_ADVICE = 8
_PIPE_COLUMNS = 120
_TORCH = Probe(
    name="torch",
    words=("torch",),
    todo="import torch by hand to see more; for a driver that hangs, see `nvidia-smi` and `dmesg`, or give more "
    "--seconds to a machine that is slow to start",
)
_DECODER = Probe(name="JPEG decoder", words=("decoder",), todo="run `make setup` again")


def run(job: DoctorJob, *, environ: Mapping[str, str]) -> int:
    """Checks this machine and prints a table or, with --json, one JSON object. If `job` names a run, examines that run
    instead; with --gpu, measures training on the GPU. Returns 0 if there is no fault, else 1."""
    if job.run:
        return look_at(Path(job.run), environ, as_json=job.json)
    if job.gpu:
        return measure(device=job.device, out=Path(job.out), data_url=job.data_url, environ=environ)
    if job.s3_url and not job.s3_url.startswith("s3://"):
        raise UserError(f"--s3-url is {job.s3_url!r}; give s3://bucket/prefix, and a folder as --folder")
    probes = [_TORCH, _DECODER, Probe(name="disk", words=("disk", job.folder), todo="mount it again, or give --folder")]
    if job.s3_url:
        todo = "correct AWS_ENDPOINT_URL, or start the server; see docs/reference/messages.md#storage"
        probes.append(Probe(name="S3", words=("s3", job.s3_url), todo=todo))
    checks = [*local_checks(), *run_probes(probes, seconds=job.seconds)]
    put(json_of_checks(checks) if job.json else table_of_checks(checks, columns=columns_of(sys.stdout)))
    return exit_codes.FAULTS_FOUND if any(one.status == "fault" for one in checks) else exit_codes.DONE


def look_at(run_dir: Path, environ: Mapping[str, str], *, as_json: bool) -> int:
    """Prints the causes of a run's fault. Returns 1 if something is wrong, else 0. Raises UserError if there is no
    run."""
    if why := why_unreadable(run_dir):
        log.warning("what is there is not known: %s; ask its owner for access", why)
    found = evidence_of(run_dir, environ)
    causes = causes_of(found)
    faults = [cause for cause in causes if cause.status == "fault"]
    if as_json:
        line = {
            "run": str(run_dir),
            "state": found.facts.run.state,
            "continued_by": found.next_job.job if found.next_job else None,
            "step": found.facts.run.step,
            "causes": [_as_json(cause) for cause in causes],
        }
        put(json.dumps(line) + "\n")
    else:
        put(text_of(found, causes, columns=columns_of(sys.stdout) or _PIPE_COLUMNS))
    return exit_codes.FAULTS_FOUND if faults else exit_codes.DONE


def _as_json(cause: Finding) -> dict[str, str | bool]:
    return {
        "words": cause.found,
        "evidence": cause.seen,
        "todo": cause.todo,
        "is_fault": cause.status == "fault",
    }


def text_of(found: Evidence, causes: Sequence[Finding], *, columns: int) -> str:
    """Returns the report as text: the numbered faults, then the notes."""
    facts = found.facts
    step = f"{facts.run.step or 0:,}" + (f"/{facts.num_steps:,}" if facts.num_steps else "")
    what = f"{facts.stage} of {facts.recipe.words()}, " if facts.stage else ""
    where = f", step {step}" if facts.stage else ", its record is damaged" if found.damage else ", no record yet"
    lines = [f"{printable_name(facts.name)}: {what}{state_words(found)}{where}"]
    faults = [cause for cause in causes if cause.status == "fault"]
    lines += [] if faults else ["nothing is wrong"]
    for number, cause in enumerate(faults, 1):
        lines += _lines(cause, head=f"{number}. ", columns=columns)
    others = [cause for cause in causes if cause.status != "fault"]
    for cause in others:
        lines += _lines(cause, head="-  ", columns=columns)
    if not found.has_slurm:
        lines.append("no Slurm on this machine, so nothing is known of jobs")
    return "".join(f"{line}\n" for line in lines)


def state_words(found: Evidence) -> str:
    """Returns the run's state, and the job that continues it if it is not running. A run that never started is `not
    started yet` if it has a job, or if Slurm does not answer and it may have one."""
    state, job = found.facts.run.state, found.next_job
    if state == "never started" and (job or found.complaint):
        return "not started yet"
    if job is None or state in ("running", "done"):
        return state
    return f"{'ended by a fault' if state == 'failed' else state}, continued by job {job.job}"


def _lines(cause: Finding, *, head: str, columns: int) -> list[str]:
    parts = [head + cause.found, f"   seen: {cause.seen}"]
    lines = [wrapped_text(printable_name(part), columns, indent="     ") for part in parts]
    return [*lines, *(f"   {line}" for line in advice(cause.todo, columns - 3, most_lines=_MOST_ADVICE))]

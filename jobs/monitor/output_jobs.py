"""The jobs of a stage without a run directory, such as packing, found in the queue by what they write: that
folder, which may be a URL, has nothing of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs.chains.state import is_chain
from jobs.cluster.queue import JobFacts, facts_of
from jobs.cluster.queue_reasons import finding_of
from jobs.cluster.slurm import queued_with
from jobs.submittable import output_name
from shards.errors import UserError
from shards.output.terminal import printable_name

Outputs = Mapping[str, Sequence[JobFacts]]


def outputs_in(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, list[JobFacts]]:
    """The words that are no runs and no chains, but what jobs that wait or run are to write, with these jobs. None of
    them if Slurm does not answer."""
    others = [word for word in words if not is_chain(word) and not _is_run(Path(word))]
    try:
        found = {word: queued_with(output_name(word), environ) for word in others}
        facts = {word: [facts_of(one.job, environ) for one in jobs] for word, jobs in found.items()}
    except UserError:
        return {}
    return {word: known for word, jobs in facts.items() if (known := [job for job in jobs if job])}


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("job.yaml", "submit"))


def output_lines(outputs: Outputs) -> list[str]:
    """Each job, what it waits for, where its log is, and the command that mends it."""
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

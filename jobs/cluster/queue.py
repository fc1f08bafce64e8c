"""What Slurm knows of a run's jobs: asked of squeue, scontrol and sinfo, so that no accounting database is needed.

The numbers of the jobs are from the run's own folder: `patchline submit` and the batch script leave them there.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.cluster.slurm import UNKNOWN_JOB, ran
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import object_in, read_tail
from shards.output.terminal import printable_name

FINISHED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "DEADLINE",
    "BOOT_FAIL",
)
SUBMISSIONS = "submitted.jsonl"
_RECORDS = (SUBMISSIONS, "tries.jsonl")
_EXITS = re.compile(r"exits-([1-9]\d{0,9})-\d{1,9}-\d{1,9}")  # of a try: job, start, try
_TAIL_BYTES, _MOST_TEXT = 1 << 16, 1 << 20
_FIELD = re.compile(r"(?:^|\s)(\w+(?::\w+)*)=(.*?)(?=\s\w+(?::\w+)*=|$)")
_MOST_NODES, _MOST_TASKS = 1000, 10_000
_MOST_NUMBER = 1 << 32
_MOST_RECORDED = 64


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """A job, in Slurm's own words. `number`: of a task of an array its own one, `job` then being `12_3`. `starts`: how
    often it was requeued. `reason`: why it waits or ended, empty if Slurm gives none. `nodes`: such as `n[1-2]`. Times
    are Slurm's text, empty if unknown. `log`: the file of its messages, that of its output if they are one."""

    job: str
    number: str
    name: str
    state: str
    reason: str
    nodes: str
    starts: int
    run_time: str
    time_limit: str
    start_time: str
    dependency: str
    exit_code: str
    log: str

    @property
    def is_finished(self) -> bool:
        """Whether it neither waits nor runs."""
        return self.state in FINISHED


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A node: its state, such as `down*`, and the reason that somebody or Slurm gave."""

    name: str
    state: str
    reason: str


def numbers_of(run_dir: Path) -> list[int]:
    """The jobs that RUN/submit tells of, newest first; damaged lines are passed over."""
    found = set(started_in(run_dir))
    for name in _RECORDS:
        found |= {number for line in _lines(run_dir / "submit" / name) if (number := _number_in(line))}
    return sorted(found, reverse=True)


def submitted_in(folder: Path) -> list[str]:
    """The newest jobs that were submitted in this folder, such as RUN/submit, by whatever path: not those of the folder
    that it is a copy of."""
    try:
        here = folder.stat().st_ino
    except OSError:
        return []
    numbers = [_number_in(line) for line in _lines(folder / SUBMISSIONS) if line.get("folder") == here]
    return [str(number) for number in reversed(numbers) if number][:_MOST_RECORDED]


def is_copied(folder: Path) -> bool:
    """Whether the newest job was submitted in another folder, of which this one is a copy."""
    folders = [line["folder"] for line in _lines(folder / SUBMISSIONS) if "folder" in line]
    return bool(folders) and folders[-1] != folder.stat().st_ino


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        tail = read_tail(path, most_bytes=_TAIL_BYTES)
    except (OSError, InvalidDataError):
        return []
    return [found for line in tail.data.split(b"\n") if (found := object_in(line))] if tail else []


def _number_in(line: Mapping[str, Any]) -> int:
    """The job of a line; 0 without one."""
    number = line.get("job")
    return number if type(number) is int and 0 < number < _MOST_NUMBER else 0


def started_in(run_dir: Path) -> list[int]:
    """The jobs that have started in a run's folder, newest first: stage.sbatch makes a folder for each try."""
    try:
        names = [entry.name for entry in os.scandir(run_dir / "submit")]
    except OSError:
        return []
    numbers = {int(match[1]) for name in names if (match := _EXITS.fullmatch(name))}
    return sorted((number for number in numbers if number < _MOST_NUMBER), reverse=True)


def job_facts(job: str, environ: Mapping[str, str], *, seconds: float = 0.0) -> JobFacts | None:
    """A job, `12` or `12_3`; None if Slurm does not know it, or not any more. UserError if Slurm's programs are
    missing, or Slurm does not answer, at the latest after this number of seconds (0: two minutes)."""
    found = tasks_of(job, environ, seconds=seconds)
    return next((one for one in found if one.number == job), found[0] if found else None)


def tasks_of(job: str, environ: Mapping[str, str], *, seconds: float = 0.0) -> list[JobFacts]:
    """The tasks of an array, or the one job; none if Slurm does not know it. The tasks that wait are one of them, such
    as `12_[3-6]`. UserError if Slurm does not answer."""
    done = ran(["scontrol", "--oneliner", "show", "job", job], environ, seconds=seconds)
    if done.returncode != 0 and not UNKNOWN_JOB.search(done.stdout[:_MOST_TEXT] + done.stderr[:_MOST_TEXT]):
        said = " ".join(done.stderr.split())[:200]
        raise UserError(f"scontrol does not answer: {printable_name(said)}; try again when Slurm does")
    lines = done.stdout.split("\n", _MOST_TASKS) if done.returncode == 0 else []
    return [one for line in lines if (one := parsed(line))]


def parsed(text: str) -> JobFacts | None:
    """A job from the first line of `scontrol --oneliner show job`. Pure."""
    line = text[:_MOST_TEXT].partition("\n")[0]
    found = dict(
        reversed(_FIELD.findall(line))
    )  # the first wins: a comment, which comes later, may have anything in it
    if not found.get("JobId") or not found.get("JobState"):
        return None
    known = {name: value if value not in ("(null)", "None", "N/A", "Unknown") else "" for name, value in found.items()}
    starts = known.get("Restarts", "")
    return JobFacts(
        job=_name_of(known),
        number=known["JobId"],
        name=known.get("JobName", ""),
        state=known["JobState"],
        reason=known.get("Reason", ""),
        nodes=known.get("NodeList", ""),
        starts=int(starts) if starts.isascii() and starts.isdecimal() and len(starts) < 10 else 0,
        run_time=known.get("RunTime", ""),
        time_limit=known.get("TimeLimit", ""),
        start_time=known.get("StartTime", ""),
        dependency=known.get("Dependency", ""),
        exit_code=known.get("ExitCode", ""),
        log=known.get("StdErr", "") or known.get("StdOut", ""),
    )


def _name_of(known: Mapping[str, str]) -> str:
    """The job's name as squeue shows it: 12, 12_3, or 12_[4-9] of tasks that wait."""
    array, task = known.get("ArrayJobId", ""), known.get("ArrayTaskId", "")
    if not array or not task:
        return known["JobId"]
    return f"{array}_{task}" if task.isdecimal() else f"{array}_[{task.partition('%')[0]}]"


def nodes_in(nodes: str, environ: Mapping[str, str]) -> list[NodeFacts]:
    """The nodes of a list such as `n[1-2]`; empty if Slurm does not answer."""
    if not nodes:
        return []
    done = ran(["sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N|%T|%E"], environ)
    lines = [line.split("|", 2) for line in done.stdout.splitlines()[:_MOST_NODES]] if done.returncode == 0 else []
    found = {line[0]: NodeFacts(name=line[0], state=line[1], reason=line[2]) for line in lines if len(line) == 3}
    return list(found.values())

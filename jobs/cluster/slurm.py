"""Runs Slurm's programs, and reads what they and a run's folder say about jobs.

Only this file decides what the programs are given, how long they may take, and what their error messages mean. No
accounting database is needed, since `patchline submit` and the batch script record the numbers of a run's jobs in
RUN/submit.
"""

import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Any

from jobs.cluster.batch_script import tasks_in
from jobs.cluster.secret_names import is_passed_on, is_secret
from jobs.cluster.settings import Names
from shards.config_values import shown_value
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import object_in, read_tail
from shards.files.looks import patiently
from shards.output.terminal import printable_name

log = logging.getLogger(__name__)
_ANSWER_SECONDS = 120
_SILENT_SECONDS, _MOST_CHARACTERS = 30.0, 400
_ENDING_SECONDS, _PAUSE_SECONDS = 90.0, 1.0
_JOB_LINE = re.compile(r"([0-9]{1,10}(?:_(?:[0-9]+|\[[0-9,%.-]+\]))?) ([A-Z_]+) (\S+)")
_FIELD = re.compile(r"(\w+)=(\S*)")
_STARTING = ("sbatch", "srun")
_SQUEUE = ("squeue", "--noheader", "--format=%i %T %k")
# The error of scontrol and squeue for a job or task that Slurm does not know or has forgotten.
UNKNOWN_JOB = re.compile(r"\binvalid job[ _]?id\b|\bjob \S+ not found\b", re.IGNORECASE)
_SILENCE = re.compile(
    "configuration source|contact slurm controller|timed out|zero bytes were transmitted|connection refused",
    re.IGNORECASE,
)
# Variables that Slurm and stage.sbatch set for one job. Jobs that this job submits must not inherit them.
_OF_JOB = re.compile(
    r"SLURM_(?!CONF$)|PMI|PMIX|MASTER_(ADDR|PORT)$|PATCHLINE_(STATE|MARGIN|RETRIES|REQUEUE|SPARES|LAUNCHER|S3_ANSWERED)$"
)
# A user's preferences change what these programs answer and do: SQUEUE_STATES would hide a run's job.
_OF_TOOLS = re.compile(r"(SQUEUE|SINFO|SACCT|SCANCEL|SCONTROL)_")
# A variable of sbatch replaces the same option in a script. Only variables that say where or for whom a job runs may do
# so.
_OF_SBATCH = re.compile(r"SBATCH_(?!(ACCOUNT|CLUSTERS|CONSTRAINT|PARTITION|QOS|RESERVATION|WCKEY)$)")
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
_NO_JOBS: Mapping[str, str] = MappingProxyType({})
SUBMISSIONS = "submitted.jsonl"
_RECORDS = (SUBMISSIONS, "tries.jsonl")
_EXITS = re.compile(r"exits-([1-9]\d{0,9})-\d{1,9}-\d{1,9}")  # a try's folder: job, start and try
_TAIL_BYTES, _MOST_TEXT = 1 << 16, 1 << 20
_FIELD_OF_JOB = re.compile(r"(?:^|\s)(\w+(?::\w+)*)=(.*?)(?=\s\w+(?::\w+)*=|$)")
_MOST_NODES, _MOST_TASKS = 1000, 10_000
_MOST_NUMBER = 1 << 32
_MOST_RECORDED = 64


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job in the queue. `job`: its number `12`, or `12_3` or `12_[4-7]` in an array. `state`: Slurm's word, such as
    RUNNING. `names`: the parts of its comment, which are separated by commas: RUN, or LIFE,RUN,CHAIN,TAG for a job of a
    chain. LIFE tells the chain's jobs from those of an earlier chain in the same folder. An array of runs names each
    run with its task: LIFE,RUN@0,RUN@1,CHAIN,TAG."""

    job: str
    state: str
    names: tuple[str, ...] = ()

    @property
    def tag(self) -> str:
        """The tag of a chain's job, which is its last name."""
        return self.names[-1] if len(self.names) > 1 else ""

    @property
    def number(self) -> int:
        """The number of the job, or of its array."""
        return int(self.job.partition("_")[0])

    def part_as(self, job: str, name: str = "") -> "QueuedJob | None":
        """Returns the job if `job` is its number, or only the task that `job` names, such as `12_3`. Returns None if
        `job` is another job, or if this job does not have the `name`: Slurm may have used the number again."""
        number, is_task, task = job.partition("_")
        if str(self.number) != number or (name and name not in self.names):
            return None
        if not is_task:
            return self
        return replace(self, job=job) if any(int(task) in found for found in tasks_in(self.job)) else None

    def part_of(self, name: str) -> "QueuedJob | None":
        """Returns the job if it has this name. If only one of its tasks has the name, returns that task. Returns None
        if neither the job nor any of its tasks has the name."""
        for word in self.names:
            own, is_task, task = word.partition("@")
            if own == name and not is_task:
                return self
            if own == name and any(int(task) in found for found in tasks_in(self.job)):
                return replace(self, job=f"{self.number}_{task}")
        return None


def need_sbatch(environ: Mapping[str, str]) -> None:
    """Raises UserError if there is no sbatch on the PATH."""
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        raise UserError("no sbatch on the PATH: run this on a login node of the cluster, or with --dry-run anywhere")


def unused_options(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of sbatch's variables that would replace options of a job, and are not given to sbatch."""
    return sorted(filter(_OF_SBATCH.match, environ))


def ran(
    words: list[str],
    environ: Mapping[str, str],
    text: str = "",
    *,
    seconds: float = 0.0,
    inherited: Collection[str] = (),
) -> "subprocess.CompletedProcess[str]":
    """Runs one of Slurm's programs, with `text` as its input. Slurm stores the environment that sbatch and srun pass on
    to jobs, so these two get only variables that are known to hold no secret, and those in `inherited`. The other
    programs get all variables that do not look like secrets. The user's preferences for Slurm's programs are left out.
    `seconds`: how long the program may take; 0: two minutes. Raises UserError if the program is missing or does not
    answer in time."""
    limit = seconds or _ANSWER_SECONDS
    clean = {
        name: value
        for name, value in environ.items()
        if not any(kind.match(name) for kind in (_OF_JOB, _OF_TOOLS, _OF_SBATCH))
        and (is_passed_on(name, value, named=inherited) if words[0] in _STARTING else not is_secret(name, value))
    }
    if words[0] == "squeue":
        clean["SLURM_BITSTR_LEN"] = "0"  # otherwise squeue cuts the list of an array's tasks at 64 characters
    try:
        return subprocess.run(
            words,
            env=clean,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
        )
    except OSError as error:
        raise UserError(
            f"cannot run {words[0]}: {error.strerror}", todo="it comes with Slurm, as sbatch does"
        ) from error
    except subprocess.TimeoutExpired:
        raise UserError(f"{words[0]} has not answered for {limit:g} s", todo="try again when Slurm does") from None


def in_one_line(error: str) -> str:
    """Returns an error of one of Slurm's programs in one line, escaped. A long one is cut between two words."""
    return printable_name(shorten(error, _MOST_CHARACTERS, placeholder=" ...", break_on_hyphens=False))


def slurms_answer(
    words: list[str],
    environ: Mapping[str, str],
    text: str = "",
    *,
    what: str = "this job",
    names: Names = Names.OF_SUBMIT,
) -> str:
    """Returns Slurm's answer to `sbatch --test-only`, in one line. Raises UserError with a remedy if Slurm refuses the
    job or does not answer. `what`: what the message calls the job."""
    done = ran(["sbatch", "--test-only", *words], environ, text=text)
    said = " ".join(line.removeprefix("sbatch: ").strip() for line in done.stderr.splitlines() if line.strip())
    if done.returncode == 0:
        return printable_name(said)
    reason = in_one_line(said.removeprefix("error: "))
    if _SILENCE.search(said):
        todo = "run this on a login node of the cluster, once its controller answers (`scontrol ping`)"
        raise UserError(f"Slurm does not answer: {reason}", todo=todo)
    raise UserError(f"Slurm would refuse {what}: {reason}", todo=_remedy(said, names))


def submitted(words: list[str], environ: Mapping[str, str], *, inherited: Collection[str] = ()) -> int:
    """Runs sbatch and returns the job's number. `inherited`: the names in `environment:` of the cluster's settings.
    Raises UserError with sbatch's message if it fails."""
    done = ran(["sbatch", "--parsable", *words], environ, inherited=inherited)
    if done.returncode != 0:
        raise UserError(f"sbatch failed: {in_one_line(done.stderr)}")
    job = done.stdout.strip().partition(";")[0]
    if not job.isascii() or not job.isdecimal():
        raise UserError(f"sbatch answered {shown_value(job)} instead of a job's number", todo="see squeue")
    return int(job)


def queued(environ: Mapping[str, str], *, with_ended: bool = False) -> list[QueuedJob]:
    """Returns this user's pending and running jobs, and with `with_ended` also those that ended a short time ago.
    Raises UserError if Slurm does not answer."""
    states = ["--states=all"] if with_ended else []
    return _jobs_in(ran([*_SQUEUE, "--me", *states], environ))


def _jobs_in(answer: "subprocess.CompletedProcess[str]") -> list[QueuedJob]:
    if answer.returncode != 0:
        raise UserError(f"squeue does not answer: {in_one_line(answer.stderr)}", todo="try again when Slurm does")
    found = [_JOB_LINE.fullmatch(line.rstrip()) for line in answer.stdout.splitlines()]
    return [QueuedJob(job=one[1], state=one[2], names=tuple(one[3].split(","))) for one in found if one]


def queued_with(name: str, environ: Mapping[str, str], *, recorded: Mapping[str, str] = _NO_JOBS) -> list[QueuedJob]:
    """Returns this user's pending and running jobs and array tasks with this name, and those of the `recorded` jobs
    (`12` or `12_3`, each with its name) that are still in the queue. Recorded jobs may belong to a colleague, or have
    another name because the folder had another path."""
    own = queued(environ)
    found = [part for one in own if (part := one.part_of(name))]
    known = {one.number for one in found}
    others = [job for job in recorded if int(job.partition("_")[0]) not in known]
    if others:
        answer = ran([*_SQUEUE, f"--jobs={','.join(job.partition('_')[0] for job in others)}"], environ)
        if answer.returncode == 0 or not UNKNOWN_JOB.search(answer.stderr):
            there = _jobs_in(answer)
            found += [part for job in others for one in there if (part := one.part_as(job, recorded[job]))]
    return found


def settled_with(name: str, environ: Mapping[str, str], *, recorded: Mapping[str, str] = _NO_JOBS) -> list[QueuedJob]:
    """Returns the same as `queued_with`, but waits while all of these jobs are ending. A cancelled job is gone
    afterwards, and a requeued one is pending. Raises UserError if they are still ending after 90 seconds."""
    deadline, has_said = time.monotonic() + _ENDING_SECONDS, False
    while True:
        found = queued_with(name, environ, recorded=recorded)
        ending = [one.job for one in found if one.state == "COMPLETING"]
        if not ending or len(ending) < len(found):
            return found
        if time.monotonic() > deadline:
            raise UserError(f"job {ending[0]} is still ending", todo="try again once `squeue --me` does not show it")
        if not has_said:
            log.info("job %s is ending: waiting for it", ending[0])
            has_said = True
        time.sleep(_PAUSE_SECONDS)


def silence(environ: Mapping[str, str]) -> str:
    """Returns the reason why Slurm cannot be asked from here: there is no sbatch, or no controller answers. Returns an
    empty string if Slurm can be asked."""
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        return "no sbatch on this machine"
    try:
        done = ran(["squeue", "--me", "--noheader"], environ, seconds=_SILENT_SECONDS)
    except UserError as error:
        return f"Slurm does not answer ({error})"
    if done.returncode == 0:
        return ""
    reason = (done.stderr.strip().splitlines() or ["squeue failed"])[-1].removeprefix("squeue: ")
    return f"Slurm does not answer ({in_one_line(reason)})"


def cancelled(jobs: list[str], environ: Mapping[str, str]) -> None:
    """Cancels pending or running jobs. Raises UserError if scancel fails."""
    done = ran(["scancel", *jobs], environ)
    if done.returncode != 0:
        raise UserError(f"scancel failed: {in_one_line(done.stderr)}", todo="try again when Slurm answers")


def partitions(environ: Mapping[str, str], name: str = "") -> list[dict[str, str]]:
    """Returns the fields that scontrol shows for every partition, or for the partition with this name. Returns an empty
    list if scontrol fails. Raises UserError if scontrol is missing or does not answer in time."""
    done = ran(["scontrol", "--oneliner", "show", "partition", *([name] if name else [])], environ)
    return [dict(_FIELD.findall(line)) for line in done.stdout.splitlines()] if done.returncode == 0 else []


def most_array_tasks(environ: Mapping[str, str]) -> int:
    """Returns how many tasks one array may have: Slurm's MaxArraySize, or 1,001 if scontrol does not show it. Raises
    UserError if scontrol is missing or does not answer in time."""
    answer = ran(["scontrol", "show", "config"], environ)
    found = re.search(r"^MaxArraySize\s*=\s*([0-9]{1,9})\s*$", answer.stdout, re.MULTILINE)
    return max(1, int(found[1])) if found else 1001


def _remedy(said: str, names: Names) -> str:
    found = said.lower()
    if "account" in found or "qos" in found:
        return "correct `account:` and `qos:` in your cluster's settings"
    if "partition" in found:
        settings = "`partition:`, or `cpu_partition:` of jobs without GPUs, in your cluster's settings"
        return f"`sinfo -s` lists the partitions: correct {settings}"
    if "time limit" in found:
        return f"lower {names.time}; `sinfo -o '%P %l'` lists the limits"
    if "memory" in found:
        options = "--mem, --mem-per-cpu or --mem-per-gpu in `options:` of your cluster's settings"
        return f"lower {options}, or give `all_memory: no`; `sinfo -o '%P %m'` lists each node's MB"
    if "node" in found or "processor" in found or "cpu" in found:
        # If a job asks for too much memory, --test-only says only that there is no such node.
        asked = f"{names.nodes}, gpus_per_node, cpus_per_rank, or --mem in `options:`"
        return f"lower {asked}; `sinfo -o '%P %D %c %m %G'` lists what there is"
    return "correct your cluster's settings, or the flags of submit"


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What scontrol says about a job. `number`: its number. For a task of an array, `job` is `12_3` and `number` is the
    task's own, such as 15. `starts`: how many times the job was requeued. `reason`: why it waits or how it ended, empty
    if Slurm gives no reason. `nodes`: a list such as `n[1-2]`. Times are Slurm's text, empty if unknown. `log`: the
    file of its error output. `comment`: the names of a job that patchline submitted, as in `QueuedJob`."""

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
    comment: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether the job has ended."""
        return self.state in FINISHED

    def is_of(self, name: str, run: str = "") -> bool:
        """Whether this is the job that was recorded with `name`, and not another job to which Slurm has given its
        number since. If no name was recorded, as for a script that plain sbatch started, the job must either belong to
        `run` or not be patchline's at all."""
        names = self.comment.split(",")
        if name:
            return name in names
        words = [word.partition("@")[0] for word in names]
        return run in words or not any(word.startswith("patchline-") for word in words)


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A node, its state (such as `down*`), and the reason that an administrator or Slurm gave for the state."""

    name: str
    state: str
    reason: str


def numbers_of(run_dir: Path) -> list[int]:
    """Returns the jobs that RUN/submit mentions, newest first. Damaged lines are skipped, and so are files that this
    user has no access to. Raises UserError if the storage fails for two minutes."""
    found = set(started_in(run_dir))
    for name in _RECORDS:
        found |= {number for line in _open_lines(run_dir / "submit" / name) if (number := _number_in(line))}
    return sorted(found, reverse=True)


def names_in(folder: Path) -> dict[str, str]:
    """Returns the jobs that were submitted from this folder or a copy of it, each with its name in the queue. Returns
    no jobs if this user has no access to their record. Raises UserError if the storage fails for two minutes."""
    lines = [line for line in _open_lines(folder / SUBMISSIONS) if _number_in(line)]
    return {str(_number_in(line)): str(line.get("name", "")) for line in lines}


def submitted_in(folder: Path) -> dict[str, str]:
    """Returns the last 64 jobs that were submitted in a folder such as RUN/submit, newest first. Jobs submitted through
    another path to the folder count. In a copy of a folder, jobs that were submitted in the original do not count.
    Raises UserError if the folder or the record of its jobs cannot be read: a job that is not known about would be
    submitted again."""
    here = _inode(folder)
    lines = [line for line in _lines(folder / SUBMISSIONS) if line.get("folder") == here and _number_in(line)]
    newest = list(reversed(lines))[:_MOST_RECORDED]
    return {str(_number_in(line)): str(line.get("name", "")) for line in newest}


def is_copied(folder: Path) -> bool:
    """Whether this folder is a copy of the one in which the newest job was submitted."""
    folders = [line["folder"] for line in _open_lines(folder / SUBMISSIONS) if "folder" in line]
    return bool(folders) and folders[-1] != _inode(folder)


def _inode(folder: Path) -> int:
    """Returns the inode of a folder, or 0 if there is no folder. Raises UserError if nobody can tell."""
    try:
        return patiently(folder, folder.stat).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise _unknown_jobs(folder, error) from error


def _open_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the same as `_lines`, and no lines if this user has no access to the file."""
    try:
        return _lines(path)
    except UserError as error:
        if isinstance(error.__cause__, PermissionError):
            return []
        raise


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns the usable lines at the end of a file; no lines if the file is missing. Waits while the storage fails.
    Raises UserError if the file cannot be read."""
    try:
        tail = patiently(path, lambda: read_tail(path, most_bytes=_TAIL_BYTES))
    except (NotADirectoryError, InvalidDataError):
        return []
    except OSError as error:
        raise _unknown_jobs(path, error) from error
    return [found for line in tail.data.split(b"\n") if (found := object_in(line))] if tail else []


def _unknown_jobs(path: Path, error: OSError) -> UserError:
    is_denied = isinstance(error, PermissionError)
    todo = "ask its owner for access" if is_denied else "try again once the storage answers"
    return UserError(f"{str(path)!r} cannot be read ({error.strerror}), so the run's jobs are not known", todo=todo)


def _number_in(line: Mapping[str, Any]) -> int:
    """Returns the job's number in a line, or 0."""
    number = line.get("job")
    return number if type(number) is int and 0 < number < _MOST_NUMBER else 0


def started_in(run_dir: Path) -> list[int]:
    """Returns the jobs that have started in a run's folder, newest first. stage.sbatch makes a folder for each try."""
    try:
        names = [entry.name for entry in os.scandir(run_dir / "submit")]
    except OSError:
        return []
    numbers = {int(match[1]) for name in names if (match := _EXITS.fullmatch(name))}
    return sorted((number for number in numbers if number < _MOST_NUMBER), reverse=True)


def job_facts(job: str, environ: Mapping[str, str], *, seconds: float = 0.0) -> JobFacts | None:
    """Returns what Slurm knows about a job, `12` or `12_3`. Returns None if Slurm does not know it or has forgotten it.
    Raises UserError if Slurm's programs are missing, or do not answer within `seconds` (0: two minutes)."""
    found = tasks_of(job, environ, seconds=seconds)
    return next((one for one in found if one.number == job), found[0] if found else None)


def tasks_of(job: str, environ: Mapping[str, str], *, seconds: float = 0.0) -> list[JobFacts]:
    """Returns the tasks of an array, or the job itself. Pending tasks share one entry, such as `12_[3-6]`. Returns an
    empty list if Slurm does not know the job. Raises UserError if Slurm does not answer."""
    done = ran(["scontrol", "--oneliner", "show", "job", job], environ, seconds=seconds)
    if done.returncode != 0 and not UNKNOWN_JOB.search(done.stdout[:_MOST_TEXT] + done.stderr[:_MOST_TEXT]):
        said = in_one_line(done.stderr)
        raise UserError(f"scontrol does not answer: {said}", todo="try again when Slurm does")
    lines = done.stdout.split("\n", _MOST_TASKS) if done.returncode == 0 else []
    return [one for line in lines if (one := parsed(line))]


def parsed(text: str) -> JobFacts | None:
    """Reads a job from the first line of `scontrol --oneliner show job`. Returns None if it shows no job. Pure."""
    line = text[:_MOST_TEXT].partition("\n")[0]
    # The first field of a name counts, since the comment, which comes later, may contain anything.
    found = dict(reversed(_FIELD_OF_JOB.findall(line)))
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
        comment=known.get("Comment", "").strip(),  # a space follows it
    )


def _name_of(known: Mapping[str, str]) -> str:
    """Returns the job's name as squeue shows it: 12, 12_3, or 12_[4-9] for pending tasks."""
    array, task = known.get("ArrayJobId", ""), known.get("ArrayTaskId", "")
    if not array or not task:
        return known["JobId"]
    return f"{array}_{task}" if task.isdecimal() else f"{array}_[{task.partition('%')[0]}]"


def nodes_in(nodes: str, environ: Mapping[str, str]) -> list[NodeFacts]:
    """Returns what sinfo says about the nodes of a list such as `n[1-2]`. Returns an empty list if `nodes` is empty or
    sinfo fails. Raises UserError if sinfo is missing or does not answer in time."""
    if not nodes:
        return []
    done = ran(["sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N|%T|%E"], environ)
    lines = [line.split("|", 2) for line in done.stdout.splitlines()[:_MOST_NODES]] if done.returncode == 0 else []
    found = {line[0]: NodeFacts(name=line[0], state=line[1], reason=line[2]) for line in lines if len(line) == 3}
    return list(found.values())

"""Runs Slurm's programs, and reads what they say about jobs.

Only this file decides what the programs are given, how long they may take, and what their error messages mean.
"""

import logging
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

from jobs.cluster.batch_script import tasks_in
from jobs.cluster.recorded_jobs import RecordedJob
from jobs.cluster.secret_names import is_passed_on, is_secret
from jobs.cluster.settings import ClusterConfig, Names
from shards.config_values import shown_value
from shards.errors import UserError
from shards.output.terminal import printable_name

log = logging.getLogger(__name__)
_ANSWER_SECONDS = 120
_SILENT_SECONDS, _MOST_CHARACTERS = 30.0, 400
_ENDING_SECONDS, _PAUSE_SECONDS = 90.0, 1.0
_JOB_LINE = re.compile(r"([0-9]{1,10}(?:_(?:[0-9]+|\[[0-9,%.-]+\]))?) ([A-Z_]+) ([0-9]{1,10}) (\S+) (.+)")
_FIELD = re.compile(r"(\w+)=(\S*)")
_STARTING = ("sbatch", "srun")
_SQUEUE = ("squeue", "--noheader", "--format=%i %T %U %V %k")
# The error of scontrol and squeue for a job or task that Slurm does not know or has forgotten.
UNKNOWN_JOB = re.compile(r"\binvalid job[ _]?id\b|\bjob \S+ not found\b", re.IGNORECASE)
_UNAVAILABLE = "Requested node configuration is not available"
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
# A variable of sbatch replaces the same option in a script. Only these, which say where or for whom a job runs, may do
# so, and only if the cluster's settings leave it open.
_OF_SHELL = ("account", "partition", "qos", "reservation")
_OF_SBATCH = re.compile(rf"SBATCH_(?!({'|'.join(_OF_SHELL).upper()})$)")
_OTHER_CLUSTER = "SLURM_CLUSTERS"  # not given to any program: the job would be on a cluster that nobody asks about it
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
_MOST_TEXT = 1 << 20
_FIELD_OF_JOB = re.compile(r"(?:^|\s)(\w+(?::\w+)*)=(.*?)(?=\s\w+(?::\w+)*=|$)")
_MOST_NODES, _MOST_TASKS = 1000, 10_000
_TIME, _USER = re.compile(r"[0-9]{1,11}"), re.compile(r"\(([0-9]{1,10})\)$")  # UserId=root(0)


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job in the queue. `job`: its number `12`, or `12_3` or `12_[4-7]` in an array. `state`: Slurm's word, such as
    RUNNING. `user`: the number of its user. `submitted`: its submit time in Unix seconds; None if Slurm's answer is not
    understood. `names`: the parts of its comment, which are separated by commas: RUN, or LIFE,RUN,CHAIN,TAG for a job
    of a chain. LIFE tells the chain's jobs from those of an earlier chain in the same folder. An array of runs names
    each run with its task: LIFE,RUN@0,RUN@1,CHAIN,TAG."""

    job: str
    state: str
    user: int | None = None
    submitted: int | None = None
    names: tuple[str, ...] = ()

    @property
    def tag(self) -> str:
        """The tag of a chain's job, which is its last name."""
        return self.names[-1] if len(self.names) > 1 else ""

    @property
    def number(self) -> int:
        """The number of the job, or of its array."""
        return int(self.job.partition("_")[0])

    def part_as(self, recorded: RecordedJob, environ: Mapping[str, str]) -> "QueuedJob | None":
        """Returns the job if it is the recorded one, or only the task that was recorded, such as `12_3`. Otherwise
        returns None: Slurm may have used the number again. Asks Slurm whether a job with another submit time was
        requeued, and raises UserError if it does not answer."""
        number, is_task, task = recorded.job.partition("_")
        if str(self.number) != number or (is_task and not any(int(task) in found for found in tasks_in(self.job))):
            return None
        num_requeues = 0
        if None not in (recorded.submitted, self.submitted) and recorded.submitted != self.submitted:
            facts = job_facts(number, environ)
            num_requeues = facts.starts if facts else 0
        if not recorded.is_job(self.names, user=self.user, submitted=self.submitted, num_requeues=num_requeues):
            return None
        return replace(self, job=recorded.job) if is_task else self

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


def with_variables(cluster: ClusterConfig, environ: MutableMapping[str, str]) -> ClusterConfig:
    """Returns the settings, and takes from SBATCH_ACCOUNT, _PARTITION, _QOS and _RESERVATION what they leave open.
    Removes the other variables of sbatch from `environ`, because sbatch would prefer them to the options of a script.
    Logs the names of both. Raises UserError if a value that is used is not allowed."""
    # sbatch would prefer SBATCH_PARTITION in jobs for `cpu_partition`, too.
    named = {name: getattr(cluster, name, "") or getattr(cluster, f"cpu_{name}", "") for name in _OF_SHELL}
    options = [option.removeprefix("--").partition("=")[0] for option in cluster.options]
    found = {
        field: value
        for field in _OF_SHELL
        if (value := environ.get(f"SBATCH_{field.upper()}"))
        and not named.get(field)
        and not any(map(field.startswith, options))  # sbatch accepts abbreviated options
    }
    used = [f"SBATCH_{field.upper()}" for field in found]
    unused = sorted(name for name in environ if name.startswith("SBATCH_") or name == _OTHER_CLUSTER)
    if unused := [name for name in unused if name not in used]:
        log.info(
            "not given to sbatch: %s; the cluster's settings and the flags of submit say this, and `options:` of the "
            "settings takes any other option",
            ", ".join(map(printable_name, unused)),
        )
    for name in unused:
        del environ[name]
    if not found:
        return cluster
    log.info(
        "used from your shell, since the cluster's settings leave it open: %s",
        ", ".join(printable_name(f"{name}={environ[name]}") for name in used),
    )
    changes: dict[str, Any] = dict(found)
    if reservation := changes.pop("reservation", ""):
        changes["options"] = (*cluster.options, f"--reservation={reservation}")
    try:
        return replace(cluster, **changes)
    except UserError as error:
        raise UserError(f"{' or '.join(used)} of your shell cannot be used: {error}") from None


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
    if words[0] in ("squeue", "scontrol"):
        clean["SLURM_TIME_FORMAT"] = "%s"  # otherwise a time lacks its zone, and is ambiguous when the clocks go back
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
    job or does not answer. `what`: what the message calls the job.

    `--test-only` also refuses jobs that would only wait, because nodes are down or drained. If there are such nodes,
    its refusal is a warning.
    """
    done = ran(["sbatch", "--test-only", *words], environ, text=text)
    said = " ".join(line.removeprefix("sbatch: ").strip() for line in done.stderr.splitlines() if line.strip())
    if done.returncode == 0:
        return printable_name(said)
    reason = in_one_line(said.removeprefix("error: "))
    if _SILENCE.search(said):
        todo = "run this on a login node of the cluster, once its controller answers (`scontrol ping`)"
        raise UserError(f"Slurm does not answer: {reason}", todo=todo)
    if _UNAVAILABLE in said and (nodes := _unavailable_nodes(environ)):
        log.warning(
            "Slurm cannot start %s now (%s): %s are down or drained, and it may wait for them; `sinfo -R` says why",
            what,
            reason,
            nodes,
        )
        return reason
    raise UserError(f"Slurm would refuse {what}: {reason}", todo=_remedy(said, names))


def _unavailable_nodes(environ: Mapping[str, str]) -> str:
    """Returns the nodes that are down, drained or failing, such as `n[1-2], n4`. Returns an empty string if there are
    none, or if sinfo does not say."""
    try:
        done = ran(["sinfo", "--noheader", "--list-reasons", "--format=%N"], environ)
    except UserError:
        return ""
    return in_one_line(", ".join(done.stdout.split())) if done.returncode == 0 else ""


def submitted(words: list[str], environ: Mapping[str, str], *, inherited: Collection[str] = ()) -> int:
    """Runs sbatch and returns the job's number. `inherited`: the names in `environment:` of the cluster's settings.
    Raises UserError with sbatch's message if it fails."""
    done = ran(["sbatch", "--parsable", *words], environ, inherited=inherited)
    if done.returncode != 0:
        raise UserError(f"sbatch failed: {in_one_line(done.stderr)}")
    job, _, elsewhere = done.stdout.strip().partition(";")
    if elsewhere:
        raise UserError(
            f"sbatch put job {shown_value(job)} on the cluster {shown_value(elsewhere)}, and Patchline asks only the "
            "cluster of this machine",
            todo="cancel it there (scancel --clusters), and submit on a login node of that cluster",
        )
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
    return [
        QueuedJob(
            job=one[1], state=one[2], user=int(one[3]), submitted=_time_in(one[4]), names=tuple(one[5].split(","))
        )
        for one in found
        if one
    ]


def _time_in(text: str) -> int | None:
    return int(text) if _TIME.fullmatch(text) else None


def queued_with(name: str, environ: Mapping[str, str], *, recorded: Sequence[RecordedJob] = ()) -> list[QueuedJob]:
    """Returns this user's pending and running jobs and array tasks with this name, and those of the `recorded` jobs
    that are still in the queue. Recorded jobs may belong to a colleague, or have another name because the folder had
    another path."""
    own = queued(environ)
    found = [part for one in own if (part := one.part_of(name))]
    known = {one.number for one in found}
    others = [each for each in recorded if each.number not in known]
    if others:
        answer = ran([*_SQUEUE, f"--jobs={','.join(str(each.number) for each in others)}"], environ)
        if answer.returncode == 0 or not UNKNOWN_JOB.search(answer.stderr):
            there = _jobs_in(answer)
            found += [part for each in others for one in there if (part := one.part_as(each, environ))]
    return found


def settled_with(name: str, environ: Mapping[str, str], *, recorded: Sequence[RecordedJob] = ()) -> list[QueuedJob]:
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
    if Slurm gives no reason. `nodes`: a list such as `n[1-2]`. Times are text, empty if unknown; the start time is a
    local time. `log`: the file of its error output. `comment`: the names of a job that patchline submitted, and `user`
    and `submitted`, as in `QueuedJob`."""

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
    user: int | None = None
    submitted: int | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the job has ended."""
        return self.state in FINISHED

    def is_recorded(self, recorded: RecordedJob) -> bool:
        """Whether this is the recorded job, and not another one to which Slurm has given its number since."""
        names = [word.partition("@")[0] for word in self.comment.split(",")]
        return recorded.is_job(names, user=self.user, submitted=self.submitted, num_requeues=self.starts)


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A node, its state (such as `down*`), and the reason that an administrator or Slurm gave for the state."""

    name: str
    state: str
    reason: str


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
    starts, start = known.get("Restarts", ""), _time_in(known.get("StartTime", ""))
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
        start_time="" if start is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(start)),
        dependency=known.get("Dependency", ""),
        exit_code=known.get("ExitCode", ""),
        log=known.get("StdErr", "") or known.get("StdOut", ""),
        comment=known.get("Comment", "").strip(),  # a space follows it
        user=int(user[1]) if (user := _USER.search(known.get("UserId", ""))) else None,
        submitted=_time_in(known.get("SubmitTime", "")),
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

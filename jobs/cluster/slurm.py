"""Slurm's programs, as the command line runs them: one place for what they are given, how long they are waited for, and
what their refusals mean. Without slurmdbd: sbatch, squeue and scontrol alone."""

import logging
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jobs.cluster.batch_script import tasks_in
from jobs.cluster.secret_names import is_passed_on, is_secret
from shards.errors import UserError
from shards.output.terminal import printable_name
from shards.schema.config_values import shown_value

log = logging.getLogger(__name__)
_ANSWER_SECONDS = 120
_SILENT_SECONDS, _MOST_CHARACTERS = 30.0, 200
_ENDING_SECONDS, _PAUSE_SECONDS = 90.0, 1.0
_JOB_LINE = re.compile(r"([0-9]{1,10}(?:_(?:[0-9]+|\[[0-9,%.-]+\]))?) ([A-Z_]+) (\S+)")
_FIELD = re.compile(r"(\w+)=(\S*)")
_STARTING = ("sbatch", "srun")
_SQUEUE = ("squeue", "--noheader", "--format=%i %T %k")
UNKNOWN_JOB = re.compile(r"\binvalid job[ _]?id\b|\bjob \S+ not found\b", re.IGNORECASE)
"""How scontrol and squeue call a job or a task that Slurm does not know, or not any more."""
_SILENCE = re.compile(
    "configuration source|contact slurm controller|timed out|zero bytes were transmitted|connection refused",
    re.IGNORECASE,
)
# What Slurm and stage.sbatch tell one job, and a job that it submits must not take for its own.
_OF_JOB = re.compile(
    r"SLURM_(?!CONF$)|PMI|PMIX|MASTER_(ADDR|PORT)$|PATCHLINE_(STATE|MARGIN|RETRIES|REQUEUE|SPARES|LAUNCHER|S3_ANSWERED)$"
)


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job that waits or runs. `job`: its number, `12`, or `12_3` and `12_[4-7]` of an array; `state`: such as
    RUNNING; `names`: the words of its comment, RUN or LIFE,RUN,CHAIN,TAG. Of an array of runs there are several, each
    with its task: LIFE,RUN@0,RUN@1,CHAIN,TAG."""

    job: str
    state: str
    names: tuple[str, ...] = ()

    @property
    def tag(self) -> str:
        """The last word, of a job of a chain."""
        return self.names[-1] if len(self.names) > 1 else ""

    @property
    def number(self) -> int:
        """The number of the job, or of the array that it is in."""
        return int(self.job.partition("_")[0])

    def part_as(self, job: str) -> "QueuedJob | None":
        """The job itself if this is its number, or its one task that is called so, such as `12_3`; None if it is
        another."""
        number, is_task, task = job.partition("_")
        if str(self.number) != number:
            return None
        if not is_task:
            return self
        return replace(self, job=job) if any(int(task) in found for found in tasks_in(self.job)) else None

    def part_of(self, name: str) -> "QueuedJob | None":
        """The job itself if it has this name, or its one task that has; None if none has."""
        for word in self.names:
            own, is_task, task = word.partition("@")
            if own == name and not is_task:
                return self
            if own == name and any(int(task) in found for found in tasks_in(self.job)):
                return replace(self, job=f"{self.number}_{task}")
        return None


def need_sbatch(environ: Mapping[str, str]) -> None:
    """UserError without sbatch."""
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        raise UserError("no sbatch on the PATH: run this on a login node of the cluster, or with --dry-run anywhere")


def ran(
    words: list[str],
    environ: Mapping[str, str],
    text: str = "",
    *,
    seconds: float = 0.0,
    inherited: Collection[str] = (),
) -> "subprocess.CompletedProcess[str]":
    """A program of Slurm, with `text` as its input. Jobs inherit the environment of sbatch and srun, which Slurm
    stores: only what is known to be no secret, and what `inherited` names, is passed on. `seconds`: how long it may
    take; 0: two minutes.
    UserError if there is no such program, or no answer in time."""
    limit = seconds or _ANSWER_SECONDS
    clean = {
        name: value
        for name, value in environ.items()
        if not _OF_JOB.match(name)
        and (is_passed_on(name, value, named=inherited) if words[0] in _STARTING else not is_secret(name, value))
    }
    if words[0] == "squeue":
        clean["SLURM_BITSTR_LEN"] = "0"  # else it shows at most 64 letters of an array's tasks
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
        raise UserError(f"cannot run {words[0]}: {error.strerror}; it comes with Slurm, as sbatch does") from error
    except subprocess.TimeoutExpired:
        raise UserError(f"{words[0]} has not answered for {limit:g} s; try again when Slurm does") from None


def slurms_answer(words: list[str], environ: Mapping[str, str], text: str = "", *, what: str = "this job") -> str:
    """Slurm's own answer, in one line, to `sbatch --test-only`. UserError with the remedy, if it refuses the job, which
    is called `what`, or does not answer."""
    done = ran(["sbatch", "--test-only", *words], environ, text=text)
    said = " ".join(line.removeprefix("sbatch: ").strip() for line in done.stderr.splitlines() if line.strip())
    if done.returncode == 0:
        return printable_name(said)
    reason = said.removeprefix("error: ")[:400]
    if _SILENCE.search(said):
        todo = "run this on a login node of the cluster, once its controller answers (`scontrol ping`)"
        raise UserError(f"Slurm does not answer: {reason}; {todo}")
    raise UserError(f"Slurm would refuse {what}: {reason}; {_remedy(said)}")


def submitted(words: list[str], environ: Mapping[str, str], *, inherited: Collection[str] = ()) -> int:
    """Runs sbatch, and returns the number of the job. `inherited`: `environment:` of the cluster's settings. UserError
    with what sbatch said, if it fails."""
    done = ran(["sbatch", "--parsable", *words], environ, inherited=inherited)
    if done.returncode != 0:
        raise UserError(f"sbatch failed: {done.stderr.strip()[:400]}")
    job = done.stdout.strip().partition(";")[0]
    if not job.isascii() or not job.isdecimal():
        raise UserError(f"sbatch answered {shown_value(job)} instead of a job's number; see squeue")
    return int(job)


def queued(environ: Mapping[str, str], *, with_ended: bool = False) -> list[QueuedJob]:
    """The own jobs that wait or run; with those that ended a short time ago, if asked for. UserError if Slurm does not
    answer."""
    states = ["--states=all"] if with_ended else []
    return _jobs_in(ran([*_SQUEUE, "--me", *states], environ))


def _jobs_in(answer: "subprocess.CompletedProcess[str]") -> list[QueuedJob]:
    if answer.returncode != 0:
        raise UserError(f"squeue does not answer: {answer.stderr.strip()[:200]}; try again when Slurm does")
    found = [_JOB_LINE.fullmatch(line.rstrip()) for line in answer.stdout.splitlines()]
    return [QueuedJob(job=one[1], state=one[2], names=tuple(one[3].split(","))) for one in found if one]


def queued_with(name: str, environ: Mapping[str, str], *, recorded: Sequence[str] = ()) -> list[QueuedJob]:
    """The own jobs, and tasks of arrays, that wait or run and have this name, and the `recorded` ones, such as `12` or
    `12_3`, that wait or run: they have another name if the folder had another path, and may be a colleague's."""
    own = queued(environ)
    found = [part for one in own if (part := one.part_of(name))]
    known = {one.number for one in found}
    others = [job for job in dict.fromkeys(recorded) if int(job.partition("_")[0]) not in known]
    if others:
        answer = ran([*_SQUEUE, f"--jobs={','.join(job.partition('_')[0] for job in others)}"], environ)
        if answer.returncode == 0 or not UNKNOWN_JOB.search(answer.stderr):
            there = _jobs_in(answer)
            found += [part for job in others for one in there if (part := one.part_as(job))]
    return found


def settled_with(name: str, environ: Mapping[str, str], *, recorded: Sequence[str] = ()) -> list[QueuedJob]:
    """The same, once none of them is ending: one that was cancelled is gone then, and one that was requeued waits.
    UserError if one does not end."""
    deadline, has_said = time.monotonic() + _ENDING_SECONDS, False
    while True:
        found = queued_with(name, environ, recorded=recorded)
        ending = [one.job for one in found if one.state == "COMPLETING"]
        if not ending or len(ending) < len(found):
            return found
        if time.monotonic() > deadline:
            raise UserError(f"job {ending[0]} is still ending; try again once `squeue --me` does not show it")
        if not has_said:
            log.info("job %s is ending: waiting for it", ending[0])
            has_said = True
        time.sleep(_PAUSE_SECONDS)


def silence(environ: Mapping[str, str]) -> str:
    """Why Slurm cannot be asked from here: there is no sbatch, or no controller answers. Empty if it can be."""
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        return "no sbatch on this machine"
    try:
        done = ran(["squeue", "--me", "--noheader"], environ, seconds=_SILENT_SECONDS)
    except UserError as error:
        return f"Slurm does not answer ({error})"
    if done.returncode == 0:
        return ""
    reason = (done.stderr.strip().splitlines() or ["squeue failed"])[-1].removeprefix("squeue: ")
    return f"Slurm does not answer ({printable_name(reason[:_MOST_CHARACTERS])})"


def answers(environ: Mapping[str, str]) -> bool:
    """Whether Slurm's controller answers now."""
    try:
        return ran(["squeue", "--me", "--noheader"], environ).returncode == 0
    except UserError:
        return False


def cancelled(jobs: list[str], environ: Mapping[str, str]) -> None:
    """Cancels jobs, waiting or running. UserError if Slurm does not."""
    done = ran(["scancel", *jobs], environ)
    if done.returncode != 0:
        raise UserError(f"scancel failed: {done.stderr.strip()[:300]}; try again when Slurm answers")


def partitions(environ: Mapping[str, str], name: str = "") -> list[dict[str, str]]:
    """The fields of every partition, or of the one with this name, in Slurm's words; none if Slurm does not say."""
    done = ran(["scontrol", "--oneliner", "show", "partition", *([name] if name else [])], environ)
    return [dict(_FIELD.findall(line)) for line in done.stdout.splitlines()] if done.returncode == 0 else []


def most_array_tasks(environ: Mapping[str, str]) -> int:
    """How many tasks one array may have: Slurm's MaxArraySize, which bounds the index. 1,001 if Slurm does not say."""
    answer = ran(["scontrol", "show", "config"], environ)
    found = re.search(r"^MaxArraySize\s*=\s*([0-9]{1,9})\s*$", answer.stdout, re.MULTILINE)
    return max(1, int(found[1])) if found else 1001


def _remedy(said: str) -> str:
    found = said.lower()
    if "account" in found or "qos" in found:
        return "correct `account:` and `qos:` in your cluster's settings"
    if "partition" in found:
        settings = "`partition:`, or `cpu_partition:` of jobs without GPUs, in your cluster's settings"
        return f"`sinfo -s` lists the partitions: correct {settings}"
    if "time limit" in found:
        return "lower --time; `sinfo -o '%P %l'` lists the limits"
    if "memory" in found:
        options = "--mem, --mem-per-cpu or --mem-per-gpu in `options:` of your cluster's settings"
        return f"lower {options}, or give `all_memory: no`; `sinfo -o '%P %m'` lists each node's MB"
    if "node" in found or "processor" in found or "cpu" in found:
        memory = "or --mem in `options:`"  # of which --test-only says only that no node is such
        return f"lower --nodes, gpus_per_node, cpus_per_rank, {memory}; `sinfo -o '%P %D %c %m %G'` lists what there is"
    return "correct your cluster's settings, or the flags of submit"

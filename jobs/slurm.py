"""Slurm's programs, as the command line runs them: one place for what they are given, how long they are waited for, and
what their refusals mean. Without slurmdbd: sbatch, squeue and scontrol alone."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from shards.config_values import shown_value
from shards.errors import UserError
from shards.terminal import printable_name

_ANSWER_SECONDS = 120
# What Slurm and stage.sbatch tell one job, and a job that it submits must not take for its own.
_OF_JOB = re.compile(
    r"SLURM_(?!CONF$)|PMI|PMIX|MASTER_(ADDR|PORT)$|PATCHLINE_(STATE|MARGIN|RETRIES|REQUEUE|SPARES|LAUNCHER|S3_ANSWERED)$"
)
_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job that waits or runs. `job`: its number, `12` or `12_3` of an array; `state`: such as RUNNING;
    `tag`: what its comment ends with, after the names of a run and a chain."""

    job: str
    state: str
    tag: str = ""


def need_sbatch(environ: Mapping[str, str]) -> None:
    """UserError without sbatch."""
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        raise UserError("no sbatch on the PATH: run this on a login node of the cluster, or with --dry-run anywhere")


def ran(
    words: list[str], environ: Mapping[str, str], text: str = "", *, seconds: float = 0.0
) -> "subprocess.CompletedProcess[str]":
    """A program of Slurm, with `text` as its input. Jobs inherit the environment, which Slurm stores: variables that
    look secret stay here, those that name files with secrets do not. `seconds`: how long it may take; 0: two minutes.
    UserError if there is no such program, or no answer in time."""
    limit = seconds or _ANSWER_SECONDS
    clean = {name: value for name, value in environ.items() if not _is_secret(name) and not _OF_JOB.match(name)}
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


def _is_secret(name: str) -> bool:
    return bool(_SECRET.search(name)) and not name.upper().endswith("_FILE")  # AWS_SHARED_CREDENTIALS_FILE


def slurms_answer(words: list[str], environ: Mapping[str, str], text: str = "") -> str:
    """Slurm's own answer, in one line, to `sbatch --test-only`. UserError with the remedy, if it refuses."""
    done = ran(["sbatch", "--test-only", *words], environ, text=text)
    said = " ".join(line.removeprefix("sbatch: ").strip() for line in done.stderr.splitlines() if line.strip())
    if done.returncode == 0:
        return printable_name(said)
    raise UserError(f"Slurm would refuse this job: {said.removeprefix('error: ')[:400]}; {_remedy(said)}")


def submitted(words: list[str], environ: Mapping[str, str]) -> int:
    """Runs sbatch, and returns the number of the job. UserError with what sbatch said, if it fails."""
    done = ran(["sbatch", "--parsable", *words], environ)
    if done.returncode != 0:
        raise UserError(f"sbatch failed: {done.stderr.strip()[:400]}")
    job = done.stdout.strip().partition(";")[0]
    if not job.isascii() or not job.isdecimal():
        raise UserError(f"sbatch answered {shown_value(job)} instead of a job's number; see squeue")
    return int(job)


def queued(name: str, environ: Mapping[str, str], *, with_ended: bool = False) -> list[QueuedJob]:
    """The own jobs that wait or run and have this name, without spaces and commas, in their comments: RUN, or
    RUN,CHAIN,TAG. With those that ended a short time ago, if asked for."""
    states = ["--states=all"] if with_ended else []
    answer = ran(["squeue", "--me", "--noheader", *states, "--format=%i %T %k"], environ)
    if answer.returncode != 0:
        raise UserError(f"squeue does not answer: {answer.stderr.strip()[:200]}; try again when Slurm does")
    found = [line.split() for line in answer.stdout.splitlines()]
    return [
        QueuedJob(job=words[0], state=words[1], tag=words[2].partition(",")[2].rpartition(",")[2])
        for words in found
        if len(words) == 3 and name in words[2].split(",")
    ]


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


def most_array_tasks(environ: Mapping[str, str]) -> int:
    """How many tasks one array may have: Slurm's MaxArraySize, which bounds the index. 1,001 if Slurm does not say."""
    answer = ran(["scontrol", "show", "config"], environ)
    found = re.search(r"^MaxArraySize\s*=\s*([0-9]{1,9})\s*$", answer.stdout, re.MULTILINE)
    return max(1, int(found[1])) if found else 1001


def _remedy(said: str) -> str:
    found = said.lower()
    if "configuration source" in found or "contact slurm controller" in found:
        return "run this on a login node of the cluster, once its controller answers"
    if "account" in found or "qos" in found:
        return "correct `account:` and `qos:` in your cluster's settings"
    if "partition" in found:
        return "`sinfo -s` lists the partitions: correct `partition:` in your cluster's settings"
    if "time limit" in found:
        return "lower --time; `sinfo -o '%P %l'` lists the limits"
    if "node" in found or "processor" in found or "cpu" in found:
        return "lower --nodes, gpus_per_node or cpus_per_rank; `sinfo -o '%P %D %c %G'` lists what there is"
    return "correct your cluster's settings, or the flags of submit"

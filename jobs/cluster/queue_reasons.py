"""Says in plain words why a job waits or ended, with the command that fixes it. All functions are pure.

squeue's manual page lists Slurm's words under "JOB REASON CODES" and "JOB STATE CODES", and sinfo's page lists the
words for nodes. A job array may have thousands of tasks, so pending or ended tasks share a line if their state, reason
and exit code are equal.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from jobs.cluster.batch_script import tasks_in
from jobs.cluster.slurm import JobFacts, NodeFacts
from shards.errors import Finding
from shards.output.quantities import plural
from shards.output.terminal import printable_name

_HEALTHY = ("allocated", "mixed", "idle", "completing", "planned", "reserved")
_MOST_SHOWN = 4
_RUNS = ("RUNNING", "COMPLETING", "SUSPENDED")
_LIMITS = ("QOS", "Assoc", "MaxCpu", "MaxMem", "MaxGRES", "MaxNode", "MaxJobs", "MaxSubmit", "MaxWall")
_NOT_LAUNCHED = ("JobLaunchFailure", "0:53")  # a reason, and an exit code for when Slurm gives no reason
_LOG = "patchline logs {run} --lines 20"  # `_without_run` replaces this if there is no run

# Reasons of pending jobs. {job} is the job's number, {start} the time when it may start, and {on} the jobs that it
# waits for.
_WAITING = {
    "Priority": Finding(found="waits for its turn: jobs of a higher priority come first"),
    "Resources": Finding(found="waits for nodes to become free"),
    "BeginTime": Finding(found="may start again from {start} on; a requeued job waits about two minutes"),
    "Dependency": Finding(found="waits for {on}"),
    "DependencyNeverSatisfied": Finding(
        found="will never start: it waited for the success of {on}, which failed",
        todo="scancel {job}, then submit again",
    ),
    "JobHeldUser": Finding(found="is held by its user", todo="scontrol release {job}"),
    "JobHeldAdmin": Finding(
        found="is held by the administrators, or was requeued too often", todo="ask them; or scontrol release {job}"
    ),
    "PartitionTimeLimit": Finding(
        found="asks for more time than its partition allows",
        todo="scontrol update JobId={job} TimeLimit=LIMIT; `sinfo -o '%P %l'` lists the limits",
    ),
    "PartitionNodeLimit": Finding(
        found="asks for more nodes than its partition allows", todo="scancel {job}, and submit with fewer --nodes"
    ),
    "PartitionDown": Finding(found="waits for its partition, which is down", todo="sinfo -s"),
    "PartitionInactive": Finding(found="waits for its partition, which takes no jobs now", todo="sinfo -s"),
    "ReqNodeNotAvail": Finding(found="waits for nodes that are down, drained or reserved", todo="sinfo -R"),
    "NodeDown": Finding(found="waits for a node that is down", todo="sinfo -R"),
    "BadConstraints": Finding(
        found="asks for what no node has",
        todo="scancel {job}, and correct `constraint:` and gpus_per_node; `sinfo -o '%N %f %G'` lists what there is",
    ),
    "JobArrayTaskLimit": Finding(found="waits for other tasks of its array: only some may run at the same time"),
    "Reservation": Finding(found="waits for its reservation to begin", todo="scontrol show reservation"),
    "Licenses": Finding(found="waits for licences", todo="scontrol show licenses"),
    "InvalidAccount": Finding(
        found="has an account that is not allowed here", todo="scancel {job}, and correct `account:`"
    ),
    "InvalidQOS": Finding(found="has a QOS that is not allowed here", todo="scancel {job}, and correct `qos:`"),
}

_ENDED = {
    "TIMEOUT": Finding(
        found="was ended at its time limit before it had stopped by itself",
        todo="submit again; raise margin_seconds, if a step and a save take longer",
    ),
    "NODE_FAIL": Finding(found="lost a node", todo="submit again; `sinfo -R` lists nodes and reasons"),
    "OUT_OF_MEMORY": Finding(
        found="took more memory than it was given", todo="lower --micro-batch or the workers, or ask for more memory"
    ),
    "CANCELLED": Finding(found="was cancelled", todo="submit again to continue"),
    "PREEMPTED": Finding(found="was preempted", todo="submit again to continue"),
    "DEADLINE": Finding(found="was ended at its deadline", todo="submit again to continue"),
    "BOOT_FAIL": Finding(found="got a node that did not boot", todo="submit again; `sinfo -R` lists nodes and reasons"),
}

_CODES = {
    2: Finding(found="was refused for a mistake in its words or settings", todo=_LOG),
    75: Finding(found="stopped with its work saved, and could not be requeued", todo="submit again to continue"),
    74: Finding(
        found="ended to be continued, by a fault outside the program or because jobs may not be requeued here "
        "(exit code 74)",
        todo="the next job of its run continues it; if there is none, submit again",
    ),
    78: Finding(found="gave up: it would not succeed", todo="patchline doctor {run}"),
}


def finding_of(job: JobFacts, *, run_dir: str = "") -> Finding:
    """Returns what the state and the reason of a job mean. `run_dir`: the job's run, named in the commands that fix a
    fault."""
    if job.state == "PENDING":
        return _filled(_of_waiting(job.reason), job)
    if job.state in _ENDED:
        return _filled(_ENDED[job.state], job)
    if job.state == "FAILED" and {job.reason, job.exit_code} & {*_NOT_LAUNCHED}:
        return _of_launch(job, run_dir)
    if job.state == "FAILED":
        code = job.exit_code.partition(":")[0]
        known = _CODES.get(int(code)) if code.isascii() and code.isdecimal() and len(code) < 4 else None
        how = known or Finding(found=f"failed with exit code {job.exit_code or '?'}", todo=_LOG)
        return replace(how, todo=how.todo.replace("{run}", shlex.quote(run_dir)) if run_dir else _without_run(how.todo))
    if job.state == "RUNNING":
        limit = f" of {job.time_limit}" if job.time_limit else ""
        return Finding(found=f"runs for {job.run_time or '?'}{limit} on {job.nodes or '?'}")
    known_states = {"COMPLETED": "completed", "COMPLETING": "is ending", "SUSPENDED": "is suspended"}
    return Finding(found=known_states.get(job.state, f"is {job.state}"))


def _of_launch(job: JobFacts, run_dir: str) -> Finding:
    """Returns the finding for a job whose script never began and which therefore has no log."""
    which = f"log {printable_name(job.log)}" if job.log else "log"
    words = f"could not start: its node could not open its {which}, or enter the folder it was submitted from"
    folder = run_dir or str(Path(job.log).parent)
    checks = f"`patchline preflight --cluster FILE --run-dir {printable_name(shlex.quote(folder))}`"
    return Finding(found=words, todo=f"{checks} tells whether nodes can write there; then submit again")


def _without_run(todo: str) -> str:
    return "the log's last lines say why" if "{run}" in todo else todo


def _of_waiting(reason: str) -> Finding:
    if reason in _WAITING:
        return _WAITING[reason]
    if "launch_failed_requeued_held" in reason or "launch failed requeued held" in reason:
        words = "is held: a node could not start it, so Slurm requeued it"
        return Finding(found=words, todo="scontrol release {job}; `sinfo -R` may name a drained node")
    if "requeued_in_held_state" in reason or "requeued held" in reason:
        return Finding(found="was requeued, and is held", todo="scontrol release {job}")
    if reason.startswith("ReqNodeNotAvail") or "DOWN, DRAINED" in reason.replace("_", " "):
        return _WAITING["ReqNodeNotAvail"]
    if reason.startswith(_LIMITS):
        todo = "wait for your other jobs, or ask for more; `scontrol show assoc_mgr flags=qos,assoc` lists limits"
        return Finding(found=f"waits because of a limit of its QOS or account ({reason})", todo=todo)
    return Finding(found=f"waits: {reason}" if reason else "waits; Slurm has not said yet why")


def _filled(finding: Finding, job: JobFacts) -> Finding:
    start = job.start_time.replace("T", " ") or "a time that Slurm has not said"
    values = {"{job}": job.job, "{start}": start, "{on}": _waited_for(job.dependency)}
    words, todo = finding.found, finding.todo
    for name, value in values.items():
        words, todo = words.replace(name, value), todo.replace(name, value)
    return Finding(found=words, todo=todo)


def _waited_for(dependency: str) -> str:
    """Returns `job 12 and job 13` for `afterany:12(unfulfilled),afterok:13`."""
    jobs = [f"job {number}" for number in re.findall(r":(\d+(?:_\d+|_\*)?)", dependency)]
    earlier = ["its earlier jobs of the same name"] if "singleton" in dependency else []
    return " and ".join([*jobs, *earlier]) or "another job"


def findings_of_nodes(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Returns a finding for each node that is not healthy."""
    found = []
    for node in nodes:
        state = node.state.rstrip("*~#!%$@^+-")
        if state in _HEALTHY and not node.state.endswith("*"):
            continue
        silent = ", does not answer" if node.state.endswith("*") else ""
        reason = f": {node.reason}" if node.reason and node.reason.lower() != "none" else ""
        todo = (
            f"once it is repaired: scontrol update NodeName={node.name} State=resume"
            if "drain" in state or "down" in state
            else ""
        )
        found.append(Finding(found=f"node {node.name} is {state}{silent}{reason}", todo=todo))
    return found


def findings_of_tasks(tasks: Sequence[JobFacts], *, run_dir: str = "") -> list[Finding]:
    """Returns the finding of a single job. For an array, returns one for each running task (at most four), one for each
    reason why tasks are pending, and one for each way in which tasks ended. `run_dir` is the job's run, if it has
    one."""
    if len(tasks) == 1:
        (job,) = tasks
        said = finding_of(job, run_dir=run_dir)
        return [Finding(found=f"job {job.job}: {said.found}", todo=said.todo)]
    running = sorted((job for job in tasks if job.state in _RUNS), key=lambda job: (len(job.job), job.job))
    waiting = [job for job in tasks if not job.is_finished and job.state not in _RUNS]
    ended = [job for job in tasks if job.is_finished]
    found = [Finding(found=f"task {job.job}: {finding_of(job).found}") for job in running[:_MOST_SHOWN]]
    if len(running) > _MOST_SHOWN:
        found.append(Finding(found=f"{plural(len(running) - _MOST_SHOWN, 'more task')} running"))
    return [*found, *_by_kind(waiting), *_by_kind(sorted(ended, key=lambda job: job.state == "COMPLETED"))]


def _by_kind(jobs: Iterable[JobFacts]) -> list[Finding]:
    """Returns one finding for each state, reason and exit code: at most four, then one for all other jobs."""
    kinds: dict[tuple[str, str, str], list[JobFacts]] = {}
    for job in jobs:
        kinds.setdefault((job.state, job.reason, job.exit_code), []).append(job)
    found = []
    for alike in list(kinds.values())[:_MOST_SHOWN]:
        count = sum(num_tasks(job.job) for job in alike)
        said = finding_of(alike[0])
        such = ", such as" if len(alike) > 1 else ""
        which = f"task {alike[0].job}" if count == 1 else f"{count} tasks{such} {alike[0].job}"
        found.append(Finding(found=f"{which}: {said.found}", todo=said.todo))
    if left := sum(num_tasks(job.job) for alike in list(kinds.values())[_MOST_SHOWN:] for job in alike):
        found.append(Finding(found=f"{plural(left, 'more task')} in other states", todo="squeue --me --array"))
    return found


def num_tasks(job: str) -> int:
    """Returns the number of tasks in a line of squeue: 1 for `12` and `12_3`, 7 for `12_[0-3,7-9%2]`. Pure."""
    return max(1, sum(map(len, tasks_in(job))))

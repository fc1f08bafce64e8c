"""`patchline preflight`: what of a cluster must be right before the first job is submitted, and what to do if not.

It checks Slurm's limits, this environment, the store, the shared run directory, and with --deep every node. Slurm's
settings are judged by pure functions from `scontrol show config` and `show partition`; slurm.conf(5) explains them.
"""

import json
import re
import resource
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from jobs import exit_codes
from jobs.cluster.folder_lock import has_flock
from jobs.cluster.preflight_nodes import deep_checks, options_of, shared_checks
from jobs.cluster.settings import ClusterConfig, asked_seconds, read_cluster, seconds_of, with_command
from jobs.cluster.slurm import partitions, ran, slurms_answer
from jobs.output import put, table_of_checks
from jobs.settings.models import PreflightJob
from pipeline.machine.checks import local_checks
from shards.errors import UserError
from shards.output.quantities import duration, plural, size
from shards.output.terminal import columns_of, printable_name
from shards.verifying.s3_probe import probe_store
from shards.verifying.verdict import Verdict

_FIELD = re.compile(r"^(\w+)\s*=\s?(.*?)\s*$", re.MULTILINE)
_LEAST_KILL_WAIT, _MOST_SLURMD_TIMEOUT, _LEAST_ARRAY = 30, 600, 1001
_USABLE = ("idle", "mixed", "allocated", "completing", "reserved")
_SHOWN = {"ok": "ok", "warning": "warning", "failed": "FAILED"}
_PORTS = range(20_000, 32_000)  # of the ranks' meeting place, as in slurm/stage.sbatch
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LEAST_LOCKED = 64 << 20
_COMMAND_SECONDS = 60


def run(job: PreflightJob, *, environ: Mapping[str, str]) -> int:
    """Prints the table, or one JSON object; 0 if nothing has failed, else 1."""
    cluster = with_command(read_cluster(Path(job.cluster)) if job.cluster else ClusterConfig(), environ)
    verdicts = environment_checks(cluster, environ)
    if job.run_dir:
        verdicts.append(judge_flock(Path(job.run_dir)))
    if job.cluster:
        verdicts += slurm_checks(cluster, nodes=job.nodes, environ=environ)
    if job.url:
        verdicts += probe_store(job.url, endpoint=cluster.s3_endpoint, profile=cluster.s3_profile)
    has_failed = any(one.name in ("Slurm", "partition", "admission") and one.status == "failed" for one in verdicts)
    if job.cluster and not has_failed:
        waits = {"wait_seconds": job.wait_seconds, "environ": environ}
        verdicts += shared_checks(cluster, Path(job.run_dir), **waits) if job.run_dir else []  # type: ignore[arg-type]
        verdicts += deep_checks(cluster, nodes=job.nodes, **waits) if job.deep else []  # type: ignore[arg-type]
    _tell(job, verdicts)
    return exit_codes.FAULTS_FOUND if any(one.status == "failed" for one in verdicts) else exit_codes.DONE


def _tell(job: PreflightJob, verdicts: Sequence[Verdict]) -> None:
    counts = {status: sum(one.status == status for one in verdicts) for status in _SHOWN}
    found = {"checks": [asdict(one) for one in verdicts], "counts": counts}
    text = json.dumps(found, allow_nan=False) + "\n"
    if job.out:
        try:
            Path(job.out).write_text(text)
        except OSError as error:
            raise UserError(f"cannot write --out {job.out}: {error.strerror}; give another file") from error
    if job.json:
        put(text)
        return
    rows = [
        (_SHOWN[one.status], one.name, one.value + (f" (allowed: {one.allowed})" if one.allowed else ""), one.todo)
        for one in verdicts
    ]
    put(table_of_checks(rows, columns=columns_of(sys.stdout)))
    put(f"\n{counts['failed']} failed, {plural(counts['warning'], 'warning')}\n")


def environment_checks(cluster: ClusterConfig, environ: Mapping[str, str]) -> list[Verdict]:
    """This machine, which is a login node: versions, limits, and whether the command answers."""
    local = [
        Verdict(name=one.name, status="failed" if one.status == "fault" else one.status, value=one.found, todo=one.todo)
        for one in local_checks()
    ]
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    ports = _EPHEMERAL.read_text() if _EPHEMERAL.is_file() else ""
    return [*local, judge_locked(locked), judge_ports(ports), _command(cluster, environ)]


def judge_locked(soft: int) -> Verdict:
    """Bytes that a process may lock in memory, -1: no limit. InfiniBand registers memory so. Pure."""
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_LOCKED:
        value = "no limit" if soft == resource.RLIM_INFINITY else size(soft)
        return Verdict(name="locked memory", status="ok", value=value)
    todo = "with InfiniBand, have the administrator set memlock to unlimited on the nodes, and in slurmd's unit"
    return Verdict(name="locked memory", status="warning", value=size(soft), allowed="no limit", todo=todo)


def judge_flock(run_dir: Path) -> Verdict:
    """Whether the file system of the run directory, or of the folder that will hold it, has flock."""
    folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
    try:
        value = (
            "flock" if has_flock(folder) else "no flock here, so submit, cancel and gates use a folder as their lock"
        )
    except OSError as error:
        value, todo = f"{printable_name(str(folder))}: {error.strerror}", "give a --run-dir that you may write to"
        return Verdict(name="lock", status="failed", value=value, todo=todo)
    return Verdict(name="lock", status="ok", value=value)


def judge_ports(text: str) -> Verdict:
    """`text`: the first and the last port that the kernel gives away by itself. Pure."""
    ours = f"{_PORTS.start} to {_PORTS.stop - 1}"
    numbers = [int(word) for word in re.findall(r"\d+", text)]
    if len(numbers) != 2 or numbers[0] >= _PORTS.stop or numbers[1] < _PORTS.start:
        return Verdict(name="ports", status="ok", value=f"ranks meet on one of {ours}")
    value = f"the kernel gives {numbers[0]} to {numbers[1]} to other programs; ranks meet on one of {ours}"
    todo = "nothing, usually: a port that is taken is passed over; or set net.ipv4.ip_local_port_range"
    return Verdict(name="ports", status="warning", value=value, allowed="32768 and up", todo=todo)


def _command(cluster: ClusterConfig, environ: Mapping[str, str]) -> Verdict:
    shown = printable_name(shlex.join(cluster.command))
    todo = "correct `command:` in your cluster's settings"
    if shutil.which(cluster.command[0], path=environ.get("PATH")) is None:
        if cluster.setup:  # it may come from a module
            value = f"{shown} is not on this machine's PATH; `setup:` may bring it on the nodes"
            return Verdict(name="command here", status="warning", value=value, todo="see the check with --run-dir")
        return Verdict(name="command here", status="failed", value=f"no {shown}", allowed="a program", todo=todo)
    try:
        done = ran([*cluster.command, "--version"], environ, seconds=_COMMAND_SECONDS)
    except UserError as error:
        return Verdict(name="command here", status="failed", value=str(error).partition(";")[0], todo=todo)
    if done.returncode == 0:
        return Verdict(name="command here", status="ok", value=printable_name(done.stdout.strip()[:80]))
    said = printable_name(" ".join(done.stderr.split())[-200:])
    value = f"{shown} --version ends with {done.returncode}: {said}"
    return Verdict(name="command here", status="failed", value=value, allowed="0", todo=todo)


def slurm_checks(cluster: ClusterConfig, *, nodes: int, environ: Mapping[str, str]) -> list[Verdict]:
    """Every check of Slurm. One failed verdict, if it does not answer."""
    try:
        config = fields_of(_answer(["scontrol", "show", "config"], environ))
        named = _partition(cluster.partition, environ)
    except UserError as error:
        what, _, todo = str(error).partition("; ")
        return [Verdict(name="Slurm", status="failed", value=what or str(error), allowed="an answer", todo=todo)]
    partition = {} if named is None else named
    found = [
        Verdict(name="Slurm", status="ok", value=config.get("SLURM_VERSION", "version not known")),
        judge_partition(cluster.partition, partition),
    ]
    if cluster.cpu_partition and cluster.cpu_partition != cluster.partition:
        other = _partition(cluster.cpu_partition, environ) or {}
        found.append(judge_partition(cluster.cpu_partition, other, what="cpu_partition"))
        if other:
            found.append(judge_limit(cluster, other.get("MaxTime", ""), what="MaxTime of cpu_partition"))
    if partition:
        states = _answer(
            ["sinfo", "--noheader", "--Node", f"--partition={partition['PartitionName']}", "-o%T"], environ
        )
        found += [
            judge_limit(cluster, partition.get("MaxTime", "")),
            judge_nodes(nodes, states.split(), partition.get("MaxNodes", "")),
            _admission(cluster, nodes, environ),
        ]
    return found + judge_config(config, partition, cluster)


def fields_of(text: str) -> dict[str, str]:
    """`Name = value` of each line. Pure."""
    return {match[1]: match[2] for match in _FIELD.finditer(text)}


def judge_partition(name: str, partition: Mapping[str, str], *, what: str = "partition") -> Verdict:
    """`partition`: its fields, empty if there is none of this name. Pure."""
    shown = printable_name(partition.get("PartitionName", name) or "no default partition")
    if not partition:
        todo = "`sinfo -s` lists the partitions: correct it in your cluster's settings"
        return Verdict(
            name=what,
            status="failed",
            value=f"{shown}: does not exist",
            allowed="a partition of this cluster",
            todo=todo,
        )
    state = partition.get("State", "")
    if state == "UP":
        return Verdict(name=what, status="ok", value=f"{shown} is up")
    todo = "choose another partition, or wait until it is up (`sinfo -s`)"
    return Verdict(name=what, status="failed", value=f"{shown} is {state}", allowed="UP", todo=todo)


def judge_limit(cluster: ClusterConfig, most: str, *, what: str = "MaxTime") -> Verdict:
    """A partition's MaxTime, against the time limit and the margin in which a run saves. Pure."""
    most_seconds, asked = seconds_of(most), asked_seconds(cluster.time_limit)
    value = f"{most}, asked for: {cluster.time_limit or 'the default'}, of which {cluster.margin_seconds} s are to save"
    if most_seconds is not None and asked is not None and asked > most_seconds:
        todo = "lower `time_limit:`, or submit more jobs in a row; a job resumes where the last one stopped"
        return Verdict(name=what, status="failed", value=value, allowed=f"up to {most}", todo=todo)
    shortest = min((limit for limit in (most_seconds, asked) if limit is not None), default=None)
    if shortest is not None and shortest <= cluster.margin_seconds:
        todo = "raise `time_limit:`, or lower `margin_seconds:` to no less than a step and a save take"
        allowed = f"more than {cluster.margin_seconds} s"
        return Verdict(name=what, status="failed", value=value, allowed=allowed, todo=todo)
    return Verdict(name=what, status="ok", value=value)


def judge_nodes(asked: int, states: list[str], most: str) -> Verdict:
    """`states`: of each node, in Slurm's words (`idle`, `drained*`). Pure."""
    usable = sum(state.rstrip("*~#!%$@^-").startswith(_USABLE) and not state.endswith("*") for state in states)
    idle = states.count("idle")
    value = f"{asked} asked for; {usable} of {len(states)} are usable, {idle} idle"
    if most.isdecimal() and asked > int(most):
        return Verdict(name="nodes", status="failed", value=value, allowed=f"up to {most}", todo="lower --nodes")
    if asked > usable:
        todo = "lower --nodes; `sinfo -R` says why nodes are out of use"
        status = "failed" if asked > len(states) else "warning"
        return Verdict(name="nodes", status=status, value=value, allowed=f"up to {usable}", todo=todo)  # type: ignore[arg-type]
    return Verdict(name="nodes", status="ok", value=value)


def judge_config(config: Mapping[str, str], partition: Mapping[str, str], cluster: ClusterConfig) -> list[Verdict]:
    """The settings of the whole cluster on which a run's life depends. Pure."""
    return [
        _kill_wait(config, cluster),
        _node_loss(config),
        Verdict(
            name="JobRequeue", status="ok", value=f"{config.get('JobRequeue', 'not known')}; our jobs say --requeue"
        ),
        _requeue_exit(config),
        _array(config),
        _preemption(config, partition),
    ]


def _kill_wait(config: Mapping[str, str], cluster: ClusterConfig) -> Verdict:
    wait = _number(config.get("KillWait", ""))
    value = f"{wait} s between TERM and KILL; before a time limit the ranks have {cluster.margin_seconds} s"
    if wait is None or wait >= _LEAST_KILL_WAIT:
        return Verdict(name="KillWait", status="ok", value=value)
    todo = "nothing, if jobs are never preempted; else save more often: there is no time for a save when one is"
    return Verdict(name="KillWait", status="warning", value=value, allowed=f"{_LEAST_KILL_WAIT} s and more", todo=todo)


def _node_loss(config: Mapping[str, str]) -> Verdict:
    timeout = _number(config.get("SlurmdTimeout", ""))
    if timeout == 0:
        todo = "ask for SlurmdTimeout=300: without it a node that vanished is never missed"
        return Verdict(name="SlurmdTimeout", status="warning", value="0: never", allowed="30 to 600 s", todo=todo)
    value = f"a node that vanished is missed after {'an unknown time' if timeout is None else duration(timeout)}"
    if timeout is None or timeout <= _MOST_SLURMD_TIMEOUT:
        return Verdict(name="SlurmdTimeout", status="ok", value=value)
    todo = "ask for SlurmdTimeout=300: until then a job waits for the lost node"
    return Verdict(name="SlurmdTimeout", status="warning", value=value, allowed="30 to 600 s", todo=todo)


def _requeue_exit(config: Mapping[str, str]) -> Verdict:
    codes = config.get("RequeueExit", "")
    if holds(codes, exit_codes.CONTINUE):
        return Verdict(name="RequeueExit", status="ok", value=f"{codes}, which has {exit_codes.CONTINUE}")
    value = f"{codes or 'none'}; a job requeues itself by scontrol, and ends with {exit_codes.CONTINUE} if that fails"
    todo = f"nothing, if `scontrol requeue` is allowed to users; else ask for RequeueExit={exit_codes.CONTINUE}"
    return Verdict(name="RequeueExit", status="warning", value=value, allowed=f"has {exit_codes.CONTINUE}", todo=todo)


def holds(codes: str, code: int) -> bool:
    """Whether a list such as `75,80-85` has a number. Pure."""
    for word in codes.split(","):
        first, _, last = word.partition("-")
        if first.isdecimal() and (last or first).isdecimal() and int(first) <= code <= int(last or first):
            return True
    return False


def _array(config: Mapping[str, str]) -> Verdict:
    most = _number(config.get("MaxArraySize", ""))
    value = f"{most}; the largest number of a task is one less"
    if most is None or most >= _LEAST_ARRAY:
        return Verdict(name="MaxArraySize", status="ok", value=value)
    todo = "pack in fewer, larger parts, or in several arrays" if most else "arrays are off: submit parts one by one"
    return Verdict(name="MaxArraySize", status="warning", value=value, allowed=f"{_LEAST_ARRAY} and more", todo=todo)


def _preemption(config: Mapping[str, str], partition: Mapping[str, str]) -> Verdict:
    mode = partition.get("PreemptMode") or config.get("PreemptMode", "OFF")
    value = f"{mode}, grace {partition.get('GraceTime', '0')} s"
    if mode.upper() in ("OFF", "REQUEUE", "GANG"):
        return Verdict(name="PreemptMode", status="ok", value=value)
    todo = {
        "CANCEL": "a preempted job is not requeued: submit several in a row, or use a partition with REQUEUE",
    }.get(mode.upper(), "a suspended job keeps its GPU memory and misses its deadlines: use another partition")
    return Verdict(name="PreemptMode", status="warning", value=value, allowed="OFF or REQUEUE", todo=todo)


def _admission(cluster: ClusterConfig, nodes: int, environ: Mapping[str, str]) -> Verdict:
    limit = [f"--time={cluster.time_limit}"] if cluster.time_limit else []
    memory = ["--mem=0"] if cluster.takes_all_memory else []
    try:
        said = slurms_answer(
            [*options_of(cluster, nodes=nodes), *memory, *limit, "--exclusive", "--wrap=true"], environ
        )
    except UserError as error:
        what, _, todo = str(error).partition("; ")
        return Verdict(name="admission", status="failed", value=what, allowed="Slurm accepts such a job", todo=todo)
    return Verdict(name="admission", status="ok", value=said)


def _partition(names: str, environ: Mapping[str, str]) -> dict[str, str] | None:
    """The fields of the first partition that is named, else of the default one; None if there is none."""
    name = names.partition(",")[0]
    found = partitions(environ, name)
    return next((fields for fields in found if name or fields.get("Default") == "YES"), None)


def _answer(words: list[str], environ: Mapping[str, str]) -> str:
    done = ran(words, environ)
    if done.returncode != 0:
        said = printable_name(" ".join(done.stderr.split())[:200])
        raise UserError(f"{words[0]} fails: {said}; run this on a login node, once Slurm's controller answers")
    return done.stdout


def _number(text: str) -> int | None:
    """Reads the number in `300 sec` or `1001`."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None

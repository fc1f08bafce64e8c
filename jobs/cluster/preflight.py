"""`patchline preflight`: checks what must be right on a cluster before the first job is submitted, and says what to do
if it is not.

It checks Slurm's limits, this environment, the store, the shared run directory and, with --deep, as many nodes as
--nodes says. Pure functions judge Slurm's settings, as `scontrol show config` and `show partition` print them;
slurm.conf(5) explains them.
"""

import re
import resource
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jobs import exit_codes
from jobs.cluster.folder_lock import has_flock
from jobs.cluster.preflight_nodes import deep_checks, options_of, shared_checks
from jobs.cluster.settings import ClusterConfig, read_cluster, with_command
from jobs.cluster.slurm import in_one_line, partitions, ran, slurms_answer, with_variables
from jobs.cluster.submit_checks import PartitionLimits, judge_most_nodes, judge_time, limits_in
from jobs.output import json_of_checks, put, table_of_checks
from jobs.settings.runs import PreflightJob
from pipeline.machine.checks import local_checks
from shards.errors import Finding, UserError, judged
from shards.output.quantities import duration, size
from shards.output.terminal import columns_of, printable_name
from shards.verifying.s3_probe import probe_store

_FIELD = re.compile(r"^(\w+)\s*=\s?(.*?)\s*$", re.MULTILINE)
_LEAST_KILL_WAIT, _MOST_SLURMD_TIMEOUT, _LEAST_ARRAY = 30, 600, 1001
_USABLE = ("idle", "mixed", "allocated", "completing", "reserved")
PORTS = range(20_000, 32_000)  # ranks meet on one of these, as in slurm/stage.sbatch
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LEAST_LOCKED = 64 << 20
_COMMAND_SECONDS = 60


def run(job: PreflightJob, *, environ: Mapping[str, str]) -> int:
    """Prints the checks as a table or, with --json, as one JSON object. With --out, also writes the JSON object to a
    file. Returns 0 if there is no fault, else 1."""
    environ = dict(environ)
    read = with_variables(read_cluster(Path(job.cluster)), environ) if job.cluster else ClusterConfig()
    cluster = with_command(read, environ)
    findings = environment_checks(cluster, environ)
    if job.run_dir:
        findings.append(judge_flock(Path(job.run_dir)))
    if job.cluster:
        findings += slurm_checks(cluster, nodes=job.nodes, environ=environ)
    if job.url:
        findings += probe_store(job.url, endpoint=cluster.s3_endpoint, profile=cluster.s3_profile)
    has_failed = any(one.name in ("Slurm", "partition", "admission") and one.status == "fault" for one in findings)
    if job.cluster and not has_failed:
        waits = {"wait_seconds": job.wait_seconds, "environ": environ}
        findings += shared_checks(cluster, Path(job.run_dir), **waits) if job.run_dir else []  # type: ignore[arg-type]
        findings += deep_checks(cluster, nodes=job.nodes, **waits) if job.deep else []  # type: ignore[arg-type]
    _tell(job, findings)
    return exit_codes.FAULTS_FOUND if any(one.status == "fault" for one in findings) else exit_codes.DONE


def _tell(job: PreflightJob, findings: Sequence[Finding]) -> None:
    text = json_of_checks(findings)
    if job.out:
        try:
            Path(job.out).write_text(text)
        except OSError as error:
            raise UserError(f"cannot write --out {job.out}: {error.strerror}", todo="give another file") from error
    put(text if job.json else table_of_checks(findings, columns=columns_of(sys.stdout)))


def environment_checks(cluster: ClusterConfig, environ: Mapping[str, str]) -> list[Finding]:
    """Checks this machine (a login node): versions, limits, and whether the patchline command runs."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    ports = _EPHEMERAL.read_text() if _EPHEMERAL.is_file() else ""
    return [*local_checks(), judge_locked(locked), judge_ports(ports), _command(cluster, environ)]


def judge_locked(soft: int) -> Finding:
    """Judges whether a process may lock enough memory for InfiniBand. `soft` is the soft limit in bytes; -1: there is
    none. Pure."""
    is_free = soft == resource.RLIM_INFINITY
    todo = "with InfiniBand, have the administrator set memlock to unlimited on the nodes, and in slurmd's unit"
    found, is_ok = "no limit" if is_free else size(soft), is_free or soft >= _LEAST_LOCKED
    return judged("locked memory", found, is_ok=is_ok, allowed="no limit", todo=todo)


def judge_flock(run_dir: Path) -> Finding:
    """Reports whether the run directory's file system supports flock. If the directory is missing, checks the nearest
    folder above it."""
    folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
    try:
        without = "no flock here, so submit, cancel and gates use a folder as their lock"
        return Finding(name="lock", found="flock" if has_flock(folder) else without)
    except OSError as error:
        found, todo = f"{printable_name(str(folder))}: {error.strerror}", "give a --run-dir that you may write to"
        return Finding(name="lock", status="fault", found=found, todo=todo)


def judge_ports(text: str) -> Finding:
    """Judges whether the kernel gives our ports to other programs. `text` is the kernel's range of ephemeral ports,
    first and last. Pure."""
    found = f"ranks meet on one of {PORTS.start} to {PORTS.stop - 1}"
    numbers = [int(word) for word in re.findall(r"\d+", text)]
    is_ok = len(numbers) != 2 or numbers[0] >= PORTS.stop or numbers[1] < PORTS.start
    if not is_ok:
        found = f"the kernel gives {numbers[0]} to {numbers[1]} to other programs; {found}"
    todo = "nothing, usually: a port that is taken is passed over; or set net.ipv4.ip_local_port_range"
    return judged("ports", found, is_ok=is_ok, allowed="32768 and up", todo=todo)


def _command(cluster: ClusterConfig, environ: Mapping[str, str]) -> Finding:
    shown = printable_name(shlex.join(cluster.command))
    todo = "correct `command:` in your cluster's settings"
    if shutil.which(cluster.command[0], path=environ.get("PATH")) is None:
        if cluster.setup:  # a module on the nodes may provide it
            value = f"{shown} is not on this machine's PATH; `setup:` may bring it on the nodes"
            return Finding(name="command here", status="warning", found=value, todo="see the check with --run-dir")
        return Finding(name="command here", status="fault", found=f"no {shown}", allowed="a program", todo=todo)
    try:
        done = ran([*cluster.command, "--version"], environ, seconds=_COMMAND_SECONDS)
    except UserError as error:
        return Finding(name="command here", status="fault", found=error.what, todo=todo)
    if done.returncode == 0:
        return Finding(name="command here", status="ok", found=printable_name(done.stdout.strip()[:80]))
    said = in_one_line((done.stderr.strip().splitlines() or [""])[-1])
    value = f"{shown} --version ends with {done.returncode}: {said}"
    return Finding(name="command here", status="fault", found=value, allowed="0", todo=todo)


def slurm_checks(cluster: ClusterConfig, *, nodes: int, environ: Mapping[str, str]) -> list[Finding]:
    """Returns all checks of Slurm, or a single fault if one of the first calls fails. Raises UserError if a later call
    fails."""
    try:
        config = fields_of(_answer(["scontrol", "show", "config"], environ))
        named = _partition(cluster.partition, environ)
    except UserError as error:
        return [Finding(name="Slurm", status="fault", found=error.what, allowed="an answer", todo=error.todo)]
    partition = {} if named is None else named
    found = [
        Finding(name="Slurm", status="ok", found=config.get("SLURM_VERSION", "version not known")),
        judge_partition(cluster.partition, partition),
    ]
    if cluster.cpu_partition and cluster.cpu_partition != cluster.partition:
        other = _partition(cluster.cpu_partition, environ) or {}
        found.append(judge_partition(cluster.cpu_partition, other, what="cpu_partition"))
        if other:
            found.append(judge_limit(cluster, other, what="MaxTime of cpu_partition"))
    if partition:
        states = _answer(
            ["sinfo", "--noheader", "--Node", f"--partition={partition['PartitionName']}", "-o%T"], environ
        )
        found += [
            judge_limit(cluster, partition),
            judge_nodes(nodes, states.split(), limits_in([partition], name="")),
            _admission(cluster, nodes, environ),
        ]
    return found + judge_config(config, partition, cluster)


def fields_of(text: str) -> dict[str, str]:
    """Returns the fields of a text with lines of the form `Name = value`. Pure."""
    return {match[1]: match[2] for match in _FIELD.finditer(text)}


def judge_partition(name: str, partition: Mapping[str, str], *, what: str = "partition") -> Finding:
    """Judges whether the partition exists and is up. `partition` has its fields; it is empty if no partition has this
    name. Pure."""
    shown = printable_name(partition.get("PartitionName", name) or "no default partition")
    if not partition:
        found, allowed = f"{shown}: does not exist", "a partition of this cluster"
        todo = "`sinfo -s` lists the partitions: correct it in your cluster's settings"
        return Finding(name=what, status="fault", found=found, allowed=allowed, todo=todo)
    state = partition.get("State", "")
    found = f"{shown} is up" if state == "UP" else f"{shown} is {state}"
    todo = "choose another partition, or wait until it is up (`sinfo -s`)"
    return judged(what, found, is_ok=state == "UP", allowed="UP", todo=todo, otherwise="fault")


def judge_limit(cluster: ClusterConfig, partition: Mapping[str, str], *, what: str = "MaxTime") -> Finding:
    """Judges whether a partition allows the requested time limit, and whether the margin leaves time for a save.
    Pure."""
    limits = limits_in([partition], name="")
    return replace(
        judge_time(limits, cluster.time_limit, margin=cluster.margin_seconds, flag="`time_limit:`"), name=what
    )


def judge_nodes(asked: int, states: list[str], limits: PartitionLimits) -> Finding:
    """Judges whether enough nodes are usable. `states` has Slurm's word for the state of each node (`idle`,
    `drained*`). Pure."""
    usable = sum(state.rstrip("*~#!%$@^-").startswith(_USABLE) and not state.endswith("*") for state in states)
    most = judge_most_nodes(limits, asked)
    if most.status == "fault":
        return replace(most, name="nodes")
    found = f"{most.found}; {usable} of {len(states)} are usable, {states.count('idle')} idle"
    if asked <= usable:
        return Finding(name="nodes", found=found)
    return Finding(
        name="nodes",
        status="fault" if asked > len(states) else "warning",
        found=found,
        allowed=f"up to {usable}",
        todo="lower --nodes; `sinfo -R` says why nodes are out of use",
    )


def judge_config(config: Mapping[str, str], partition: Mapping[str, str], cluster: ClusterConfig) -> list[Finding]:
    """Judges the cluster-wide settings that every run depends on. Pure."""
    wait, timeout = _number(config.get("KillWait", "")), _number(config.get("SlurmdTimeout", ""))
    codes, most = config.get("RequeueExit", ""), _number(config.get("MaxArraySize", ""))
    mode, ours = partition.get("PreemptMode") or config.get("PreemptMode", "OFF"), exit_codes.CONTINUE
    late = "until then a job waits for the lost node" if timeout else "without it a node that vanished is never missed"
    missed = "an unknown time" if timeout is None else duration(timeout)
    requeues = f"{codes or 'none'}; a job requeues itself by scontrol, and ends with {ours} if that fails"
    return [
        judged(
            "KillWait",
            f"{wait} s between TERM and KILL; before a time limit the ranks have {cluster.margin_seconds} s",
            is_ok=wait is None or wait >= _LEAST_KILL_WAIT,
            allowed=f"{_LEAST_KILL_WAIT} s and more",
            todo="nothing, if jobs are never preempted; else save more often: there is no time for a save when one is",
        ),
        judged(
            "SlurmdTimeout",
            "0: never" if timeout == 0 else f"a node that vanished is missed after {missed}",
            is_ok=timeout is None or 0 < timeout <= _MOST_SLURMD_TIMEOUT,
            allowed="30 to 600 s",
            todo=f"ask for SlurmdTimeout=300: {late}",
        ),
        Finding(name="JobRequeue", found=f"{config.get('JobRequeue', 'not known')}; our jobs say --requeue"),
        judged(
            "RequeueExit",
            f"{codes}, which has {ours}" if holds(codes, ours) else requeues,
            is_ok=holds(codes, ours),
            allowed=f"has {ours}",
            todo=f"nothing, if `scontrol requeue` is allowed to users; else ask for RequeueExit={ours}",
        ),
        judged(
            "MaxArraySize",
            f"{most}; the largest number of a task is one less",
            is_ok=most is None or most >= _LEAST_ARRAY,
            allowed=f"{_LEAST_ARRAY} and more",
            todo="pack in fewer, larger parts, or in several arrays"
            if most
            else "arrays are off: submit parts one by one",
        ),
        judged(
            "PreemptMode",
            f"{mode}, grace {partition.get('GraceTime', '0')} s",
            is_ok=mode.upper() in ("OFF", "REQUEUE", "GANG"),
            allowed="OFF or REQUEUE",
            todo="a preempted job is not requeued: submit several in a row, or use a partition with REQUEUE"
            if mode.upper() == "CANCEL"
            else "a suspended job keeps its GPU memory and misses its deadlines: use another partition",
        ),
    ]


def holds(codes: str, code: int) -> bool:
    """Whether a list such as `75,80-85` contains a number. Pure."""
    for word in codes.split(","):
        first, _, last = word.partition("-")
        if first.isdecimal() and (last or first).isdecimal() and int(first) <= code <= int(last or first):
            return True
    return False


def _admission(cluster: ClusterConfig, nodes: int, environ: Mapping[str, str]) -> Finding:
    limit = [f"--time={cluster.time_limit}"] if cluster.time_limit else []
    whole = ["--mem=0"] if cluster.takes_all_memory else []
    whole += ["--exclusive"] if cluster.exclusive else []
    try:
        said = slurms_answer([*options_of(cluster, nodes=nodes), *whole, *limit, "--wrap=true"], environ)
    except UserError as error:
        allowed = "Slurm accepts such a job"
        return Finding(name="admission", status="fault", found=error.what, allowed=allowed, todo=error.todo)
    return Finding(name="admission", status="ok", found=said)


def _partition(names: str, environ: Mapping[str, str]) -> dict[str, str] | None:
    """Returns the fields of the first partition in `names`, or of the default partition if `names` is empty; None if it
    does not exist."""
    name = names.partition(",")[0]
    found = partitions(environ, name)
    return next((fields for fields in found if name or fields.get("Default") == "YES"), None)


def _answer(words: list[str], environ: Mapping[str, str]) -> str:
    done = ran(words, environ)
    if done.returncode != 0:
        said = in_one_line(done.stderr)
        raise UserError(f"{words[0]} fails: {said}", todo="run this on a login node, once Slurm's controller answers")
    return done.stdout


def _number(text: str) -> int | None:
    """Returns the number at the beginning of a text such as `300 sec` or `1001`; None if there is none."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None

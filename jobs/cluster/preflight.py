"""`patchline preflight`: what of a cluster must be right before the first job is submitted, and what to do if not.

Slurm's limits, this environment, the store, the shared run directory, and with --deep every node."""

import json
import re
import resource
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.cluster.folder_lock import has_flock
from jobs.cluster.preflight_nodes import deep_checks, shared_checks
from jobs.cluster.preflight_slurm import slurm_checks
from jobs.cluster.settings import ClusterConfig, read_cluster, with_command
from jobs.cluster.slurm import ran
from jobs.output import put, table_of_checks
from jobs.settings.models import PreflightJob
from pipeline.machine.checks import local_checks
from shards.errors import UserError
from shards.output.quantities import plural, size
from shards.output.terminal import columns_of, printable_name
from shards.verifying.s3_probe import probe_store
from shards.verifying.verdict import Verdict

_SHOWN = {"ok": "ok", "warning": "warning", "failed": "FAILED"}
_PORTS = range(20_000, 32_000)  # of the ranks' meeting place, as in slurm/stage.sbatch
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LEAST_LOCKED = 64 << 20
_COMMAND_SECONDS = 60


def run(job: PreflightJob, *, environ: Mapping[str, str]) -> int:
    """Prints the table, or one JSON object; 0 if nothing has failed, else 1."""
    cluster = with_command(read_cluster(Path(job.cluster)) if job.cluster else ClusterConfig(), environ)
    verdicts = environment_checks(cluster, environ)
    facts: dict[str, Any] = {}
    if job.run_dir:
        verdicts.append(judge_flock(Path(job.run_dir)))
    if job.cluster:
        verdicts += slurm_checks(cluster, nodes=job.nodes, environ=environ)
    if job.url:
        found, facts = probe_store(job.url, endpoint=cluster.s3_endpoint, profile=cluster.s3_profile)
        verdicts += found
    has_failed = any(one.name in ("Slurm", "partition", "admission") and one.status == "failed" for one in verdicts)
    if job.cluster and not has_failed:
        waits = {"wait_seconds": job.wait_seconds, "environ": environ}
        verdicts += shared_checks(cluster, Path(job.run_dir), **waits) if job.run_dir else []  # type: ignore[arg-type]
        verdicts += deep_checks(cluster, nodes=job.nodes, **waits) if job.deep else []  # type: ignore[arg-type]
    _tell(job, verdicts, facts)
    return exit_codes.FAULTS_FOUND if any(one.status == "failed" for one in verdicts) else exit_codes.DONE


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


def _tell(job: PreflightJob, verdicts: Sequence[Verdict], facts: dict[str, Any]) -> None:
    counts = {status: sum(one.status == status for one in verdicts) for status in _SHOWN}
    found = {"checks": [asdict(one) for one in verdicts], "counts": counts, "s3": facts}
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

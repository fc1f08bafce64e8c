"""Checks a job before `patchline submit` puts it into the queue. It finds a store or a run directory that cannot work,
a time limit too short to save anything, and more time or nodes than a partition allows. `--no-check` skips these
checks. `patchline preflight` judges the limits by the same rules.

With EnforcePartLimits=NO, Slurm's default, sbatch accepts a job that asks for more than its partition allows, and the
job waits for ever.
"""

import logging
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs.cluster.container import is_mounted, unmounted_in
from jobs.cluster.settings import ClusterConfig, Names, asked_seconds, seconds_of
from jobs.cluster.slurm import partitions, ran
from jobs.settings.runs import PlanJob
from pipeline.shared_settings import RECORD_FILE
from pipeline.training.reporting.ledger import NUM_SAVES, save_seconds
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.batch_plan import plan_batch, shared_lanes
from shards.config_values import shown_value
from shards.errors import Finding, InvalidDataError, UserError
from shards.files.local_files import read_local_file
from shards.output.quantities import duration
from shards.output.terminal import printable_name
from shards.verifying.s3_probe import unreachable

log = logging.getLogger(__name__)
_MOUNTS = Path("/proc/mounts")
_LOCAL_TO_ONE_NODE = ("tmpfs", "ramfs", "devtmpfs")
_ON_A_DISK = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "overlay")
_EXPORTS = Path("/var/lib/nfs/etab")  # the folders that this machine shares by NFS
_ROOMIEST = "b200"  # the forecast needs a GPU; checkpoints have the same size on every kind
_MOST_BYTES = 16 << 20
_LEAST_GATE_MINUTES, _MOST_GATE_MINUTES = 2, 30  # a gate waits at most 10 minutes for Slurm
_ANYWAY = "or submit with --no-check"


@dataclass(frozen=True, kw_only=True)
class PartitionLimits:
    """The limits of one partition, or the widest of several, in seconds and nodes. None means that there is no limit,
    or that it is not known. `default_seconds`: the time limit of a job that asks for none."""

    name: str
    seconds: int | None = None
    default_seconds: int | None = None
    nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class AskedJob:
    """A job that is to be submitted, and what it asks for. `words`: its arguments. `nodes`: the number of nodes without
    spares. `time_limit`: its time limit in Slurm's format; empty: the limit in the cluster's settings."""

    job: Any
    nodes: int
    time_limit: str
    has_ranks: bool
    words: tuple[str, ...] = ()

    @property
    def run_dir(self) -> str:
        """The run's folder; empty for a stage without one."""
        return str(getattr(self.job, "run_dir", ""))


def refuse_job(
    asked: AskedJob,
    cluster: ClusterConfig,
    limits: PartitionLimits,
    environ: Mapping[str, str],
    *,
    names: Names = Names.OF_SUBMIT,
) -> None:
    """Raises UserError for a job that cannot work, would wait for ever, or would end before it has saved. Logs
    warnings. `limits`: the limits of the job's partition."""
    _refuse(job_checks(asked, cluster, limits, environ, names=names))
    _refuse_uneven(asked, cluster)
    if asked.has_ranks and cluster.container.image:
        _refuse_container(asked, cluster, environ)


def refuse_unreachable(words: Sequence[str], cluster: ClusterConfig, *, is_dry: bool) -> None:
    """Raises UserError for the first bucket in `words` that cannot be used. In a dry run, which may be on a laptop
    without the keys, logs a warning for each instead."""
    found = (unreachable(url, endpoint=cluster.s3_endpoint, profile=cluster.s3_profile) for url in urls_of(words))
    _refuse(replace(fault, status="warning" if is_dry else "fault", allowed="") for fault in found if fault)


def _refuse_container(asked: AskedJob, cluster: ClusterConfig, environ: Mapping[str, str]) -> None:
    """Raises UserError if this cluster has no pyxis, although the settings need it, or if the container does not have
    the current folder, the run directory or a path among the job's arguments. Logs a warning if it does not have the
    keys of S3."""
    container, home = cluster.container, str(Path.home())
    is_pyxis = container.system == "pyxis" and shutil.which("srun", path=environ.get("PATH")) is not None
    if is_pyxis and "--container-image" not in ran(["srun", "--help"], environ).stdout:
        raise UserError(
            "container.system is pyxis, and srun has no option --container-image: this cluster has no pyxis; set "
            f"container.system to apptainer or singularity, {_ANYWAY}"
        )
    words = [str(Path.cwd()), str(Path(asked.run_dir).resolve()), *asked.words]  # without a run, the first twice
    missing = next(unmounted_in(words, container, home=home), "")
    if missing:
        raise UserError(
            f"{printable_name(missing)} is not in the container, whose mounts are "
            f"{', '.join(container.mounts) or 'none'}; add it, or a folder above it, to container.mounts in your "
            f"cluster's settings, {_ANYWAY}"
        )
    keys = f"{home}/.aws"
    if urls_of(words) and Path(keys).is_dir() and not is_mounted(keys, container, home=home):
        log.warning(
            "the container does not have %s, where ranks look for the keys of S3; add ~/.aws:ro to container.mounts",
            printable_name(keys),
        )


def _refuse(found: Iterable[Finding]) -> None:
    """Raises UserError for the first fault, and logs the warnings before it."""
    for one in found:
        if one.status == "fault":
            raise replace(one, todo=f"{one.todo}, {_ANYWAY}").error()
        if one.status == "warning":
            log.warning("%s; %s", one.found, one.todo)


def job_checks(
    asked: AskedJob, cluster: ClusterConfig, limits: PartitionLimits, environ: Mapping[str, str], *, names: Names
) -> Iterator[Finding]:
    """Yields the result of each check of a job, in order. `limits`: the limits of the job's partition."""
    margin, limit = cluster.margin_seconds, asked.time_limit or cluster.time_limit
    if asked.run_dir:
        run_dir = Path(asked.run_dir)
        kind = file_system(run_dir)
        if kind in _LOCAL_TO_ONE_NODE:
            what = f"--run-dir {printable_name(asked.run_dir)} is on {kind}, in the memory of this machine"
            yield _unshared(what, "choose another folder", nodes=asked.nodes)
        yield judge_time(PartitionLimits(name=""), limit, margin=margin, flag=names.time)
        yield judge_margin(margin, measured_seconds=save_seconds(run_dir))
        if isinstance(asked.job, TrainingJob) and (gpus := cluster.gpus_per_node):
            yield judge_margin(margin, planned_seconds=planned_save_seconds(asked.job, nodes=asked.nodes, gpus=gpus))
        yield from _local_disk(asked, kind, cluster.partition_for(has_ranks=asked.has_ranks), environ)
    own_margin = margin if asked.run_dir else 0
    yield judge_time(limits, limit, margin=own_margin, default_margin=margin, flag=names.time)
    yield judge_most_nodes(limits, asked.nodes + cluster.spares * asked.has_ranks, flag=names.nodes)


def _local_disk(one: AskedJob, kind: str, partition: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding if the run directory is on a disk of this machine that is not shared by NFS, and the nodes are
    other machines."""
    if shutil.which("sinfo", path=environ.get("PATH")) is None:
        return
    if kind not in _ON_A_DISK or is_exported(Path(one.run_dir), _text(_EXPORTS)):
        return
    named = [f"--partition={partition}"] if partition else []
    done = ran(["sinfo", "--noheader", "--Node", *named, "--format=%n %o"], environ)
    others = [line.split() for line in done.stdout.splitlines() if done.returncode == 0 and line.strip()]
    if others and not any(_is_here(name) for names in others for name in names):
        what = f"--run-dir {printable_name(one.run_dir)} is on a disk of this machine ({kind}), which the nodes, such "
        what += f"as {printable_name(others[0][0])}, do not see"
        todo = "choose another folder (`patchline preflight --run-dir` asks two nodes)"
        yield _unshared(what, todo, nodes=one.nodes)


def _unshared(what: str, todo: str, *, nodes: int) -> Finding:
    """Returns the finding for a run directory that nodes do not share. For a job on one node it is only a warning,
    since the job works as long as it stays on that node."""
    if nodes > 1:
        return Finding(status="fault", found=what, allowed="storage that all nodes share", todo=todo)
    found = f"{what}: a requeue that lands on another node starts from scratch there"
    return Finding(status="warning", found=found, todo=todo)


def _refuse_uneven(asked: AskedJob, cluster: ClusterConfig) -> None:
    """Raises UserError if the batch of a training job cannot be divided among the ranks on these nodes, or among the
    lanes, or if a run that has not begun has more ranks than lanes."""
    job = asked.job
    if isinstance(job, TrainingJob):
        plan = plan_batch(
            job.global_batch,
            micro_batch=job.micro_batch,
            num_ranks=asked.nodes * max(1, cluster.gpus_per_node),
            lanes=job.data.lanes,
            pairs=job.data.mixup.is_on,
        )
        wrong = shared_lanes(job.data.lanes, job.data.window_blocks, num_ranks=plan.num_ranks)
        if wrong and not (Path(job.run_dir) / RECORD_FILE).exists():
            raise UserError(wrong)


def is_exported(path: Path, etab: str) -> bool:
    """Whether this machine shares the path by NFS. `etab`: the text of /var/lib/nfs/etab. Pure, except that links are
    followed."""
    where = path.absolute().resolve()
    folders = [line.split()[0].replace("\\040", " ") for line in etab.splitlines() if line.strip()]
    return any(where.is_relative_to(folder) for folder in folders)


def _is_here(name: str) -> bool:
    """Whether a node's name or address is that of this machine."""
    own = socket.gethostname()
    return name in (own, own.partition(".")[0], "localhost") or name.startswith("127.") or name == "::1"


def _text(path: Path) -> str:
    try:
        return read_local_file(path, most_bytes=_MOST_BYTES).decode(errors="replace")
    except (OSError, InvalidDataError):
        return ""


def planned_save_seconds(job: TrainingJob, *, nodes: int, gpus: int) -> float:
    """Returns how many seconds a save takes on `nodes` nodes with `gpus` GPUs each, according to the memory model and
    the rate that `patchline plan` assumes. Returns 0 if the job cannot be planned."""
    from pipeline.planning.forecast import cost_of, forecast  # noqa: PLC0415 - loads torch
    from pipeline.planning.rates import Rates  # noqa: PLC0415 - loads torch

    plan = PlanJob()
    try:
        cost = cost_of(job, num_images=0, num_classes=0, days=plan.days)
        found = forecast(job, cost, gpu=_ROOMIEST, num_gpus=nodes * gpus, rates=Rates(), num_classes=0)
    except UserError:
        return 0.0
    return found.stall_seconds + found.checkpoint_bytes / nodes / (plan.writer_gb_per_second * 1e9)


def refuse_unprintable(run_dir: str, *, what: str = "--run-dir") -> None:
    """Raises UserError if the run directory or the current folder has a path that cannot be in a batch script. `what`:
    the flag or field that gives `run_dir`."""
    for name, path in (("the current folder", str(Path.cwd())), (what, run_dir)):
        if not path.isprintable():
            raise UserError(
                f"{name} is {shown_value(path)}; allowed: printable characters, since sbatch reads it from a line of a "
                "script; choose another folder"
            )
        if "\\" in path or "\\" in str(Path(path).resolve()):  # a link may lead to such a path
            raise UserError(
                f"{name} is {shown_value(path)}; allowed: a path without a backslash, as Slurm opens no log there; "
                "choose another folder"
            )


def urls_of(words: Sequence[str]) -> list[str]:
    """Returns one URL for each bucket that `words` names. Pure."""
    values = [word.partition("=")[2] if word.startswith("--") else word for word in words]
    found: dict[str, str] = {}
    for value in values:
        if value.startswith("s3://") and len(value) > len("s3://"):
            found.setdefault(value.split("/")[2], value)
    return list(found.values())


def file_system(path: Path) -> str:
    """Returns the kind of file system that a path is or will be on, according to /proc/mounts. Returns an empty string
    if it is unknown."""
    mounts = _MOUNTS.read_text(errors="replace") if _MOUNTS.is_file() else ""
    where, best, kind = path.absolute().resolve(), -1, ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = Path(fields[1].replace("\\040", " "))
        if where.is_relative_to(point) and len(point.parts) >= best:  # the later of two mounts at one point counts
            best, kind = len(point.parts), fields[2]
    return kind


def judge_margin(margin: int, *, measured_seconds: float = 0.0, planned_seconds: float = 0.0) -> Finding:
    """Judges whether a save fits into the margin before the time limit. `measured_seconds`: how long a save of this run
    takes until it is committed, which is longer than it holds up training. `planned_seconds`: how long a save will
    take. 0 means not known. Pure."""
    found, least = "", int(2 * measured_seconds) + 1
    if least > margin:
        found = f"a save of this run takes {measured_seconds:,.0f} s (the median of the last {NUM_SAVES})"
        found += ", and at the time limit a run may have to wait for two: the one being written, and its last"
    elif planned_seconds >= margin:
        least = int(planned_seconds) + 1
        rate = PlanJob().writer_gb_per_second
        found = f"a save would take about {planned_seconds:,.0f} s at {rate:g} GB/s per node"
    if not found:
        return Finding(found=f"a save fits into the margin of {margin} s")
    todo = f"raise margin_seconds in your cluster's settings to {least} or more"
    is_certain = max(measured_seconds, planned_seconds) >= margin
    return Finding(status="fault" if is_certain else "warning", found=f"{found}; margin_seconds is {margin}", todo=todo)


def limits_of(partition: str, environ: Mapping[str, str]) -> PartitionLimits:
    """Returns the limits of a partition, of several (`a,b`), or of the default one (an empty name), as far as Slurm
    shows them."""
    if shutil.which("scontrol", path=environ.get("PATH")) is None:
        return PartitionLimits(name=partition)
    names = partition.split(",") if partition else []
    found = [
        fields
        for fields in partitions(environ)
        if fields.get("PartitionName") in names or (not names and fields.get("Default") == "YES")
    ]
    return limits_in(found, name=partition)


def limits_in(found: Sequence[Mapping[str, str]], *, name: str) -> PartitionLimits:
    """Returns the widest limits of partitions, from the fields that scontrol shows. Pure."""
    if not found:
        return PartitionLimits(name=name)
    times = [seconds_of(fields.get("MaxTime", "")) for fields in found]
    nodes = [fields.get("MaxNodes", "") for fields in found]
    defaults = [seconds_of(fields.get("DefaultTime", "")) for fields in found]
    return PartitionLimits(
        name=name or found[0]["PartitionName"],
        seconds=_most(times),
        default_seconds=defaults[0] if len(found) == 1 and defaults[0] is not None else _most(times),
        nodes=_most([int(each) if each.isascii() and each.isdecimal() else None for each in nodes]),
    )


def _most(limits: list[int | None]) -> int | None:
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None


def judge_time(
    limits: PartitionLimits,
    time_limit: str,
    *,
    margin: int,
    default_margin: int | None = None,
    flag: str = Names.OF_SUBMIT.time,
) -> Finding:
    """Judges whether a job would wait for ever, or would end before it has saved. `time_limit`: the job's time limit in
    Slurm's format; empty for the partition's default. `margin`: how many seconds before the limit the ranks are asked
    to save. `default_margin`: the same if the limit is the partition's default. `flag`: what the message calls the
    setting of the limit. Pure."""
    default_margin = margin if default_margin is None else default_margin
    asked, shown = asked_seconds(time_limit), printable_name(limits.name)
    no_less = "lower margin_seconds to no less than a step and a save take"
    if asked is not None and asked <= margin:
        found = f"the time limit is {duration(asked)}, and the ranks are asked to save {margin} s before it"
        return Finding(status="fault", found=found, todo=f"raise {flag}, or {no_less}")
    if asked is not None and limits.seconds is not None and asked > limits.seconds:
        found = f"the time limit is {duration(asked)}, and partition {shown} allows {duration(limits.seconds)}"
        todo = f"lower {flag}, since a requeued job continues where it was ended, or choose another partition"
        return Finding(status="fault", found=f"{found}: the job would wait for ever", todo=todo)
    if asked is None and limits.default_seconds is not None and limits.default_seconds <= default_margin:
        found = f"partition {shown} ends a job without a time limit after {duration(limits.default_seconds)}, and the "
        found += f"ranks are asked to save {default_margin} s before"
        return Finding(status="fault", found=found, todo=f"give {flag}, or {no_less}")
    most = "no limit" if limits.seconds is None else duration(limits.seconds)
    wanted = "the default" if asked is None else duration(asked)
    return Finding(found=f"{most}, asked for: {wanted}, of which {margin} s are to save")


def judge_most_nodes(limits: PartitionLimits, num_nodes: int, *, flag: str = "--nodes") -> Finding:
    """Judges whether a partition allows a job with this number of nodes, including spares. Pure."""
    if limits.nodes is None or num_nodes <= limits.nodes:
        return Finding(found=f"{num_nodes:,} asked for")
    found = f"{num_nodes:,} nodes are asked for, spares with them, and partition {printable_name(limits.name)} allows "
    found += f"{limits.nodes:,}: the job would wait for ever"
    return Finding(status="fault", found=found, todo=f"lower {flag}, or choose another partition")


def gate_minutes(limits: PartitionLimits) -> int:
    """Returns the time limit of a chain's gates in minutes. Raises UserError if the partition allows less than a gate
    needs. Pure."""
    if limits.seconds is None:
        return _MOST_GATE_MINUTES
    if limits.seconds < _LEAST_GATE_MINUTES * 60:
        raise UserError(
            f"partition {printable_name(limits.name)} allows {duration(limits.seconds)}, and a gate of a chain needs "
            f"{_LEAST_GATE_MINUTES} minutes; set cpu_partition in your cluster's settings to another one"
        )
    return min(_MOST_GATE_MINUTES, limits.seconds // 60)

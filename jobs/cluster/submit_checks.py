"""What `patchline submit` refuses before a job waits in the queue for it: a store or a run directory that cannot work,
a time limit in which nothing is saved, and more time or nodes than a partition allows. Each message says what to do;
`--no-check` submits all the same.

With EnforcePartLimits=NO, Slurm's default, sbatch takes a job that asks for more, and the job waits for ever.
"""

import logging
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.cluster.settings import ClusterConfig, asked_seconds, seconds_of
from jobs.cluster.slurm import partitions, ran
from jobs.settings.models import PlanJob
from pipeline.training.reporting.ledger import FILE_NAME as LEDGER
from pipeline.training.reporting.ledger import last_line
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.batch_plan import plan_batch, shared_lanes
from shards.config_values import shown_value
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_file
from shards.output.quantities import duration
from shards.output.terminal import printable_name
from shards.verifying.s3_probe import unreachable

log = logging.getLogger(__name__)
MOUNTS = Path("/proc/mounts")
_LOCAL_TO_ONE_NODE = ("tmpfs", "ramfs", "devtmpfs")
_ON_A_DISK = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "overlay")
_EXPORTS = Path("/var/lib/nfs/etab")  # what this machine shares by NFS
_ROOMIEST = "b200"  # whatever the GPU is, a checkpoint has the same bytes
_MOST_BYTES = 16 << 20
_LEAST_GATE_MINUTES, _MOST_GATE_MINUTES = 2, 30  # a gate waits at most 10 of them for Slurm
_ANYWAY = "or submit with --no-check"


@dataclass(frozen=True, kw_only=True)
class PartitionLimits:
    """The limits of one partition, or the widest of several, in seconds and nodes; None: no limit, or not known.
    `default_seconds`: of a job that asks for no time."""

    name: str
    seconds: int | None = None
    default_seconds: int | None = None
    nodes: int | None = None


def refuse_unreachable(words: Sequence[str], cluster: ClusterConfig, *, is_dry: bool) -> None:
    """UserError for the first of the buckets in the words that cannot be used; in a dry run, which may be on a laptop
    without the keys, a warning for each."""
    for url in urls_of(words):
        fault = unreachable(url, endpoint=cluster.s3_endpoint, profile=cluster.s3_profile)
        if fault and is_dry:
            log.warning("%s; %s", fault.value, fault.todo)
        elif fault:
            raise UserError(f"{fault.value}; {fault.todo}, {_ANYWAY}")


def refuse_wrong_place(cluster: ClusterConfig, *, run_dir: str, nodes: int, limit: str, job: object = None) -> None:
    """UserError for a run directory or a time limit that cannot work. `run_dir`: empty for a stage without one;
    `limit`: --time, or empty."""
    if not run_dir:
        return
    kind = file_system(Path(run_dir), MOUNTS.read_text(errors="replace") if MOUNTS.is_file() else "")
    if kind in _LOCAL_TO_ONE_NODE:
        what = f"--run-dir {printable_name(run_dir)} is on {kind}, in the memory of this machine"
        _refuse_unshared(what, "choose another folder", nodes=nodes)
    stall = _mean_stall(Path(run_dir))
    refuse_short_limit(stall, limit or cluster.time_limit, margin=cluster.margin_seconds)
    if isinstance(job, TrainingJob) and cluster.gpus_per_node:
        refuse_short_margin(planned_save_seconds(job, nodes=nodes, gpus=cluster.gpus_per_node), cluster.margin_seconds)


def refuse_uneven(cluster: ClusterConfig, *, nodes: int, job: object) -> None:
    """UserError if the ranks on these nodes, or the lanes, do not divide the batch of a training job, or if a run that
    has not begun has more ranks than lanes."""
    if isinstance(job, TrainingJob):
        plan = plan_batch(
            job.global_batch,
            micro_batch=job.micro_batch,
            num_ranks=nodes * max(1, cluster.gpus_per_node),
            lanes=job.data.lanes,
            pairs=job.data.mixup.is_on,
        )
        wrong = shared_lanes(job.data.lanes, job.data.window_blocks, num_ranks=plan.num_ranks)
        if wrong and not (Path(job.run_dir) / "job.yaml").exists():
            raise UserError(wrong)


def refuse_local(run_dir: str, *, nodes: int, partition: str, environ: Mapping[str, str]) -> None:
    """UserError if a run of several nodes has its directory on a disk of this machine, which it does not share by NFS,
    and the nodes are other machines; of one node, a warning. `partition`: empty: Slurm's default."""
    if not run_dir or shutil.which("sinfo", path=environ.get("PATH")) is None:
        return
    mounts = MOUNTS.read_text(errors="replace") if MOUNTS.is_file() else ""
    kind = file_system(Path(run_dir), mounts)
    if kind not in _ON_A_DISK or is_exported(Path(run_dir), _text(_EXPORTS)):
        return
    named = [f"--partition={partition}"] if partition else []
    done = ran(["sinfo", "--noheader", "--Node", *named, "--format=%n %o"], environ)
    others = [line.split() for line in done.stdout.splitlines() if done.returncode == 0 and line.strip()]
    if others and not any(_is_here(name) for names in others for name in names):
        what = f"--run-dir {printable_name(run_dir)} is on a disk of this machine ({kind}), which the nodes, such as "
        what += f"{printable_name(others[0][0])}, do not see"
        _refuse_unshared(what, "choose another folder (`patchline preflight --run-dir` asks two nodes)", nodes=nodes)


def _refuse_unshared(what: str, todo: str, *, nodes: int) -> None:
    """UserError for a run directory that nodes do not share; with one node, a warning, since that one may be right."""
    if nodes > 1:
        raise UserError(f"{what}; allowed: storage that all nodes share; {todo}, {_ANYWAY}")
    log.warning("%s: a requeue that lands on another node starts from scratch there; %s", what, todo)


def is_exported(path: Path, etab: str) -> bool:
    """Whether a path is in a folder that this machine shares by NFS, from the text of /var/lib/nfs/etab. Pure but for
    links on the way."""
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
    """How long a save takes on this number of GPUs of each node, by the memory model and the rate that `patchline plan`
    assumes of a node; 0 if the job cannot be planned."""
    from pipeline.planning.forecast import cost_of, forecast  # noqa: PLC0415 - loads torch

    plan = PlanJob()
    try:
        cost = cost_of(job, num_images=0, num_classes=0, days=plan.days)
        found = forecast(job, cost, gpu=_ROOMIEST, num_gpus=nodes * gpus, mfu=plan.mfu, num_classes=0)
    except UserError:
        return 0.0
    return found.stall_seconds + found.checkpoint_bytes / nodes / (plan.writer_gb_per_second * 1e9)


def refuse_unprintable(run_dir: str, *, what: str = "--run-dir") -> None:
    """UserError for paths that cannot be in a batch script: of a folder that the flag or field `what` gives, and of the
    current one."""
    for name, path in (("the current folder", str(Path.cwd())), (what, run_dir)):
        if not path.isprintable():
            raise UserError(
                f"{name} is {shown_value(path)}; allowed: printable characters, since sbatch reads it from a line of a "
                "script; choose another folder"
            )
        if "\\" in path or "\\" in str(Path(path).resolve()):  # a link may lead there
            raise UserError(
                f"{name} is {shown_value(path)}; allowed: a path without a backslash, as Slurm opens no log there; "
                "choose another folder"
            )


def urls_of(words: Sequence[str]) -> list[str]:
    """One URL for each bucket that the words name. Pure."""
    values = [word.partition("=")[2] if word.startswith("--") else word for word in words]
    found: dict[str, str] = {}
    for value in values:
        if value.startswith("s3://") and len(value) > len("s3://"):
            found.setdefault(value.split("/")[2], value)
    return list(found.values())


def file_system(path: Path, mounts: str) -> str:
    """The kind of the file system that a path is, or will be, on, from the text of /proc/mounts; empty if not known.
    Pure but for links on the way."""
    where, best, kind = path.absolute().resolve(), -1, ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = Path(fields[1].replace("\\040", " "))
        if where.is_relative_to(point) and len(point.parts) >= best:  # of two on one point the later counts
            best, kind = len(point.parts), fields[2]
    return kind


def _mean_stall(run_dir: Path) -> float:
    """Mean seconds that a save of the run held it up, by its ledger, which has a line for each; 0 without one."""
    last, path = last_line(run_dir), run_dir / LEDGER
    if not last:
        return 0.0
    return float(last["seconds"]["checkpoint"]) / max(1, path.read_bytes().count(b"\n"))


def refuse_short_limit(stall_seconds: float, limit: str, *, margin: int) -> None:
    """UserError if a job would be cut off before it has saved. `stall_seconds`: what a save of this run has held it up
    so far, 0 if not known. Pure."""
    asked = asked_seconds(limit)
    if asked is not None and asked <= margin:
        raise UserError(
            f"the time limit is {duration(asked)}, and the ranks are asked to save {margin} s before it; raise --time, "
            "or lower margin_seconds to no less than a step and a save take"
        )
    if stall_seconds >= margin:
        raise UserError(
            f"a save has held this run up for {stall_seconds:,.0f} s so far, and margin_seconds is {margin}; raise "
            f"margin_seconds in your cluster's settings above it, {_ANYWAY}"
        )


def refuse_short_margin(save_seconds: float, margin: int) -> None:
    """UserError if a save takes longer than what is left for it before the time limit. Pure."""
    if save_seconds >= margin:
        raise UserError(
            f"a save would take about {save_seconds:,.0f} s at {PlanJob().writer_gb_per_second:g} GB/s per node, and "
            f"margin_seconds is {margin}; raise margin_seconds in your cluster's settings above it, {_ANYWAY}"
        )


def limits_of(partition: str, environ: Mapping[str, str]) -> PartitionLimits:
    """Returns the limits of a partition, of several as in `a,b`, or of the default one (empty), as far as Slurm
    says."""
    if shutil.which("scontrol", path=environ.get("PATH")) is None:
        return PartitionLimits(name=partition)
    names = partition.split(",") if partition else []
    found = [
        fields
        for fields in partitions(environ)
        if fields.get("PartitionName") in names or (not names and fields.get("Default") == "YES")
    ]
    if not found:
        return PartitionLimits(name=partition)
    times = [seconds_of(fields.get("MaxTime", "")) for fields in found]
    nodes = [fields.get("MaxNodes", "") for fields in found]
    defaults = [seconds_of(fields.get("DefaultTime", "")) for fields in found]
    return PartitionLimits(
        name=partition or found[0]["PartitionName"],
        seconds=_most(times),
        default_seconds=defaults[0] if len(found) == 1 and defaults[0] is not None else _most(times),
        nodes=_most([int(each) if each.isascii() and each.isdecimal() else None for each in nodes]),
    )


def _most(limits: list[int | None]) -> int | None:
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None


def refuse_over_limits(limits: PartitionLimits, *, nodes: int, time_limit: str, margin: int) -> None:
    """UserError if a job would wait for ever, or would end before it has saved. `time_limit`: in Slurm's words, empty:
    the partition's default; `margin`: seconds before the limit at which the ranks are asked to save. Pure."""
    asked, shown = asked_seconds(time_limit), printable_name(limits.name)
    if asked is not None and limits.seconds is not None and asked > limits.seconds:
        raise UserError(
            f"the time limit is {duration(asked)}, and partition {shown} allows {duration(limits.seconds)}: the job "
            "would wait for ever; lower --time, since a requeued job continues where it was ended, or choose another "
            f"partition, {_ANYWAY}"
        )
    if limits.nodes is not None and nodes > limits.nodes:
        raise UserError(
            f"{nodes:,} nodes are asked for, spares with them, and partition {shown} allows {limits.nodes:,}: the job "
            f"would wait for ever; lower --nodes, or choose another partition, {_ANYWAY}"
        )
    if asked is None and limits.default_seconds is not None and limits.default_seconds <= margin:
        raise UserError(
            f"partition {shown} ends a job without a time limit after {duration(limits.default_seconds)}, and the "
            f"ranks are asked to save {margin} s before; give --time, or lower margin_seconds to no less than a step "
            f"and a save take, {_ANYWAY}"
        )


def gate_minutes(limits: PartitionLimits) -> int:
    """The time limit of a chain's gates. UserError if the partition allows less than a gate needs. Pure."""
    if limits.seconds is None:
        return _MOST_GATE_MINUTES
    if limits.seconds < _LEAST_GATE_MINUTES * 60:
        raise UserError(
            f"partition {printable_name(limits.name)} allows {duration(limits.seconds)}, and a gate of a chain needs "
            f"{_LEAST_GATE_MINUTES} minutes; set cpu_partition in your cluster's settings to another one"
        )
    return min(_MOST_GATE_MINUTES, limits.seconds // 60)

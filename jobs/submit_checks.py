"""What `patchline submit` refuses before a job waits in the queue for it: a store or a run directory that cannot work,
and a time limit in which nothing is saved. Each message says what to do; `--no-check` submits all the same."""

from collections.abc import Sequence
from pathlib import Path

from jobs.cluster import ClusterConfig
from jobs.model_jobs import PlanJob
from jobs.preflight_slurm import asked_seconds
from pipeline.training.config import TrainingJob
from pipeline.training.ledger import FILE_NAME as LEDGER
from pipeline.training.ledger import last_line
from shards.checking.s3_probe import unreachable
from shards.errors import UserError
from shards.quantities import duration
from shards.terminal import printable_name

_MOUNTS = Path("/proc/mounts")
_LOCAL_TO_ONE_NODE = ("tmpfs", "ramfs", "devtmpfs")
_ROOMIEST = "b200"  # whatever the GPU is, a checkpoint has the same bytes
_ANYWAY = "or submit with --no-check"


def refuse_unreachable(words: Sequence[str], cluster: ClusterConfig) -> None:
    """UserError for the first of the buckets in the words that cannot be used."""
    for url in urls_of(words):
        fault = unreachable(url, endpoint=cluster.s3_endpoint, profile=cluster.s3_profile)
        if fault:
            raise UserError(f"{fault.value}; {fault.todo}, {_ANYWAY}")


def refuse_wrong_place(cluster: ClusterConfig, *, run_dir: str, nodes: int, limit: str, job: object = None) -> None:
    """UserError for a run directory or a time limit that cannot work. `run_dir`: empty for a stage without one;
    `limit`: --time, or empty."""
    if not run_dir:
        return
    kind = file_system(Path(run_dir), _MOUNTS.read_text(errors="replace") if _MOUNTS.is_file() else "")
    if nodes > 1 and kind in _LOCAL_TO_ONE_NODE:
        raise UserError(
            f"--run-dir {printable_name(run_dir)} is on {kind}, in the memory of this machine; allowed: storage that "
            f"all nodes share; choose another folder, {_ANYWAY}"
        )
    stall = _mean_stall(Path(run_dir))
    refuse_short_limit(stall, limit or cluster.time_limit, margin=cluster.margin_seconds)
    if isinstance(job, TrainingJob) and cluster.gpus_per_node:
        refuse_short_margin(planned_save_seconds(job, nodes=nodes, gpus=cluster.gpus_per_node), cluster.margin_seconds)


def planned_save_seconds(job: TrainingJob, *, nodes: int, gpus: int) -> float:
    """How long a save takes on so many GPUs of each node, by the memory model and the rate that `patchline plan`
    assumes of a node; 0 if the job cannot be planned."""
    from pipeline.training.cost import cost_of  # noqa: PLC0415 - loads torch
    from pipeline.training.forecast import forecast  # noqa: PLC0415

    plan = PlanJob()
    try:
        cost = cost_of(job, num_images=0, num_classes=0, days=plan.days)
        found = forecast(job, cost, gpu=_ROOMIEST, num_gpus=nodes * gpus, mfu=plan.mfu, num_classes=0)
    except UserError:
        return 0.0
    return found.stall_seconds + found.checkpoint_bytes / nodes / (plan.writer_gb_per_second * 1e9)


def refuse_short_margin(save_seconds: float, margin: int) -> None:
    """UserError if a save takes longer than what is left for it before the time limit. Pure."""
    if save_seconds >= margin:
        raise UserError(
            f"a save would take about {save_seconds:,.0f} s at {PlanJob().writer_gb_per_second:g} GB/s per node, and "
            f"margin_seconds is {margin}; raise margin_seconds in your cluster's settings above it, {_ANYWAY}"
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


def _mean_stall(run_dir: Path) -> float:
    """Mean seconds that a save of the run held it up, by its ledger, which has a line for each; 0 without one."""
    last, path = last_line(run_dir), run_dir / LEDGER
    if not last:
        return 0.0
    return float(last["seconds"]["checkpoint"]) / max(1, path.read_bytes().count(b"\n"))

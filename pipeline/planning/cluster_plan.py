"""What a run would take on N nodes of GPUs: S3 traffic, checkpoints, failures, the queue, GPU-hours, cost. Pure.

It adds to the forecast of one set of GPUs (forecast.py) what interrupts and feeds a run there (goodput.py).
"""

import math
from dataclasses import dataclass

from pipeline.checkpoints.config import best_interval, mean_seconds_to_failure
from pipeline.planning.forecast import Forecast
from pipeline.planning.goodput import ExpectedOutcome, Regime, outcome
from pipeline.planning.step_time import StepTime
from pipeline.training.zero.batch_plan import times_read
from shards.errors import UserError

# Failures per node and day that others have published, by the name of the cluster or the run.
PUBLISHED_RATES = {
    "RSC-2": 0.00234,  # Meta, arXiv 2410.21680, as a public validation report quotes it; RSC-1 likewise
    "Llama 3": 0.00379,  # 419 unexpected interruptions in 54 days on 2,048 nodes (arXiv 2407.21783)
    "RSC-1": 0.0065,
    "OPT-175B": 0.016,  # metaseq's chronicles: "about 2 machines go down every day", of 124
    "RSC 1k GPUs": 0.0237,  # jobs of 1,024 GPUs there had a failure every 7.9 hours
}
MISSED_SECONDS = 300.0  # until Slurm misses a node that is gone: the default of SlurmdTimeout
MARGIN_SECONDS = 120.0  # before the limit, slurm/stage.sbatch asks for the last save
TAR_BYTES = 2_816  # of a sample beside its image: three tar headers, the padding, the label and the names
_DAY_SECONDS, _HOUR_SECONDS = 86_400.0, 3_600.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the plan assumes of a cluster, all in seconds, bytes and one currency.

    `limit_seconds`: wall time that the queue gives a job, 0 for any. `restart_seconds`: from a failure to the next
    step, the wait in the queue and the start-up included; 0: those two, and until Slurm misses the node.
    `writer_bytes_per_second`: of checkpoints, of a node. `lanes`: of the sample order.
    """

    gpus_per_node: int
    limit_seconds: float
    price: float
    failures_per_node_day: float
    startup_seconds: float
    queue_seconds: float
    restart_seconds: float
    writer_bytes_per_second: float
    image_bytes: int
    samples_per_block: int
    lanes: int


@dataclass(frozen=True, kw_only=True)
class StoreTraffic:
    """Range reads of images, of all ranks, and uploads of checkpoints, on average and while one is uploaded.
    `times_read`: how many ranks read each lane, on average."""

    read_bytes_per_second: float
    reads_per_second: float
    read_bytes: float
    times_read: float
    upload_bytes_per_second: float
    peak_upload_bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class NodesPlan:
    """`ideal_days`: if nothing interrupted the run. `goodputs`: at published failure rates, by their names. `cost`: 0
    if no price is known."""

    num_nodes: int
    num_gpus: int
    images_per_second: float
    images_per_gpu: int
    step: StepTime
    mfu_reached: float
    interval_seconds: float
    stall_seconds: float
    commit_seconds: float
    mean_to_failure_seconds: float
    restart_seconds: float
    ideal_days: float
    days: float
    gpu_hours: float
    cost: float
    outcome: ExpectedOutcome
    goodputs: dict[str, float]
    traffic: StoreTraffic


def plan_nodes(found: Forecast, cluster: Cluster, *, num_nodes: int) -> NodesPlan:
    """The plan of a run whose forecast on these GPUs is `found`. UserError for times that leave none to train."""
    regime = regime_of(found, cluster, num_nodes=num_nodes, failures_per_node_day=cluster.failures_per_node_day)
    num_gpus, work_seconds = num_nodes * cluster.gpus_per_node, found.days * _DAY_SECONDS
    expected = outcome(regime, work_seconds=work_seconds)
    gpu_hours = expected.held_seconds / _HOUR_SECONDS * num_gpus
    return NodesPlan(
        num_nodes=num_nodes,
        num_gpus=num_gpus,
        images_per_second=found.images_per_second,
        images_per_gpu=found.fit.plan.rank_batch,
        step=found.step,
        mfu_reached=found.mfu_reached,
        interval_seconds=regime.interval,
        stall_seconds=regime.stall,
        commit_seconds=regime.commit,
        mean_to_failure_seconds=regime.mean_to_failure,
        restart_seconds=regime.down + regime.startup,
        ideal_days=found.days,
        days=expected.wall_seconds / _DAY_SECONDS,
        gpu_hours=gpu_hours,
        cost=gpu_hours * cluster.price,
        outcome=expected,
        goodputs={
            name: outcome(
                regime_of(found, cluster, num_nodes=num_nodes, failures_per_node_day=rate), work_seconds=work_seconds
            ).goodput
            for name, rate in PUBLISHED_RATES.items()
        },
        traffic=_traffic(found, cluster, regime, num_nodes=num_nodes),
    )


def regime_of(found: Forecast, cluster: Cluster, *, num_nodes: int, failures_per_node_day: float) -> Regime:
    """What interrupts training on these nodes, with saves at the interval of `--checkpoint.auto-interval`."""
    node_bytes = found.checkpoint_bytes / num_nodes
    commit = found.stall_seconds + node_bytes / cluster.writer_bytes_per_second
    mean = mean_seconds_to_failure(num_nodes=num_nodes, failures_per_node_day=failures_per_node_day)
    startup, queue = cluster.startup_seconds, cluster.queue_seconds
    restart = cluster.restart_seconds or MISSED_SECONDS + queue + startup
    if restart < startup:
        raise UserError(
            f"--restart-seconds is {restart:g}, less than the start-up in it, --startup-seconds {startup:g}; "
            "raise the first or lower the second"
        )
    limit = math.inf
    if cluster.limit_seconds:
        limit = cluster.limit_seconds - max(MARGIN_SECONDS, commit)
        if limit <= startup:
            raise UserError(
                f"--max-time is {cluster.limit_seconds / _HOUR_SECONDS:g} hours, and a job starts up for {startup:g} "
                f"seconds and ends {max(MARGIN_SECONDS, commit):g} seconds before them: no time is left to train; "
                "raise --max-time"
            )
    return Regime(
        interval=best_interval(stall_seconds=found.stall_seconds, commit_seconds=commit, mean_seconds=mean),
        stall=found.stall_seconds,
        commit=commit,
        mean_to_failure=mean,
        startup=startup,
        down=restart - startup,
        queue=queue,
        limit=limit,
    )


def _traffic(found: Forecast, cluster: Cluster, regime: Regime, *, num_nodes: int) -> StoreTraffic:
    """A range read fetches a block."""
    times = times_read(cluster.lanes, num_ranks=num_nodes * cluster.gpus_per_node)
    sample_bytes = cluster.image_bytes + TAR_BYTES
    samples_per_second = found.images_per_second * times
    return StoreTraffic(
        read_bytes_per_second=samples_per_second * sample_bytes,
        reads_per_second=samples_per_second / cluster.samples_per_block,
        read_bytes=cluster.samples_per_block * sample_bytes,
        times_read=times,
        upload_bytes_per_second=found.checkpoint_bytes / (regime.interval + regime.stall),
        peak_upload_bytes_per_second=cluster.writer_bytes_per_second * num_nodes,
    )

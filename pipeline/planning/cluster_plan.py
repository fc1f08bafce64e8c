"""Plans a run on N nodes of GPUs: S3 traffic, checkpoints, failures, the queue, GPU-hours and cost. All functions are
pure.

The plan adds to a forecast (forecast.py) the traffic that feeds a run and the events that interrupt it. The share of
the wall time spent on training, while nodes fail and the queue ends jobs, is an expected value in closed form. The
times between failures are exponentially distributed with the mean M (Young 1974, Daly 2006; see
pipeline/checkpoints/config.py). A job starts up for S seconds, then trains t seconds at a time. Each time it saves,
training waits C seconds for the copy, and the save is committed W seconds after it began, while training continues. A
failure sets the run back to the newest commit. So commit k = 0, 1, ... of a job

    comes S + t + W + k (t + C) seconds after the job's start, is worth t seconds of work, and happens if no failure
    comes before it.

Without a limit, the expected work of a job is therefore the geometric series t exp(-(S + t + W) / M) / (1 - exp(-(t +
C) / M)), and a job lasts M. With W = C, this is Daly's expression. A limit ends the series, and a last save adds the
rest. By the renewal-reward theorem, the goodput of a long run is the expected work of a job divided by its expected
wall time.
"""

import math
from dataclasses import dataclass

from pipeline.checkpoints.config import best_interval, mean_seconds_to_failure
from pipeline.planning.forecast import Forecast
from pipeline.planning.host_cores import HostCores
from pipeline.planning.rates import Speeds
from pipeline.planning.step_time import StepTime
from pipeline.training.zero.batch_plan import times_read
from shards.errors import UserError
from shards.output.quantities import DAY_SECONDS

_ROUNDING = 1e-6  # relative, so that rounding errors do not add a job
# Published failures per node and day, by the name of the cluster or the run.
PUBLISHED_RATES = {
    "RSC-2": 0.00234,  # Meta, arXiv 2410.21680, as a public validation report quotes it; RSC-1 likewise
    "Llama 3": 0.00379,  # 419 unexpected interruptions in 54 days on 2,048 nodes (arXiv 2407.21783)
    "RSC-1": 0.0065,
    "OPT-175B": 0.016,  # metaseq's chronicles: "about 2 machines go down every day", of 124
    "RSC 1k GPUs": 0.0237,  # jobs of 1,024 GPUs there had a failure every 7.9 hours
}
MISSED_SECONDS = 300.0  # until Slurm notices that a node is gone: the default of SlurmdTimeout
MARGIN_SECONDS = 120.0  # between the last save and the time limit; the default of `margin_seconds` in cluster.yaml
TAR_BYTES = 2_816  # a sample's bytes besides its image: three tar headers, padding, label and names
_HOUR_SECONDS = 3_600.0


@dataclass(frozen=True, kw_only=True)
class Regime:
    """What interrupts training, in seconds of wall time.

    `interval`: the training time between two saves. `stall`: how long training waits for a save. `commit`: the time
    from the beginning of a save to its commit, at most the interval. `mean_to_failure`: the mean time to a failure of
    any node. `startup`: the time from a job's start to its first step. `down`: the time from a failure to the start of
    the next job, of which up to `queue` are spent in the queue. `queue`: the time from the end of a job at its limit to
    the start of the next one. `limit`: the time from a job's start to its last save, infinite if jobs have no limit.
    """

    interval: float
    stall: float
    commit: float
    mean_to_failure: float
    startup: float
    down: float
    queue: float
    limit: float = math.inf


@dataclass(frozen=True, kw_only=True)
class ExpectedOutcome:
    """Expected values of a run. `goodput`: the share of the wall time that is work of the finished run. `held_seconds`:
    the wall time in which a job holds its nodes. `num_pieces`: the number of jobs if there were no failures."""

    goodput: float
    wall_seconds: float
    held_seconds: float
    num_failures: float
    num_pieces: int


@dataclass(frozen=True, kw_only=True)
class _Expected:
    """Expected values of one job. `work`: the seconds of work that it commits. `alive`: how long it runs. `fails`: the
    probability that a failure ends it."""

    work: float
    alive: float
    fails: float


def outcome(regime: Regime, *, work_seconds: float) -> ExpectedOutcome:
    """Returns the expected outcome of a run that would take `work_seconds` without interruptions. The run's last job
    ends early, but has a whole start-up and a whole last save: one more job starts after the last failure, and the
    number of jobs that the limit ends is rounded up."""
    job = _job(regime)
    num_jobs = work_seconds / job.work
    num_whole = math.ceil(num_jobs * (1 - _ROUNDING))
    failures = num_jobs * job.fails
    held = num_jobs * job.alive + failures * max(0.0, regime.down - regime.queue)
    more = job.fails + (1 - job.fails) * max(0.0, num_whole - num_jobs)
    held += more * (regime.startup + regime.commit)
    waits = failures * min(regime.queue, regime.down) + (num_whole - 1) * (1 - job.fails) * regime.queue
    return ExpectedOutcome(
        goodput=work_seconds / (held + waits),
        wall_seconds=held + waits,
        held_seconds=held,
        num_failures=failures,
        num_pieces=_num_pieces(regime, work_seconds),
    )


def _num_pieces(regime: Regime, work_seconds: float) -> int:
    if regime.limit == math.inf:
        return 1
    return math.ceil(work_seconds / _trained(regime, regime.limit) * (1 - _ROUNDING))


def _job(regime: Regime) -> _Expected:
    mean, cycle = regime.mean_to_failure, regime.interval + regime.stall
    first = regime.startup + regime.interval + regime.commit
    if regime.limit == math.inf:
        work = regime.interval * math.exp(-first / mean) / -math.expm1(-cycle / mean)
        return _Expected(work=work, alive=mean, fails=1.0)
    num_commits = math.floor((regime.limit - first) / cycle) + 1 if regime.limit >= first else 0
    series = math.expm1(-cycle * num_commits / mean) / math.expm1(-cycle / mean)
    fails = -math.expm1(-(regime.limit + regime.commit) / mean)
    rest = _trained(regime, regime.limit) - num_commits * regime.interval
    work = regime.interval * math.exp(-first / mean) * series + (1 - fails) * rest
    return _Expected(work=work, alive=mean * fails, fails=fails)


def _trained(regime: Regime, limit: float) -> float:
    """Returns the seconds of training in a job up to `limit` seconds after its start."""
    window = limit - regime.startup
    num_saves = math.floor(window / (regime.interval + regime.stall))
    return num_saves * regime.interval + min(regime.interval, window - num_saves * (regime.interval + regime.stall))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the plan assumes about a cluster, in seconds, bytes and one currency.

    `limit_seconds`: the wall time that the queue gives a job (0: no limit). `price`: the price of a GPU-hour.
    `restart_seconds`: the time from a failure to the next step, including the wait in the queue and the start-up; 0:
    the sum of these two and MISSED_SECONDS. `writer_bytes_per_second`: the speed at which a node writes checkpoints.
    `lanes`: the number of lanes of the sample order.
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
    """The range reads of images by all ranks, and the uploads of checkpoints: on average, and at the peak while a
    checkpoint is uploaded. `read_bytes`: the size of a range read. `times_read`: how many ranks read each lane, on
    average."""

    read_bytes_per_second: float
    reads_per_second: float
    read_bytes: float
    times_read: float
    upload_bytes_per_second: float
    peak_upload_bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class NodesPlan:
    """The plan of a run on a number of nodes. `speeds`: what each GPU reaches, and where that is from. `ideal_days`:
    its time without interruptions. `goodputs`: the goodput at each of PUBLISHED_RATES. `cost`: the cost of the
    GPU-hours, or 0 if no price is known."""

    num_nodes: int
    num_gpus: int
    images_per_second: float
    least_images_per_second: float
    most_images_per_second: float
    images_per_gpu: int
    micro_batch: int
    speeds: Speeds
    step: StepTime
    cores: HostCores | None
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
    """Returns the plan of a run whose forecast on these GPUs is `found`. Raises UserError if the cluster's times leave
    none for training."""
    regime = regime_of(found, cluster, num_nodes=num_nodes, failures_per_node_day=cluster.failures_per_node_day)
    num_gpus, work_seconds = num_nodes * cluster.gpus_per_node, found.days * DAY_SECONDS
    expected = outcome(regime, work_seconds=work_seconds)
    gpu_hours = expected.held_seconds / _HOUR_SECONDS * num_gpus
    return NodesPlan(
        num_nodes=num_nodes,
        num_gpus=num_gpus,
        images_per_second=found.images_per_second,
        least_images_per_second=found.least_images_per_second,
        most_images_per_second=found.most_images_per_second,
        images_per_gpu=found.fit.plan.rank_batch,
        micro_batch=found.micro_batch,
        speeds=found.speeds,
        step=found.step,
        cores=found.cores,
        mfu_reached=found.mfu_reached,
        interval_seconds=regime.interval,
        stall_seconds=regime.stall,
        commit_seconds=regime.commit,
        mean_to_failure_seconds=regime.mean_to_failure,
        restart_seconds=regime.down + regime.startup,
        ideal_days=found.days,
        days=expected.wall_seconds / DAY_SECONDS,
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
    """Returns what interrupts training on these nodes, with saves at the interval of `--checkpoint.auto-interval`.
    Raises UserError for times that contradict each other or leave none for training."""
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
    """Returns the traffic of images and checkpoints. Each range read fetches a block."""
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

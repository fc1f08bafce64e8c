"""What a run would need and reach on GPUs that nobody has booked yet. Pure."""

from dataclasses import dataclass, replace

from pipeline.planning.cost import Cost
from pipeline.planning.gpus import gpu_named
from pipeline.planning.step_time import EIGHT_A_NODE, Network, StepTime, step_time
from pipeline.training.fitting.budget import Budget, gpu_budget
from pipeline.training.fitting.fit import Fit, fitted
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.batch_plan import plan_batch
from shards.errors import UserError

_SECONDS_A_DAY = 86_400
# Of a rank's state, out of the GPU into pinned memory: 16 lanes of PCIe 4 move 25 GB/s, of PCIe 5 50 [unverified].
COPY_BYTES_PER_SECOND = 20e9


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """`fit`: the plan and its memory on one GPU, within `budget`. `mfu`: the share of nominal operations while the GPUs
    compute; `mfu_reached`: of the whole step. `checkpoint_bytes`: of all ranks. `stall_seconds`: how long training
    waits for the copy of a rank's state."""

    gpu: str
    budget: Budget
    fit: Fit
    mfu: float
    mfu_reached: float
    step: StepTime
    images_per_second: float
    days: float
    checkpoint_bytes: int
    stall_seconds: float


def forecast(
    job: TrainingJob,
    cost: Cost,
    *,
    gpu: str,
    num_gpus: int,
    mfu: float,
    num_classes: int,
    network: Network = EIGHT_A_NODE,
) -> Forecast:
    """The plan of a job on `num_gpus` GPUs named in gpus.py, that reach the share `mfu` of their nominal operations
    while they compute.

    `num_classes`: of the dataset, 0 if it is not known; then the head's memory is left out. UserError for an unknown
    GPU, for GPUs that do not divide the batch, and for a job that does not fit them.
    """
    if not 0 < mfu <= 1:
        raise UserError(f"--mfu is {mfu}; allowed: above 0, up to 1")
    kind = gpu_named(gpu)
    decided = _decided(job, num_classes=num_classes)
    pairs = job.data.mixup.is_on
    whole = plan_batch(
        job.global_batch, micro_batch=job.micro_batch, num_ranks=num_gpus, lanes=job.data.lanes, pairs=pairs
    )
    budget = gpu_budget(kind.memory_bytes, where=gpu)
    fit = fitted(decided, whole, budget, is_on_gpu=True)
    step = step_time(decided, fit.plan, gpu=kind, network=network, train_flops=cost.train_flops, mfu=mfu)
    images_per_second = job.global_batch / step.seconds
    return Forecast(
        gpu=gpu,
        budget=budget,
        fit=fit,
        mfu=mfu,
        mfu_reached=mfu * step.compute_share,
        step=step,
        images_per_second=images_per_second,
        days=cost.num_images_seen / images_per_second / _SECONDS_A_DAY,
        checkpoint_bytes=fit.memory.saved * num_gpus,
        stall_seconds=fit.memory.saved / COPY_BYTES_PER_SECOND,
    )


def _decided(job: TrainingJob, *, num_classes: int) -> TrainingJob:
    """All GPUs of the table compute bf16; a head of one class is next to nothing."""
    precision = "bf16" if job.engine.precision == "auto" else job.engine.precision
    classes = job.model.num_classes or num_classes or 1
    return replace(job, model=replace(job.model, num_classes=classes), engine=replace(job.engine, precision=precision))

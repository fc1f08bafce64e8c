"""Computes what a run costs before it starts, and forecasts its memory and speed on GPUs that are not booked yet. All
functions are pure."""

from dataclasses import dataclass, replace

from pipeline.models.flops import forward_flops, num_parameters
from pipeline.planning.host_cores import HostCores, host_cores
from pipeline.planning.rates import Rates, Speeds, speeds_of
from pipeline.planning.step_time import (
    EIGHT_A_NODE,
    Network,
    StepTime,
    computed_flops,
    computed_share,
    flops_of_steps,
    gpu_named,
    host_seconds,
    step_time,
)
from pipeline.shared_settings import Recomputed
from pipeline.training.fitting.fit import (
    Budget,
    Fit,
    fitted,
    gpu_budget,
    least_recomputed,
    recomputations_of,
    with_recomputed,
)
from pipeline.training.fitting.memory import Topology, memory_of
from pipeline.training.settings.job import TrainingJob
from pipeline.training.teacher import teacher_config
from pipeline.training.zero.batch_plan import BatchPlan, plan_batch
from shards.errors import UserError
from shards.output.quantities import DAY_SECONDS

# The speed at which a rank's state is copied from the GPU to pinned memory. 16 lanes of PCIe 4 move 25 GB/s; PCIe 5
# moves 50 [unverified].
COPY_BYTES_PER_SECOND = 20e9


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The size of a job in parameters and operations. A multiply-add counts as 2 operations. A training step counts as
    three forward passes or, if the backbone is frozen, as one forward pass and the head's gradients, and with SAM as
    twice that; patches and branches that are left out do not count. A teacher's forward pass counts once. `train_flops`
    is the mean over all steps. `num_epochs` is None if the number of images is not known. `num_head_parameters` is 0 if
    the number of classes is not known."""

    num_parameters: int
    num_head_parameters: int
    forward_flops: int
    train_flops: int
    num_steps: int
    num_images_seen: int
    num_epochs: float | None
    total_exaflops: float
    images_per_second: float
    teraflops_per_second: float


def cost_of(job: TrainingJob, *, num_images: int, num_classes: int, days: float) -> Cost:
    """Returns the cost of a job on a dataset with these numbers of images and classes (0: not known), if it is to
    finish in `days`.

    The job's own number of classes takes precedence. Raises UserError for negative numbers, or if `days` is not above
    0.
    """
    if num_images < 0 or num_classes < 0 or days <= 0:
        raise UserError(
            f"--num-images is {num_images}, --num-classes {num_classes} and --days {days}; allowed: images and "
            "classes of 0 (not known) or more, and more than 0 days"
        )
    classes = job.model.num_classes or num_classes
    model = replace(job.model, num_classes=classes)
    body = num_parameters(model, head=False)
    total = num_parameters(model, head=classes > 0)
    forward = forward_flops(model, head=classes > 0)
    of_steps = flops_of_steps(replace(job, model=model), job.steps, teacher=teacher_config(job))
    seen = job.steps * job.global_batch
    images_per_second = seen / (days * DAY_SECONDS)
    return Cost(
        num_parameters=total,
        num_head_parameters=total - body,
        forward_flops=forward,
        train_flops=round(of_steps / job.steps),
        num_steps=job.steps,
        num_images_seen=seen,
        num_epochs=seen / num_images if num_images else None,
        total_exaflops=of_steps * job.global_batch / 1e18,
        images_per_second=images_per_second,
        teraflops_per_second=of_steps / job.steps * images_per_second / 1e12,
    )


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The forecast of a job on a number of GPUs. `fit`: the plan and its memory on one GPU, within `budget`. `speeds`:
    what the GPUs and their hosts reach, at least and at most, and where that is from; `step`, `images_per_second` and
    `days` are those of the usual speed. `mfu`: the share of nominal operations that the GPUs reach while they compute.
    `mfu_reached`: the share that the model's own operations are of the nominal ones over the whole step, without
    recomputed ones. `hfu`: the same with them. `recomputed`: what the backward pass computes again, decided if the job
    says auto. `choices`: each way to recompute that the job may take, with the bytes of activations and the operations
    of a step relative to the model's own; empty if the backbone is frozen. `launch_seconds`: how long the host takes to
    launch a micro-batch, usually and at most. `checkpoint_bytes`: the size of a checkpoint, over all ranks.
    `passes_per_step`: how often a step computes its batch. `stall_seconds`: how long training waits for the copy of a
    rank's state. `cores`: the cores that a host needs to feed its GPUs, or None if the cost of such images is not
    known."""

    gpu: str
    budget: Budget
    fit: Fit
    speeds: Speeds
    mfu: float
    mfu_reached: float
    hfu: float
    recomputed: Recomputed
    choices: dict[Recomputed, tuple[int, float]]
    step: StepTime
    images_per_second: float
    least_images_per_second: float
    most_images_per_second: float
    launch_seconds: tuple[float, float]
    days: float
    passes_per_step: int
    checkpoint_bytes: int
    stall_seconds: float
    cores: HostCores | None

    @property
    def num_gpus(self) -> int:
        """The number of GPUs, one for each rank."""
        return self.fit.plan.num_ranks

    @property
    def images_per_launch(self) -> tuple[float, float]:
        """How many images a GPU computes while its host launches a pass, usually and at most. With fewer images, the
        GPU waits for its host."""
        image_seconds = self.step.compute / (self.fit.plan.rank_batch * self.passes_per_step)
        usual, most = self.launch_seconds
        return usual / image_seconds, most / image_seconds

    @property
    def micro_batch(self) -> int:
        """The images of a pass."""
        return self.fit.plan.micro_batch


def forecast(
    job: TrainingJob,
    cost: Cost,
    *,
    gpu: str,
    num_gpus: int,
    rates: Rates,
    num_classes: int,
    network: Network = EIGHT_A_NODE,
) -> Forecast:
    """Returns the forecast of a job on `num_gpus` GPUs of the table in step_time.py, by the `rates` of one of them.

    `num_classes`: the dataset's number of classes; if it is 0 (not known), the head's memory is left out. Raises
    UserError for an unknown GPU, for a number of GPUs that does not divide the batch, and for a job that does not fit
    the GPUs.
    """
    kind = gpu_named(gpu)
    decided = _decided(job, num_classes=num_classes)
    pairs = job.data.mixup.is_on
    whole = plan_batch(
        job.global_batch, micro_batch=job.micro_batch, num_ranks=num_gpus, lanes=job.data.lanes, pairs=pairs
    )
    budget = replace(gpu_budget(kind.memory_bytes, where=gpu), teacher=teacher_config(job))
    recomputed = least_recomputed(decided, whole, budget, is_on_gpu=True)
    decided = with_recomputed(decided, recomputed)
    fit = fitted(decided, whole, budget, is_on_gpu=True)
    speeds = speeds_of(decided, micro_batch=fit.plan.micro_batch, gpu=kind, name=gpu.lower(), rates=rates)
    step, slowest, fastest = (
        step_time(decided, fit.plan, gpu=kind, network=network, train_flops=cost.train_flops, speed=speed)
        for speed in (speeds.usual, speeds.least, speeds.most)
    )
    images_per_second = job.global_batch / step.seconds
    useful = cost.train_flops / computed_flops(decided, cost.train_flops)
    launched = host_seconds(decided, num_ranks=num_gpus)
    on_host = min(num_gpus, network.gpus_per_node)
    return Forecast(
        gpu=gpu,
        budget=budget,
        fit=fit,
        speeds=speeds,
        mfu=speeds.usual.mfu,
        mfu_reached=speeds.usual.mfu * step.compute_share * useful,
        hfu=speeds.usual.mfu * step.compute_share,
        recomputed=recomputed,
        choices=_choices(decided, fit.plan, budget),
        step=step,
        images_per_second=images_per_second,
        least_images_per_second=job.global_batch / slowest.seconds,
        most_images_per_second=job.global_batch / fastest.seconds,
        launch_seconds=(speeds.usual.host * launched, speeds.least.host * launched),
        days=cost.num_images_seen / images_per_second / DAY_SECONDS,
        passes_per_step=job.optimizer.passes_per_step,
        checkpoint_bytes=fit.memory.saved * num_gpus,
        stall_seconds=fit.memory.saved / COPY_BYTES_PER_SECOND,
        cores=host_cores(
            images_per_second * on_host / num_gpus, num_ranks=on_host, gpu=gpu, image_size=decided.model.image_size
        ),
    )


def _choices(job: TrainingJob, plan: BatchPlan, budget: Budget) -> dict[Recomputed, tuple[int, float]]:
    """Returns the bytes of activations and the share of operations with each way to recompute."""
    if job.optimizer.freeze_backbone:
        return {}
    topology, found = Topology(num_ranks=plan.num_ranks, is_on_gpu=True), {}
    for how in recomputations_of(job):
        other = with_recomputed(job, how)
        memory = memory_of(other, topology, micro_batch=plan.micro_batch, teacher=budget.teacher)
        found[how] = memory.activations, computed_share(other)
    return found


def _decided(job: TrainingJob, *, num_classes: int) -> TrainingJob:
    """Decides what the job leaves open: bf16, which all GPUs of the table support, and one class if the number is
    unknown, because its head takes almost no memory."""
    precision = "bf16" if job.engine.precision == "auto" else job.engine.precision
    classes = job.model.num_classes or num_classes or 1
    return replace(job, model=replace(job.model, num_classes=classes), engine=replace(job.engine, precision=precision))

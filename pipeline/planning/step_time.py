"""Predicts how long a step takes on many GPUs, and has the table of GPUs that a plan can name. All functions are pure.

A step takes the time of its operations, of the host that launches them, and of the exchanges between ranks. With a
fixed global batch, more GPUs leave each of them less to compute, while the exchanges stay the same and the host
launches as many operations as before. Strong scaling ends where these two outweigh the operations. No overlap is
assumed: `engine.overlap` sends gradients during the backward pass, but its gain has not been measured.

    compute images per rank x operations per image / (MFU x nominal operations)
    host the time by which launching a micro-batch takes longer than its operations, the mean over the run's steps
    communication    (R - 1) / R x bytes / bus bandwidth, twice for sums over ranks, and the latency of each collective

The host's time is that of an eager model: what the forward and backward pass take for each tensor of weights, and what
the engine adds, in both passes and the update, for each tensor that DeepSpeed sees (blocks have flat tensors, so these
are fewer). `benchmarks/engine.py` measured both on a CPU, which docs/scale.md names, with a narrow model of as many
tensors as ViT-H/14; the CPU also computes what it launches. How long a GPU's host takes has not been measured since
blocks have flat tensors. A compiled block launches fewer kernels, and CUDA graphs fewer still, which is not counted.

A GPU's memory is the total capacity that CUDA reports, a little less than the name says. For A100, L40S and RTX 4090 it
is from out-of-memory messages of PyTorch in public issues; for the others it is [unverified]. Its speed is for dense
bf16 without sparsity, from NVIDIA's data sheets (H100 SXM, B200 on a HGX board); the share of this speed that kernels
reach is the MFU. Its bus bandwidth is counted as in nccl-tests. For eight H100 on one node it was measured
(NVIDIA/nccl-tests, issue 290); for the others it is [unverified] and proportional to the rate of their NVLink, or of
PCIe 4 without NVLink. Across nodes, adapters reach 92 % of their nominal rate: 46 GB/s per adapter of 400 Gb/s (issue
290), and 366 GB/s per node with eight adapters (issue 309).
"""

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

from pipeline.models.build import shapes_of
from pipeline.models.config import ModelConfig
from pipeline.models.flops import forward_flops, num_parameters, training_flops
from pipeline.training.fitting.memory import layout_in_engine
from pipeline.training.settings.job import OptimizerConfig, TrainingJob, reduced_in
from pipeline.training.settings.tokens import models_of, phase_at, phases_of, with_patch
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.flat_blocks import largest_block, sizes_of
from pipeline.training.zero.optimizer import ways_of
from shards.errors import UserError

_GIB = 1 << 30
_NAMES = {  # the names that CUDA reports, [unverified] for GPUs on which nothing here has run
    r"NVIDIA A100-(SXM4|PCIE)-40GB": "a100-40",
    r"NVIDIA A100[- ](SXM4[- ]|SXM[- ]|PCIe[- ]|PCIE[- ])?80GB( PCIe)?": "a100",
    r"NVIDIA H100 80GB HBM3": "h100",
    r"NVIDIA H200": "h200",
    r"NVIDIA B200": "b200",
    r"NVIDIA L40S": "l40s",
    r"NVIDIA GeForce RTX 4090": "rtx4090",
}
ADAPTER_SHARE = 0.92
LATENCY_SECONDS = 10e-6  # the latency of each of the 2 log2(R) hops of a collective [unverified]
# Seconds that the host takes in a step, which `python -m benchmarks.scale --update` puts here from the result of
# benchmarks/engine.py: the model's passes, for each tensor of weights, and what the engine adds, for each tensor that
# it sees. What ZeRO-3 adds grows with the number of ranks.
LAUNCH_SECONDS = 78e-6
ENGINE_SECONDS = 110e-6
ZERO3_ENGINE_SECONDS = 700e-6
ZERO3_RANK_SECONDS = 1e-6
# How many times as long a GPU's host may take, from the same command: an H200's host, for each tensor of ViT-B/16 in an
# eager step of 32 images (gpu_h200.json), before blocks had flat tensors, over DeepSpeed alone in engine.json.
SLOWEST_HOST = 3.0
_STAGE_3 = 3
_FP32, _BF16 = 4, 2
_RECOMPUTED = 4 / 3  # if whole blocks are recomputed, a step is four forward passes instead of three


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU. `teraflops`: the nominal TFLOP/s in bf16, which all GPUs of the table support natively.
    `bus_gigabytes`: the GB/s of collectives on one node, as nccl-tests counts them."""

    memory_gib: float
    teraflops: float
    bus_gigabytes: float

    @property
    def memory_bytes(self) -> int:
        """The device's memory, as CUDA reports it."""
        return int(self.memory_gib * _GIB)


GPUS = {
    "a100-40": Gpu(memory_gib=39.4, teraflops=312, bus_gigabytes=317),
    "a100": Gpu(memory_gib=79.1, teraflops=312, bus_gigabytes=317),
    "h100": Gpu(memory_gib=79.1, teraflops=989, bus_gigabytes=476),
    "h200": Gpu(memory_gib=139.0, teraflops=989, bus_gigabytes=476),
    "b200": Gpu(memory_gib=178.0, teraflops=2250, bus_gigabytes=952),
    "l40s": Gpu(memory_gib=44.4, teraflops=362, bus_gigabytes=20),
    "rtx4090": Gpu(memory_gib=23.5, teraflops=165, bus_gigabytes=10),
}


def gpu_named(name: str) -> Gpu:
    """Returns a GPU of the table. Raises UserError, which lists all names, if it is not in the table."""
    if name.lower() not in GPUS:
        raise UserError(f"--gpu is {name!r}; known: {', '.join(GPUS)}")
    return GPUS[name.lower()]


def gpu_of_device(name: str) -> Gpu | None:
    """Returns the GPU that CUDA calls `name`, or None if it is not in the table. Slower variants of the same family
    (H100 PCIe, H200 NVL, RTX 4090 Laptop) are left out."""
    found = [gpu for pattern, gpu in _NAMES.items() if re.fullmatch(pattern, name)]
    return GPUS[found[0]] if found else None


@dataclass(frozen=True, kw_only=True)
class Network:
    """How the GPUs are connected. `gbits`: the nominal Gbit/s of all adapters of a node together."""

    gpus_per_node: int = 8
    gbits: float = 3200.0

    def bus_bandwidth(self, gpu: Gpu, num_gpus: int) -> float:
        """Returns the bytes per second of collectives, as nccl-tests counts them."""
        inside = gpu.bus_gigabytes * 1e9
        return inside if num_gpus <= self.gpus_per_node else min(inside, ADAPTER_SHARE * self.gbits / 8 * 1e9)


EIGHT_A_NODE = Network()


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a GPU and its host are. `mfu`: the share of nominal operations that the GPU reaches while it computes.
    `host`: how many times as long as in benchmarks/results/engine.json the host takes to launch a step."""

    mfu: float
    host: float = 1.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a step, by what they are spent on. `host`: how long the GPU waits for the host."""

    compute: float
    host: float
    communication: float

    @property
    def seconds(self) -> float:
        """The seconds of the whole step, without data, evaluations and checkpoints."""
        return self.compute + self.host + self.communication

    @property
    def compute_share(self) -> float:
        """The share of the step in which the GPU computes, 0 to 1: the efficiency relative to GPUs that never wait."""
        return self.compute / self.seconds


def step_time(
    job: TrainingJob, plan: BatchPlan, *, gpu: Gpu, network: Network, train_flops: float, speed: Speed
) -> StepTime:
    """Returns the time of a job's step if its batch is divided by `plan`. The job's precision and number of classes
    must be decided.

    `train_flops`: the operations per image, without recomputed ones, as the mean over all steps. Steps with other image
    or patch sizes wait for the host for different times, of which `host` is the mean."""
    num_passes = job.optimizer.passes_per_step

    launched = speed.host * host_seconds(job, num_ranks=plan.num_ranks)
    kinds, repeated = _kinds_of_steps(job), computed_share(job)
    others = train_flops - sum(share * flops for share, flops in kinds)  # a teacher's, the mean over all steps

    def seconds_of_pass(computed: float) -> float:
        return plan.micro_batch * computed / num_passes / (speed.mfu * gpu.teraflops * 1e12)

    waits = sum(share * max(0.0, launched - seconds_of_pass(repeated * flops + others)) for share, flops in kinds)
    return StepTime(
        compute=num_passes * plan.accumulation * seconds_of_pass(computed_flops(job, train_flops)),
        host=num_passes * plan.accumulation * waits,
        communication=_communication(job, plan, network.bus_bandwidth(gpu, plan.num_ranks)),
    )


def flops_at(job: TrainingJob, step: int, *, patch: int | None = None) -> int:
    """Returns the operations of one image in the forward and backward passes of a step, counted from 0, at the step's
    image size. If steps draw their patch sizes, it is the mean over these sizes, or that of `patch`. The operations of
    patches and branches that the step leaves out do not count, and neither does the head if the number of classes is
    not known, nor the resizing of a kernel, which does not depend on the number of images. SAM has two passes of each
    kind."""
    found = []
    for model in models_of(job.tokens, job.model) if patch is None else (with_patch(job.model, patch),):
        phase = phase_at(step, phases_of(job.tokens, model, num_steps=job.steps))
        flops = training_flops(
            replace(model, image_size=phase.image_size),
            head=model.num_classes > 0,
            is_frozen=job.optimizer.freeze_backbone,
            skips_branches=job.engine.skip_branches,
            num_stay=phase.num_stay,
        )
        found.append(flops)
    return job.optimizer.passes_per_step * round(Fraction(sum(found), len(found)))


def teacher_flops_at(teacher: ModelConfig | None, job: TrainingJob, step: int) -> int:
    """Returns the operations of a teacher's forward pass on one image of a step, counted from 0; 0 without a teacher.
    A BiT ResNet takes images of the step's size, other teachers those of their own size."""
    if teacher is None:
        return 0
    size = phase_at(step, job.phases).image_size if teacher.is_bit else teacher.image_size
    return forward_flops(replace(teacher, image_size=size))


def flops_of_steps(job: TrainingJob, num_steps: int, *, teacher: ModelConfig | None = None) -> int:
    """Returns the operations of the first `num_steps` steps of a run, with those of its teacher, if each step had one
    image."""
    *before, _ = job.phases
    total, begin = 0, 0
    for end in (*(min(phase.end, num_steps) for phase in before), num_steps):
        total += (end - begin) * (flops_at(job, begin) + teacher_flops_at(teacher, job, begin))
        begin = end
    return total


def _kinds_of_steps(job: TrainingJob) -> list[tuple[float, int]]:
    """Returns the operations of one image, as `flops_at`, in each kind of step, with the share of the run's steps that
    are of this kind. Steps of one phase that draw the same patch size are of one kind."""
    found, begin, patches = [], 0, job.tokens.patch_sizes or (None,)
    for phase in job.phases:
        share = (phase.end - begin) / job.steps / len(patches)
        found += [(share, flops_at(job, begin, patch=patch)) for patch in patches]
        begin = phase.end
    return found


def computed_share(job: TrainingJob) -> float:
    """Returns the operations that a GPU computes, relative to the model's own, which MFU counts. Selective
    recomputation repeats no products, and a frozen backbone is never recomputed."""
    is_whole = job.engine.activation_checkpointing == "full" and not job.optimizer.freeze_backbone
    return _RECOMPUTED if is_whole else 1.0


def computed_flops(job: TrainingJob, train_flops: float) -> float:
    """Returns the operations per image that a GPU computes, as the mean over all steps: `train_flops`, and the model's
    own operations that are recomputed. A teacher's, which are part of `train_flops`, have no backward pass and are
    never recomputed."""
    own = sum(share * flops for share, flops in _kinds_of_steps(job))
    return train_flops + (computed_share(job) - 1) * own


def host_seconds(job: TrainingJob, *, num_ranks: int) -> float:
    """Returns the seconds that the host takes to launch a micro-batch, with the update."""
    counts = _counts(job.model, job.optimizer)
    engine = ENGINE_SECONDS
    if job.engine.zero_stage == _STAGE_3:
        engine = ZERO3_ENGINE_SECONDS + ZERO3_RANK_SECONDS * num_ranks
    return counts.tensors * LAUNCH_SECONDS + counts.seen * engine


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """What takes the host time, or a collective its latency. `tensors`: the model's tensors of weights. `seen`: those
    that DeepSpeed updates. `groups`: groups of parameters that are updated alike, which stages 1 and 2 gather together,
    however many they are. `modules`: blocks, and modules outside of blocks, each of which stage 3 gathers alone."""

    tensors: int
    seen: int
    groups: int
    modules: int


@cache
def _counts(model: ModelConfig, optimizer: OptimizerConfig) -> _Counts:
    model = replace(model, num_classes=model.num_classes or 1)
    shapes, layout = shapes_of(model), layout_in_engine(model, optimizer)
    ways = ways_of(shapes, optimizer)
    return _Counts(
        tensors=len(shapes),
        seen=sum(places[0].name in ways for places in layout.values()),
        groups=len(set(ways.values())),
        modules=len({name.rpartition(".")[0] for name in layout}),
    )


@cache
def _num_buckets(model: ModelConfig, optimizer: OptimizerConfig, reduce_bucket: int) -> int:
    """Returns the number of sums of gradients: a tensor that does not fit into a bucket begins the next one."""
    layout = layout_in_engine(model, optimizer)
    ways = ways_of(shapes_of(model), optimizer)
    sizes = [size for name, size in sizes_of(layout).items() if layout[name][0].name in ways]
    most, filled, count = max(reduce_bucket, largest_block(layout)), 0, 1
    for size in reversed(sizes):
        if filled and filled + size > most:
            filled, count = 0, count + 1
        filled += size
    return count


def _communication(job: TrainingJob, plan: BatchPlan, bandwidth: float) -> float:
    ranks, stage = plan.num_ranks, job.engine.zero_stage
    if ranks == 1:
        return 0.0
    number = num_parameters(job.model)
    trained = number - num_parameters(job.model, head=False) if job.optimizer.freeze_backbone else number
    weight = _BF16 if job.engine.precision == "bf16" else _FP32
    summed = _FP32 if reduced_in(job.engine) == "fp32" else _BF16
    # Stages 2 and 3 sum after each micro-batch. Stage 3 keeps parts of the sums, and gathers weights in both passes.
    # SAM, under stage 1, sums and gathers after each of its passes over the batch.
    num_sums = plan.accumulation if stage > 1 else job.optimizer.passes_per_step
    num_gathers = 2 * plan.accumulation if stage == _STAGE_3 else job.optimizer.passes_per_step
    crossings = num_sums * (1 if stage == _STAGE_3 else 2) * summed * trained + num_gathers * weight * number
    counts = _counts(job.model, job.optimizer)
    num_gathered = counts.modules if stage == _STAGE_3 else counts.groups
    num_collectives = (
        num_sums * _num_buckets(job.model, job.optimizer, job.engine.reduce_bucket) + num_gathers * num_gathered
    )
    latency = num_collectives * 2 * math.log2(ranks) * LATENCY_SECONDS
    return (ranks - 1) / ranks * crossings / bandwidth + latency

"""Compares the engine's reduced gradients with plain PyTorch's, tensor by tensor, before the first step.

A fault in the summation of gradients over ranks is silent: with DeepSpeed #8224, several versions trained on wrong
sums, and the loss still fell. So a throw-away model goes through the same engine (stage, precision, accumulation,
optimiser groups, the process group of the run). The gradients that reach the optimiser are compared with the gradients
of passes without any engine, summed over ranks by one plain all-reduce in float64 per tensor.

The throw-away model is a small copy. Its tensors are as large as the run's, but it has only two layers (one unit per
stage of a ResNet), and its buckets are smaller in proportion. A copy of the whole model in fp32 would double the memory
at the start. If the run's own engine were checked, it would have to be reset without a trace; the copy's engine is
simply destroyed. Faults of reduction depend on the kinds of layers, and on how tensors fall into buckets and
partitions, but not on the depth.

The copy computes like the run, with its attention kernel, and with compiled blocks and fused MLPs if the run has them,
but without float8 and CUDA graphs. The plain passes in the run's precision do the same, since a compiled block rounds
at other places. The passes that show whether the kernels are right are never compiled, and have no fused MLPs.

All weights are random, since a zero head would give zero gradients to everything below it. bf16 represents them
exactly, so that the rounding of weights is not part of the error. To read the reduced gradient exactly, the masters are
set to zero and the optimiser (SGD without momentum) takes one step at a rate of 1: the masters are then the negative
gradient.

Two updates of up to two micro-batches each are checked, so that the second shows what the first leaves behind.

Limits of ||found - expected|| / ||expected||, tensor by tensor:

    fp32, against passes in fp32    1e-5 (measured: 1e-7). If blocks are compiled, also 3/4 against plain passes that
                                    are not.
    bf16, against passes in bf16    2^-6. Only the sum over ranks differs. fp32 reduction rounds once to bf16 (measured:
                                    3e-3). bf16 reduction rounds once per rank (2e-3 times the square root of the
                                    number of ranks), so its limit grows from 16 ranks on. If one of M contributions is
                                    missing, the error is 1 / sqrt(M).
    bf16, against passes in fp32    3/4. The passes themselves round: 0.04 in a ViT, 0.4 in BiT (measured). This
                                    limit finds bf16 kernels with wrong gradients.

A gradient that is zero except for rounding is not compared: it differs between passes, since GPU kernels add in the
order in which their blocks happen to finish. Only the presence of all its elements is checked.
"""

import gc
import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.manifest import MASTER
from pipeline.models.build import initial_tensor, shapes_of, unfilled_model
from pipeline.models.config import ModelConfig, without_masked_patches
from pipeline.models.loss import classification_loss
from pipeline.ranks.world import World
from pipeline.training.kernels import set_up_blocks
from pipeline.training.settings.job import (
    EngineConfig,
    OptimizerConfig,
    TrainingJob,
    reduced_in,
    scaled_by_rate,
    with_buckets_of,
)
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.flat_blocks import flatten_blocks, layout_of, sizes_of, views_of
from pipeline.training.zero.loading import TESTED, deepspeed_version
from pipeline.training.zero.optimizer import is_trained, rate_factors, ways_of
from shards.errors import WillNotSucceedError
from shards.hashing import derive_key
from shards.output.quantities import plural

log = logging.getLogger(__name__)
_WEIGHTS, _IMAGES_OF = 0, 1  # keys of the random generators

_IMAGES = 2  # per micro-batch
_UPDATES, _MOST_ACCUMULATION = 2, 2
_MOST_DEPTH, _MOST_CLASSES = 2, 1 << 15
_NOISE = 0.05  # the scale of noise that is added to each initial weight, so that none is zero
_FP32_LIMIT, _SAME_PASSES_LIMIT, _OTHER_PASSES_LIMIT = 1e-5, 2.0**-6, 0.75
_SMALL = 1e-3  # relative to the root mean square of all gradients; below it, a tensor's own norm means nothing
_MOST_NAMED = 5
_GRADIENT = "gradient"
_Tensors = Mapping[str, torch.Tensor]
_Batch = tuple[torch.Tensor, torch.Tensor]  # images, labels


@dataclass(frozen=True, kw_only=True)
class TensorError:
    """The relative error of one tensor's reduced gradient. `against`: the name of the plain passes, which is their
    precision."""

    name: str
    error: float
    allowed: float
    against: str

    def __str__(self) -> str:
        return f"{self.name}: {self.error:.2g} against plain PyTorch in {self.against}, allowed {self.allowed:.2g}"


def checks_gradients(config: EngineConfig, plan: BatchPlan, device: torch.device) -> bool:
    """Returns whether a run checks its gradients. "auto" checks them with an untested DeepSpeed, and on GPUs if there
    is anything to sum over ranks or micro-batches."""
    if config.check_gradients != "auto":
        return config.check_gradients == "on"
    is_summed = plan.num_ranks > 1 or plan.accumulation > 1
    return deepspeed_version() not in TESTED or (device.type == "cuda" and is_summed)


def overlaps(plan: BatchPlan, device: torch.device, *, is_checked: bool) -> bool:
    """Returns whether "auto" sums gradients over ranks during the backward pass. It does so with several ranks on GPUs,
    if gradients are checked and DeepSpeed is a tested version. All tested versions wait for every stream that fills a
    bucket (DeepSpeed #8061)."""
    return is_checked and device.type == "cuda" and plan.num_ranks > 1 and deepspeed_version() in TESTED


def check_gradients(job: TrainingJob, plan: BatchPlan, world: World) -> None:
    """Raises WillNotSucceedError, the same on every rank, if a reduced gradient is wrong. The precision of `job` and
    whether its blocks are compiled must be decided. Collective."""
    if job.engine.compile == "auto":
        raise ValueError("engine.compile is 'auto', and the check needs the kernels of the run: decide it first")
    began = time.monotonic()
    small = _small_job(job, on_cpu=world.device.type == "cpu")
    found = measure_gradients(small, _small_plan(plan), world)
    wrong = [error for error in found if not error.error <= error.allowed]  # NaN is wrong, too
    engine = job.engine
    overlap = ", with overlap" if engine.overlap == "on" else ""
    where = (
        f"ZeRO-{engine.zero_stage} in {engine.precision}{overlap}, {plural(plan.num_ranks, 'rank')} x "
        f"{plural(plan.accumulation, 'micro-batch')}"
    )
    if not wrong:
        if world.is_first:
            worst = max(found, key=lambda error: error.error / error.allowed)
            log.info("gradients checked in %.1f s (%s); the worst is %s", time.monotonic() - began, where, worst)
        return
    wrong.sort(key=lambda error: -error.error / error.allowed if math.isfinite(error.error) else -math.inf)
    lines = "\n".join(f"  {error}" for error in wrong[:_MOST_NAMED])
    others = f"\n  and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
    raise WillNotSucceedError(
        f"the gradients that reach the optimiser are wrong ({where}, reduction in {reduced_in(engine)}, DeepSpeed "
        f"{deepspeed_version()}, torch {torch.__version__}). Relative errors, the worst first:\n{lines}{others}\n"
        "Nothing has been trained. Take DeepSpeed "
        f"{TESTED[-1]}, another --engine.zero-stage or other --engine.reduce-bucket; if these are right already, a GPU "
        "or its links may be at fault: try other nodes. --engine.check-gradients off starts all the same"
    )


def measure_gradients(job: TrainingJob, plan: BatchPlan, world: World) -> list[TensorError]:
    """Returns the worst error of every tensor over all updates, against each kind of plain passes. `job` must have no
    dropout, and an optimiser that keeps no state (SGD without momentum). Collective."""
    values = _random_weights(job.model)
    conv = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    worst: dict[tuple[str, str], TensorError] = {}
    with torch.random.fork_rng(devices=[]), conv:
        engine = _engine(job, plan, world.device)
        try:
            for update in range(_UPDATES):
                first = (world.rank * _UPDATES + update) * plan.accumulation
                batches = [_batch(job, first + micro, world.device) for micro in range(plan.accumulation)]
                reduced = _reduced(engine, values, batches, job)
                for against in _references(job.engine, plan):
                    expected = _expected(job, values, batches, against, world)
                    for error in _errors(reduced, expected, against, device=world.device):
                        if _is_noise(error.name, job.model) and not math.isnan(error.error):
                            continue
                        last = worst.get((error.name, error.against))
                        if last is None or not error.error <= last.error:
                            worst[error.name, error.against] = error
        finally:
            engine.destroy()
            del engine
            gc.collect()  # DeepSpeed's objects refer to each other
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
    return list(worst.values())


@dataclass(frozen=True, kw_only=True)
class _Reference:
    """Plain passes to compare with, their precision, and the largest allowed relative error."""

    name: str
    dtype: torch.dtype
    limit: float
    is_compiled: bool = False


def _references(config: EngineConfig, plan: BatchPlan) -> list[_Reference]:
    is_compiled = config.compile != "off"  # decided before (decisions.py)
    if config.precision == "fp32":
        same = _Reference(name="fp32", dtype=torch.float32, limit=_FP32_LIMIT, is_compiled=is_compiled)
        other = _Reference(name="fp32 without a compiler", dtype=torch.float32, limit=_OTHER_PASSES_LIMIT)
        return [same, other] if is_compiled else [same]
    growth = math.sqrt(plan.num_ranks) / 4 if config.reduce_precision == "bf16" else 1.0
    limit = _SAME_PASSES_LIMIT * max(1.0, growth)
    return [
        _Reference(name="bf16", dtype=torch.bfloat16, limit=limit, is_compiled=is_compiled),
        _Reference(name="fp32", dtype=torch.float32, limit=_OTHER_PASSES_LIMIT),
    ]


def _engine(job: TrainingJob, plan: BatchPlan, device: torch.device) -> Engine:
    model = unfilled_model(job.model)
    set_up_blocks(model, job.engine, is_compiled=job.engine.compile != "off", device=device)
    return Engine(model, config=job.engine, plan=plan, optimizer=job.optimizer, clip_norm=0.0)


def _reduced(engine: Engine, values: _Tensors, batches: list[_Batch], job: TrainingJob) -> list[Fragment]:
    """Returns this rank's trained fragments, each with its reduced gradient as the optimiser gets it."""

    def fill(fragment: Fragment, slot: str) -> None:
        fragment.slots[slot].copy_(values[fragment.name].flatten()[fragment.start : fragment.start + fragment.length])

    engine.load(fill, moments=[], num_updates=0)
    for images, labels in batches:

        def loss_of(model: nn.Module, x: torch.Tensor = images, y: torch.Tensor = labels) -> torch.Tensor:
            return classification_loss(model(x), y, name=job.loss)

        engine.accumulate(loss_of)
    for fragment in engine.fragments():
        fragment.slots[MASTER].zero_()
    engine.update(learning_rate=1.0)
    factors = rate_factors(values, job.optimizer)
    held = (fragment for fragment in engine.fragments() if is_trained(fragment.name, job.optimizer))
    return [replace(own, slots={_GRADIENT: -own.slots[MASTER] / factors[own.name]}) for own in held]


def _expected(
    job: TrainingJob, values: _Tensors, batches: list[_Batch], against: _Reference, world: World
) -> dict[str, torch.Tensor]:
    """Returns the mean gradient over all micro-batches of all ranks, float64, from passes without an engine, which keep
    everything for the backward pass."""
    model = unfilled_model(job.model).to(world.device)
    has_fused_mlp = job.engine.fused_mlp and against.dtype == torch.bfloat16
    config = replace(job.engine, activation_checkpointing="off", fused_mlp=has_fused_mlp)
    set_up_blocks(model, config, is_compiled=against.is_compiled, device=world.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    model = model.to(against.dtype)
    # Compiled blocks are those of the run, so that nothing is compiled twice, unless blocks are recomputed selectively.
    # Other passes use plain parameters.
    layout = layout_of(shapes_of(job.model), ways_of(values, job.optimizer) if against.is_compiled else {})
    flatten_blocks(model, layout)
    trained = [name for name in values if is_trained(name, job.optimizer)]
    sums = {name: torch.zeros_like(values[name], dtype=torch.float64, device=world.device) for name in trained}
    for images, labels in batches:
        model.zero_grad()
        torch.autograd.backward(classification_loss(model(images), labels, name=job.loss))
        for name, tensor in model.named_parameters():
            for part, gradient in () if tensor.grad is None else views_of(tensor.grad, layout[name]):
                if part in sums:
                    sums[part] += gradient
    for total in sums.values():
        dist.all_reduce(total)
        total.div_(world.num_ranks * len(batches))
    return sums


def _errors(
    reduced: list[Fragment],
    expected: _Tensors,
    against: _Reference,
    *,
    device: torch.device,
) -> Iterator[TensorError]:
    """Yields the error of each tensor, from the fragments of all ranks. It is NaN if the ranks do not hold every
    element of a tensor exactly once."""
    names = list(expected)
    # The squared error, and the number of elements held.
    squares = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    for fragment in reduced:
        part = expected[fragment.name].flatten()[fragment.start : fragment.start + fragment.length]
        row = squares[names.index(fragment.name)]
        row[0] += (fragment.slots[_GRADIENT].double() - part).square().sum()
        row[1] += fragment.length
    dist.all_reduce(squares)
    num_elements = sum(tensor.numel() for tensor in expected.values())
    mean_square = float(sum(tensor.square().sum() for tensor in expected.values())) / num_elements
    for name, (square, num_held) in zip(names, squares.tolist(), strict=True):
        tensor = expected[name]
        norm = max(float(tensor.norm()), _SMALL * math.sqrt(mean_square * tensor.numel())) or 1.0
        error = math.sqrt(square) / norm if num_held == tensor.numel() else math.nan
        yield TensorError(name=name, error=error, allowed=against.limit, against=against.name)


def _is_noise(name: str, config: ModelConfig) -> bool:
    """Returns whether the tensor's gradient is zero except for rounding. A constant that is added to all keys adds the
    same number to all logits of a query, which does not change their softmax, unless rotary positions turn it
    differently for each key."""
    return name.endswith("k_norm.bias") and not config.is_rotary


def _random_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Returns random float32 weights that bf16 represents exactly. They are the same on every rank."""
    values = {}
    for number, (name, shape) in enumerate(shapes_of(config).items()):
        noise = torch.randn(shape, generator=_generator(_WEIGHTS, number))
        values[name] = (initial_tensor(name, shape, seed=0) + _NOISE * noise).bfloat16().float()
    return values


def _generator(what: int, number: int) -> torch.Generator:
    """Returns a generator for the random numbers of the small copy."""
    return torch.Generator().manual_seed(derive_key(what, number) >> 1)


def _batch(job: TrainingJob, number: int, device: torch.device) -> _Batch:
    """Returns random images, uint8[B, H, W, 3], and labels, int64[B, 1], for the micro-batch with this number."""
    generator = _generator(_IMAGES_OF, number)
    side, num_classes = job.model.image_size, job.model.num_classes
    images = torch.randint(0, 256, (_IMAGES, side, side, 3), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, num_classes, (_IMAGES, 1), generator=generator)
    return images.to(device), labels.to(device)


def _small_plan(plan: BatchPlan) -> BatchPlan:
    accumulation = min(plan.accumulation, _MOST_ACCUMULATION)
    return BatchPlan(
        global_batch=_IMAGES * accumulation * plan.num_ranks,
        micro_batch=_IMAGES,
        accumulation=accumulation,
        num_ranks=plan.num_ranks,
    )


def _small_job(job: TrainingJob, *, on_cpu: bool) -> TrainingJob:
    """Returns the same job with at most two layers, without dropout, float8 and CUDA graphs, with buckets that are
    smaller in proportion, and with an optimiser that has no state and the same groups of parameters (except that Muon
    would have separate groups for its matrices)."""
    model = _small_model(job.model)
    numels, whole = (_sizes_in_engine(each, job.optimizer) for each in (model, job.model))
    share = sum(numels) / sum(whole)
    engine = replace(with_buckets_of(job.engine, on_cpu=on_cpu), float8="off", cuda_graphs=False)
    bucket = round(engine.reduce_bucket * share)
    if engine.reduce_bucket >= max(whole):
        # A tensor larger than the bucket would be reduced alone, which never happens in the run.
        bucket = max(bucket, *numels)
    optimizer = scaled_by_rate(job.optimizer, peak_rate=job.schedule.learning_rate)
    return replace(
        job,
        model=model,
        engine=replace(engine, reduce_bucket=max(1, bucket)),
        optimizer=replace(optimizer, name="sgd", momentum=0.0, first_moment="fp32"),
    )


def _sizes_in_engine(model: ModelConfig, optimizer: OptimizerConfig) -> list[int]:
    """Returns the number of elements of each tensor that DeepSpeed sees."""
    shapes = shapes_of(model)
    return list(sizes_of(layout_of(shapes, ways_of(shapes, optimizer))).values())


def _small_model(config: ModelConfig) -> ModelConfig:
    if config.masked_patches:  # only the summation of gradients is checked, and it is the same with labels
        config = without_masked_patches(config)
    config = replace(config, num_classes=min(max(config.num_classes, 2), _MOST_CLASSES))
    if config.resnet:
        config = replace(config, resnet_units=(1,) * len(config.resnet.units))
    if config.is_bit:
        return config
    return replace(config, depth=min(config.size.depth, _MOST_DEPTH), dropout=0.0)

"""Finds the largest micro-batch that fits the memory of every rank's device or, if none does, the nearest plans that
fit. Before that, decides how much the backward pass recomputes if `engine.activation_checkpointing` is auto.

All ranks use the same micro-batch: the checkpoint's if it fits, otherwise the largest that fits the smallest budget.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import torch

from pipeline.models.config import ModelConfig
from pipeline.ranks.collectives import gather_json
from pipeline.ranks.host import available_bytes
from pipeline.ranks.world import World
from pipeline.shared_settings import Recomputed
from pipeline.training.fitting.memory import Memory, Topology, memory_of
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.batch_plan import BatchPlan
from shards.errors import UserError
from shards.output.quantities import plural

# The reserve on a GPU: the contexts of CUDA, cuBLAS and cuDNN, NCCL's buffers, and memory that the allocator cannot use
# because its free pieces are too small. Tensors on an H200 took less than was predicted (benchmarks/results/
# gpu_h200.json); what the allocator reserved was not recorded. [unverified] on other GPUs: a rank tries one pass before
# it trains (first_pass.py).
_GPU_CONTEXT_BYTES, _GPU_FRAGMENTED = 2_000_000_000, 0.08
# The reserve on a host, for each rank: libraries, and memory that malloc keeps. ViT-S/16 and B/16 needed 0.2 to 0.8 GB
# in addition to their tensors.
_LIBRARIES_BYTES, _HOST_FRAGMENTED = 500_000_000, 0.05
_MOST_PROPOSED = 3
# Tokens of a pass with which a GPU has enough to do. [unverified]: an H200's steps were measured with 50,000 and more;
# with 8 images, launching its kernels of attention took longer than the kernels (docs/benchmarks.md).
_FULL_SPEED_TOKENS = 1 << 14
_RECOMPUTED: tuple[Recomputed, ...] = ("off", "selective", "full")  # the fastest first
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The memory of a rank: its GPU's, or its share of the host's. `reserve_bytes`: the part that is not for tensors.
    `where`: the name of the device. `teacher`: the configuration of the teacher that shares it with the run; None if
    the job has none."""

    total_bytes: int
    reserve_bytes: int
    where: str
    teacher: ModelConfig | None = None

    @property
    def bytes(self) -> int:
        """The bytes that tensors may take."""
        return max(0, self.total_bytes - self.reserve_bytes)


def budget_of(world: World, *, read_ahead_bytes: int) -> Budget:
    """Returns this rank's budget. `read_ahead_bytes`: the most host memory that data takes, for all ranks on this
    host."""
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        return gpu_budget(int(properties.total_memory), where=str(properties.name))
    return host_budget(available_bytes() - read_ahead_bytes, num_local_ranks=world.num_local_ranks)


def gpu_budget(total_bytes: int, *, where: str) -> Budget:
    """Returns the budget of a GPU with this many bytes, as CUDA reports them."""
    reserve = _GPU_CONTEXT_BYTES + int(_GPU_FRAGMENTED * total_bytes)
    return Budget(total_bytes=total_bytes, reserve_bytes=reserve, where=where)


def host_budget(free_bytes: int, *, num_local_ranks: int) -> Budget:
    """Returns the budget of a rank: its share of the bytes that a host has free."""
    share = max(0, free_bytes) // num_local_ranks
    reserve = _LIBRARIES_BYTES + int(_HOST_FRAGMENTED * share)
    return Budget(total_bytes=share, reserve_bytes=reserve, where="this host")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A plan, the memory that it is predicted to need, and the reason for this plan (empty: it is the largest that
    fits). `is_warning`: whether the reason should be logged as a warning."""

    plan: BatchPlan
    memory: Memory
    reason: str = ""
    is_warning: bool = False

    @property
    def why(self) -> str:
        """The reason for this plan, as text."""
        return self.reason or ("the largest that fits" if self.plan.accumulation > 1 else "the whole share")


def fitted(job: TrainingJob, whole: BatchPlan, budget: Budget, *, is_on_gpu: bool, recorded: int | None = None) -> Fit:
    """Returns the plan with the largest micro-batch that fits. The job's precision must be decided.

    `whole`: the plan of this job on these ranks; its micro-batch counts only if the job itself names one. `recorded`:
    the micro-batch of the checkpoint to continue, if the same number of ranks wrote it; otherwise None. It is kept if
    it fits, since another one would change results by rounding. Raises UserError, with plans that would fit, if no
    micro-batch fits.
    """
    topology = Topology(num_ranks=whole.num_ranks, is_on_gpu=is_on_gpu)

    def needs(micro_batch: int) -> Memory:
        return memory_of(job, topology, micro_batch=micro_batch, teacher=budget.teacher)

    if job.micro_batch:
        return _as_demanded(whole, needs(whole.micro_batch), budget)
    choices = list(_micro_batches(whole, pairs=job.data.mixup.is_on))
    if recorded in choices and needs(recorded).peak <= budget.bytes:
        reason = "as in the checkpoint" if recorded != choices[0] else ""
        return Fit(plan=with_micro_batch(whole, recorded), memory=needs(recorded), reason=reason)
    for micro_batch in choices:
        if needs(micro_batch).peak <= budget.bytes:
            lost = recorded is not None and recorded != micro_batch
            reason = f"the checkpoint's {recorded} does not fit here: results are equal to rounding, not bitwise"
            return Fit(
                plan=with_micro_batch(whole, micro_batch),
                memory=needs(micro_batch),
                reason=reason if lost else "",
                is_warning=lost,
            )
    raise UserError(_refusal(job, whole, budget, is_on_gpu=is_on_gpu, least=needs(choices[-1])))


def least_recomputed(
    job: TrainingJob, whole: BatchPlan, budget: Budget, *, is_on_gpu: bool, record: Mapping[str, Any] | None = None
) -> Recomputed:
    """Returns the least recomputation with which a micro-batch fits: the job's own or the checkpoint's, or else any; if
    none fits, the most that the job may take. This function is pure. The job's precision must be decided.

    A GPU with 16,384 tokens in a pass gains little by more of them, so a larger micro-batch alone is no reason to
    recompute. With fewer tokens, "selective" is taken instead of "off" if its micro-batch is larger, since it costs
    about 1 % of a step (docs/benchmarks.md). "full" costs a third more operations, so it is taken only if nothing else
    fits.

    `record`: the record of the checkpoint to continue. Its choice is kept if it fits. With the same number of ranks,
    its micro-batch is kept, too, since another one would change results by rounding, which recomputation does not.
    """
    if job.engine.activation_checkpointing != "auto":
        return job.engine.activation_checkpointing
    recorded, topology = record or {}, Topology(num_ranks=whole.num_ranks, is_on_gpu=is_on_gpu)
    choices = recomputations_of(job)
    most = choices[-1]
    before = recorded.get("engine")
    before = before.get("activation_checkpointing") if isinstance(before, Mapping) else None
    choices.sort(key=lambda each: each != before)  # the checkpoint's first, the others in their order
    sizes = list(_micro_batches(whole, pairs=job.data.mixup.is_on))

    def fits(recomputed: Recomputed, size: int) -> bool:
        recomputing = with_recomputed(job, recomputed)
        return memory_of(recomputing, topology, micro_batch=size, teacher=budget.teacher).peak <= budget.bytes

    wanted = whole.micro_batch if job.micro_batch else recorded_micro_batch(recorded, whole)
    if wanted in sizes:
        kept = next((each for each in choices if fits(each, wanted)), None)
        if kept or job.micro_batch:
            return kept or most
    largest = {each: next((size for size in sizes if fits(each, size)), 0) for each in choices}
    least = next((each for each in choices if largest[each]), most)
    if is_on_gpu and least == "off" != before and largest.get("selective", 0) > largest["off"]:
        densest = job.with_most_tokens
        (height, width), num_stay = densest.model.grid, densest.largest_phase.num_stay
        tokens_of_image = job.model.num_prefix_tokens + (height * width if num_stay is None else num_stay)
        return "selective" if largest["off"] * tokens_of_image < _FULL_SPEED_TOKENS else "off"
    return least


def recomputations_of(job: TrainingJob) -> list[Recomputed]:
    """Returns the ways to recompute that the job may take, the fastest first. Without Transformer blocks and with fused
    MLPs, "selective" is refused (TrainingJob, EngineConfig). A frozen backbone keeps nothing that could be
    recomputed."""
    if job.optimizer.freeze_backbone:
        return ["off"]
    has_selective = not (job.model.is_bit or job.engine.fused_mlp)
    return [each for each in _RECOMPUTED if each != "selective" or has_selective]


def with_recomputed(job: TrainingJob, recomputed: Recomputed) -> TrainingJob:
    """Returns the job with this recomputation."""
    return replace(job, engine=replace(job.engine, activation_checkpointing=recomputed))


def with_micro_batch(plan: BatchPlan, micro_batch: int) -> BatchPlan:
    """Returns a plan of the same batches in passes of another size, which must divide a rank's share."""
    return replace(plan, micro_batch=micro_batch, accumulation=plan.rank_batch // micro_batch)


def halved(plan: BatchPlan, *, pairs: bool) -> BatchPlan | None:
    """Returns the plan with the largest micro-batch of at most half the size; None if there is no smaller one."""
    smaller = [size for size in _micro_batches(plan, pairs=pairs) if 2 * size <= plan.micro_batch]
    return with_micro_batch(plan, smaller[0]) if smaller else None


def _micro_batches(plan: BatchPlan, *, pairs: bool) -> Iterator[int]:
    """Yields all micro-batches that divide a rank's share, the largest first. With `pairs`, which mixup needs, yields
    only even ones."""
    share = plan.rank_batch
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    divisors = sorted({*small, *(share // size for size in small)}, reverse=True)
    return (size for size in divisors if not (pairs and size % 2))


def _as_demanded(plan: BatchPlan, memory: Memory, budget: Budget) -> Fit:
    if memory.peak <= budget.bytes:
        return Fit(plan=plan, memory=memory, reason="as the job says")
    reason = f"as the job says, although only {_gb(budget.bytes)} are free for it; --micro-batch 0 takes what fits"
    return Fit(plan=plan, memory=memory, reason=reason, is_warning=True)


def _refusal(job: TrainingJob, whole: BatchPlan, budget: Budget, *, is_on_gpu: bool, least: Memory) -> str:
    others = _others(job, whole, is_on_gpu=is_on_gpu)
    found = [words for words, other, plan in others if _fits(other, plan, budget, is_on_gpu=is_on_gpu)]
    proposed = list(islice(found, _MOST_PROPOSED))
    advice = (
        f"these plans fit: {'; '.join(proposed)}"
        if proposed
        else f"no plan fits: take {_larger(is_on_gpu)}, or a smaller model"
    )
    images = "1 image" if not job.data.mixup.is_on else "2 images"
    return (
        f"a micro-batch of {images} needs {_gb(least.peak)} on each of {whole.num_ranks} ranks (weights and states "
        f"{_gb(least.weights + least.state)}, gradients {_gb(least.gradients)}, activations {_gb(least.activations)}"
        f"{f', teacher {_gb(least.teacher)}' if least.teacher else ''}), "
        f"but {budget.where} has {_gb(budget.bytes)} for it ({_gb(budget.total_bytes)} minus a reserve of "
        f"{_gb(budget.reserve_bytes)}); {advice}"
    )


def _larger(is_on_gpu: bool) -> str:
    return "GPUs with more memory" if is_on_gpu else "hosts with more memory, or fewer ranks on each"


def _others(job: TrainingJob, whole: BatchPlan, *, is_on_gpu: bool) -> Iterator[tuple[str, TrainingJob, BatchPlan]]:
    """Yields plans near the plan that does not fit, nearest first, each with the flags or the number of ranks that it
    takes."""
    engine = job.engine
    higher: tuple[Literal[2, 3], ...] = (2, 3)
    stages = [stage for stage in higher if stage > engine.zero_stage]
    recomputations: tuple[Recomputed, ...] = {
        "off": tuple(recomputations_of(job)[1:]),
        "selective": ("full",),
    }.get(engine.activation_checkpointing, ())
    for recomputed in recomputations:
        yield f"--engine.activation-checkpointing {recomputed}", with_recomputed(job, recomputed), whole
    for stage in stages:
        is_plain = stage == 3 and job.optimizer.freeze_backbone
        compiled = "off" if is_plain else engine.compile
        sharded = replace(engine, zero_stage=stage, compile=compiled)
        yield f"--engine.zero-stage {stage}", replace(job, engine=sharded), whole
        if "full" in recomputations:
            both = replace(sharded, activation_checkpointing="full")
            flags = f"--engine.zero-stage {stage} --engine.activation-checkpointing full"
            yield flags, replace(job, engine=both), whole
    ranks = whole.num_ranks * 2
    while ranks <= whole.global_batch:
        if whole.global_batch % ranks == 0:
            share = whole.global_batch // ranks
            plan = BatchPlan(global_batch=whole.global_batch, micro_batch=share, accumulation=1, num_ranks=ranks)
            # More ranks on the same host would share the memory of the present ones.
            where = "" if is_on_gpu else f" on {ranks // whole.num_ranks} times as many hosts"
            yield f"{ranks} ranks{where}", job, plan
        ranks *= 2


def _fits(job: TrainingJob, plan: BatchPlan, budget: Budget, *, is_on_gpu: bool) -> bool:
    topology = Topology(num_ranks=plan.num_ranks, is_on_gpu=is_on_gpu)
    sizes = list(_micro_batches(plan, pairs=job.data.mixup.is_on))
    needed = (memory_of(job, topology, micro_batch=size, teacher=budget.teacher).peak for size in sizes)
    return any(num_bytes <= budget.bytes for num_bytes in needed)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"


def agreed_fit(
    job: TrainingJob, whole: BatchPlan, budget: Budget, world: World, *, record: Mapping[str, Any] | None
) -> Fit:
    """Returns the plan of all ranks, for a job whose precision is decided. `record`: the record of the checkpoint to
    continue, if there is one. Raises UserError, the same on every rank, if nothing fits. Collective."""
    least = _least_budget(budget, world)
    is_on_gpu = world.device.type == "cuda"
    recorded = recorded_micro_batch(record or {}, whole)
    fit = fitted(job, whole, least, is_on_gpu=is_on_gpu, recorded=recorded)
    if world.is_first and (is_on_gpu or fit.is_warning or fit.plan.accumulation > whole.accumulation):
        log.log(logging.WARNING if fit.is_warning else logging.INFO, "%s", words_of(fit, least))
    return fit


def agreed_recomputation(
    job: TrainingJob, whole: BatchPlan, budget: Budget, world: World, *, record: Mapping[str, Any] | None
) -> Recomputed:
    """Returns how much all ranks recompute if the job leaves it open; see `least_recomputed`. Collective."""
    is_on_gpu = world.device.type == "cuda"
    return least_recomputed(job, whole, _least_budget(budget, world), is_on_gpu=is_on_gpu, record=record)


def _least_budget(budget: Budget, world: World) -> Budget:
    """Returns the smallest budget of all ranks. Collective."""
    own = {"total_bytes": budget.total_bytes, "reserve_bytes": budget.reserve_bytes, "where": budget.where}
    budgets = [Budget(**one) for one in gather_json(own, device=world.device)]
    return replace(min(budgets, key=lambda one: one.bytes), teacher=budget.teacher)


def recorded_micro_batch(record: Mapping[str, Any], whole: BatchPlan) -> int | None:
    """Returns the micro-batch in a checkpoint's record. Returns None if another number of ranks wrote it, or if the
    record is unusable."""
    topology, engine = record.get("topology"), record.get("engine")
    if not isinstance(topology, Mapping) or not isinstance(engine, Mapping):
        return None
    size = engine.get("micro_batch")
    if topology.get("num_ranks") != whole.num_ranks or type(size) is not int or size < 1:
        return None
    return size


def words_of(fit: Fit, budget: Budget) -> str:
    """Returns one line about the plan and its memory."""
    plan, memory = fit.plan, fit.memory
    return (
        f"micro-batch {plan.micro_batch:,} x {plural(plan.accumulation, 'pass')} x {plural(plan.num_ranks, 'rank')} "
        f"({fit.why}): {memory.peak / 1e9:.1f} GB of the {budget.bytes / 1e9:.1f} GB that {budget.where} has for it "
        f"({_parts(memory)}; reserve {budget.reserve_bytes / 1e9:.1f})"
    )


def _parts(memory: Memory) -> str:
    parts = {
        "weights": memory.weights,
        "states": memory.state,
        "gradients": memory.gradients,
        "activations": memory.activations,
    }
    parts |= {"teacher": memory.teacher} if memory.teacher else {}
    return ", ".join(f"{name} {num_bytes / 1e9:.1f}" for name, num_bytes in parts.items())

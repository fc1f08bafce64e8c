"""One micro-batch for all ranks: the largest that fits the smallest budget, or that of the checkpoint."""

import logging
from collections.abc import Mapping
from typing import Any

from pipeline.ranks.collectives import gather_json
from pipeline.ranks.world import World
from pipeline.training.fitting.budget import Budget
from pipeline.training.fitting.fit import Fit, fitted
from pipeline.training.fitting.memory import Memory
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero.batch_plan import BatchPlan
from shards.output.quantities import plural

log = logging.getLogger(__name__)


def agreed_fit(
    job: TrainingJob, whole: BatchPlan, budget: Budget, world: World, *, record: Mapping[str, Any] | None
) -> Fit:
    """The plan of all ranks, for a job whose precision is decided. `record`: of the checkpoint to continue, if any.
    UserError, the same on every rank, if nothing fits. Collective."""
    own = {"total_bytes": budget.total_bytes, "reserve_bytes": budget.reserve_bytes, "where": budget.where}
    budgets = [Budget(**one) for one in gather_json(own, device=world.device)]
    least = min(budgets, key=lambda one: one.bytes)
    is_on_gpu = world.device.type == "cuda"
    recorded = recorded_micro_batch(record or {}, whole)
    fit = fitted(job, whole, least, is_on_gpu=is_on_gpu, recorded=recorded)
    if world.is_first and (is_on_gpu or fit.is_warning or fit.plan.accumulation > whole.accumulation):
        log.log(logging.WARNING if fit.is_warning else logging.INFO, "%s", words_of(fit, least))
    return fit


def recorded_micro_batch(record: Mapping[str, Any], whole: BatchPlan) -> int | None:
    """The micro-batch in a checkpoint's record, if as many ranks wrote it; None if it says nothing that can be used.

    Older versions recorded what the job asked for: 0 stands for the whole share, which they took.
    """
    topology, engine = record.get("topology"), record.get("engine")
    if not isinstance(topology, Mapping) or not isinstance(engine, Mapping):
        return None
    size = engine.get("micro_batch")
    if topology.get("num_ranks") != whole.num_ranks or type(size) is not int or size < 0:
        return None
    return size or whole.rank_batch


def words_of(fit: Fit, budget: Budget) -> str:
    """The plan and its memory in one line."""
    plan, memory = fit.plan, fit.memory
    reason = fit.reason or ("the largest that fits" if plan.accumulation > 1 else "the whole share")
    return (
        f"micro-batch {plan.micro_batch:,} x {plural(plan.accumulation, 'pass')} x {plural(plan.num_ranks, 'rank')} "
        f"({reason}): {memory.peak / 1e9:.1f} GB of the {budget.bytes / 1e9:.1f} GB that {budget.where} has for it "
        f"({_parts(memory)}; reserve {budget.reserve_bytes / 1e9:.1f})"
    )


def _parts(memory: Memory) -> str:
    parts = {
        "weights": memory.weights,
        "states": memory.state,
        "gradients": memory.gradients,
        "activations": memory.activations,
    }
    return ", ".join(f"{name} {num_bytes / 1e9:.1f}" for name, num_bytes in parts.items())

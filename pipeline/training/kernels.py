"""Sets how a model's blocks are computed (compiled, in float8, with fused MLPs, as CUDA graphs, recomputed in the
backward pass), and finds out which attention kernel ran."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pipeline.models.attention import (
    kernel_in_use,
    kernel_that_ran,
    kernels_seen,
)
from pipeline.models.build import Model, checkpoint_blocks, compile_blocks
from pipeline.models.float8 import float8_fault, use_float8
from pipeline.models.fused_mlp import fuse_mlps, fused_mlp_fault
from pipeline.models.recompute import recompute_selectively
from pipeline.ranks.collectives import gather_json
from pipeline.ranks.rendezvous import ranks_words
from pipeline.ranks.world import World
from pipeline.training.settings.job import EngineConfig, TrainingJob
from shards.errors import UserError

log = logging.getLogger(__name__)
_MOST_LOOKS = 3  # the most passes that are watched, beside one for each patch size that steps draw


def watches_kernel(job: TrainingJob, world: World) -> bool:
    """Returns whether the run finds out which kernel computes attention. Only GPUs have several kernels for it."""
    return world.device.type == "cuda" and not job.model.is_bit


class KernelWatch:
    """Finds out which kernel computes attention in a run, and writes it into `engine`, a part of the checkpoint's
    record. The compiler's cache may hold blocks with another kernel than the chosen one. The first pass in which
    nothing is compiled decides, because tracing a block for the compiler calls kernels, too. If each of the first
    passes compiles, the third one decides, or a later one if steps draw their patch sizes, each of which is compiled in
    the first step that draws it."""

    def __init__(self, engine: dict[str, Any], job: TrainingJob, world: World) -> None:
        self._engine, self._model, self._world = engine, job.model, world
        self._looks_left = _MOST_LOOKS + len(job.tokens.patch_sizes)

    @contextmanager
    def model_pass(self) -> Iterator[None]:
        """Returns a context for the forward and backward pass of a micro-batch."""
        if not self._looks_left or torch._C._autograd._profiler_enabled():  # a trace already profiles the step
            yield
            return
        num_graphs = _num_graphs()
        with kernels_seen() as calls:
            yield
        self._looks_left -= 1
        if self._looks_left and _num_graphs() > num_graphs:
            return
        self._looks_left = 0
        self._put_on_record(kernel_that_ran(calls, num_layers=self._model.num_blocks))

    def _put_on_record(self, ran: str) -> None:
        self._engine["attention"] = ran
        if (chosen := kernel_in_use()) not in ("", ran):
            log.warning(
                "rank %d: attention is computed by %s, although %s was chosen: the compiler's cache may hold blocks of "
                "another version; delete it (TORCHINDUCTOR_CACHE_DIR), or give --engine.compile off",
                self._world.rank,
                ran,
                chosen,
            )
        elif self._world.is_first:
            log.info("attention is computed by %s, by PyTorch's profiler", ran)


def _num_graphs() -> int:
    """Returns the number of graphs that this process has compiled so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def refuse_missing_float8(job: TrainingJob, world: World, *, is_compiled: bool) -> None:
    """Raises UserError, the same on every rank, if the job asks for float8 and a rank cannot compute it, or the
    precision is not bf16. Rank 0 warns if the blocks are not compiled. The job's precision must be decided.
    Collective."""
    wanted = job.engine.float8
    if wanted == "off":
        return
    _refuse_faults(f"engine.float8 is {wanted!r}", float8_fault(world.device), world, allowed="--engine.float8 off")
    if job.engine.precision != "bf16":
        raise UserError(
            f"engine.float8 is {wanted!r}, but the run's precision is {job.engine.precision}; allowed: bf16: give "
            "--engine.precision bf16, or --engine.float8 off"
        )
    if not is_compiled and world.is_first:
        log.warning(
            "engine.float8 is %r in blocks that are not compiled: rounding to float8 then usually takes longer than "
            "its products save; give --engine.compile on",
            wanted,
        )


def refuse_missing_fused_mlp(job: TrainingJob, world: World) -> None:
    """Raises UserError, the same on every rank, if the job asks for fused MLPs and a rank cannot compute them, or the
    precision is not bf16. The job's precision must be decided. Collective."""
    if not job.engine.fused_mlp:
        return
    fault = fused_mlp_fault(world.device)
    _refuse_faults("engine.fused_mlp is on", fault, world, allowed="--engine.no-fused-mlp")
    if job.engine.precision != "bf16":
        raise UserError(
            f"engine.fused_mlp is on, but the run's precision is {job.engine.precision}; allowed: bf16: give "
            "--engine.precision bf16, or --engine.no-fused-mlp"
        )


def _refuse_faults(asked: str, fault: str, world: World, *, allowed: str) -> None:
    """Raises UserError on every rank if any rank has a fault. `asked`: what the job says. `fault`: why this rank cannot
    compute it; empty if it can. `allowed`: the flag that turns it off. Collective."""
    faults: list[str] = gather_json(fault, device=world.device)
    if any(faults):
        lacking = [rank for rank, fault in enumerate(faults) if fault]
        why = "; ".join(dict.fromkeys(filter(None, faults)))
        raise UserError(
            f"{asked}, which {ranks_words(lacking)} of {world.num_ranks} cannot compute: {why}; allowed here: {allowed}"
        )


def refuse_missing_graphs(job: TrainingJob, world: World, *, is_compiled: bool) -> None:
    """Raises UserError, the same on every rank, if the job asks for CUDA graphs on a CPU or without compiled blocks."""
    if job.engine.cuda_graphs and not (world.device.type == "cuda" and is_compiled):
        what = "a CPU has none" if world.device.type != "cuda" else "the blocks are not compiled"
        raise UserError(f"engine.cuda_graphs is on, but {what}; allowed here: --engine.no-cuda-graphs")


def set_up_blocks(model: Model, config: EngineConfig, *, is_compiled: bool, device: torch.device) -> None:
    """Makes a model's blocks use float8, fused MLPs and compiled kernels, and recompute what they do not keep, as the
    engine's settings say. "auto" must be decided."""
    is_selective = config.activation_checkpointing == "selective"
    if config.fused_mlp:
        fuse_mlps(model)
    if config.float8 != "off":
        use_float8(model, config.float8, is_emulated=device.type == "cpu")
    if is_compiled:
        # `rounds_as_eager` follows torchtitan: rowwise scales made losses NaN when fused norms were not rounded
        # (pytorch #150859).
        compile_blocks(
            model,
            deterministic=config.deterministic,
            rounds_as_eager=config.float8 == "rowwise",
            cuda_graphs=config.cuda_graphs,
            on_gpu=device.type == "cuda",
            hooks_outside=config.zero_stage == 3,
            tuned=config.compile == "tuned",
            recomputes=is_selective,
        )
    elif is_selective:
        recompute_selectively(model)
    if config.activation_checkpointing == "full":
        checkpoint_blocks(model)

"""DeepSpeed as the ZeRO engine and nothing more: learning rates, clipping, batch plan and checkpoints are ours."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.training.batch_plan import BatchPlan
from pipeline.training.config import EngineConfig, OptimizerConfig
from pipeline.training.optimizer import build_optimizer, update_average
from pipeline.training.zero_state import (
    AVERAGE,
    MASTER,
    Fragment,
    create_moments,
    flat_partitions,
    local_fragments,
    publish_masters,
)

_PRINT_NEVER = 2**31


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What one optimiser step did: global gradient norm before clipping, and whether it was skipped as non-finite."""

    grad_norm: float
    skipped: bool


def deepspeed_config(config: EngineConfig, plan: BatchPlan, *, clip_norm: float) -> dict[str, Any]:
    """DeepSpeed's own configuration; clipping is always written, since its default became 1.0 in 2026."""
    if config.precision == "auto":
        raise ValueError("engine.precision is 'auto'; the engine needs the one it came to, bf16 or fp32")
    settings: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": clip_norm,
        "bf16": {"enabled": config.precision == "bf16"},
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": False,  # a history of data races (DeepSpeed #5545, #6351)
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": config.reduce_bucket,
            "allgather_bucket_size": config.allgather_bucket,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": _PRINT_NEVER,
        "wall_clock_breakdown": False,
    }
    if plan.accumulation > 1 and config.precision == "bf16":
        # Without it stage 1 would add up micro-batches in bf16.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


class Engine:
    """A model under ZeRO. One update is `accumulation` calls of `accumulate`, then one `update`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        config: EngineConfig,
        plan: BatchPlan,
        optimizer: OptimizerConfig,
        clip_norm: float,
        ema_decay: float = 0.0,
    ) -> None:
        # Not at the top: importing it chooses an accelerator from the environment, which `world.enter` prepares.
        import deepspeed  # noqa: PLC0415

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        warnings.filterwarnings(
            "ignore", message=".*(all_gather_into_tensor|reduce_scatter_tensor)", category=FutureWarning
        )
        # Skips the run-time C++ build of a shared-memory collective that only inference uses.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # DeepSpeed decorates its Muon kernels with torch.compile on import, and imports them for every optimiser: that
        # takes a second per rank, and nothing here calls them.
        deepspeed.runtime.compiler.compile = lambda: lambda function: function
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if config.precision == "bf16":
            model = model.to(torch.bfloat16)
        self._deepspeed, *_ = deepspeed.initialize(
            model=model,
            optimizer=build_optimizer(model.named_parameters(), optimizer),
            config=deepspeed_config(config, plan, clip_norm=clip_norm),
            dist_init_required=False,
        )
        self._zero = self._deepspeed.optimizer
        self._ema_decay = ema_decay
        masters = flat_partitions(self._zero) if ema_decay else []
        self._averages = {master: master.detach().clone() for master in masters}

    @property
    def module(self) -> nn.Module:
        """The model; under stage 3 its weights are gathered while it runs, so all ranks must run it together."""
        module: nn.Module = self._deepspeed.module
        return module

    def train(self, training: bool) -> None:
        """Switches dropout on or off."""
        self._deepspeed.train(training)

    def accumulate(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
        """Forward and backward of one micro-batch; returns its loss, detached."""
        loss = loss_of(self._deepspeed)
        self._deepspeed.backward(loss)
        if not self._deepspeed.is_gradient_accumulation_boundary():
            self._deepspeed.step()
        return loss.detach()

    def update(self, *, learning_rate: float) -> UpdateResult:
        """The optimiser step over the gradients gathered so far, at this learning rate."""
        for group in self._zero.param_groups:
            group["lr"] = learning_rate
        self._deepspeed.step()
        skipped = bool(self._zero.overflow)  # DeepSpeed counts a skipped step as done and says nothing
        if not skipped:
            for master, average in self._averages.items():
                update_average(average, master.detach(), decay=self._ema_decay)
        norm = self._deepspeed.get_global_grad_norm()
        return UpdateResult(grad_norm=float("nan") if norm is None else float(norm), skipped=skipped)

    def fragments(self) -> list[Fragment]:
        """This rank's part of the master weights and moments, as live views."""
        return local_fragments(self._zero, self._deepspeed.module.named_parameters(), averages=self._averages)

    def load(self, fill: Callable[[Fragment, str], None], *, moments: list[str], num_updates: int) -> None:
        """Overwrites masters and moments: `fill(fragment, slot)` copies into `fragment.slots[slot]`. An average that
        is not among `moments` begins at the masters."""
        create_moments(self._zero, names=[name for name in moments if name != AVERAGE], num_updates=num_updates)
        for fragment in self.fragments():
            for slot in (MASTER, *moments):
                fill(fragment, slot)
            if self._averages and AVERAGE not in moments:
                fragment.slots[AVERAGE].copy_(fragment.slots[MASTER])
        publish_masters(self._zero)

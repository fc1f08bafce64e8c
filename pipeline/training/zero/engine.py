"""Uses DeepSpeed only as the ZeRO engine. Learning rates, the batch plan and checkpoints are Patchline's own."""

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.manifest import AVERAGE, MASTER
from pipeline.training.settings.job import EngineConfig, OptimizerConfig, reduced_in, with_buckets_of
from pipeline.training.zero.adafactor import factorings_of
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.flat_blocks import ParameterPlace, flatten_blocks, largest_block, layout_of
from pipeline.training.zero.loading import leave_dynamo_out, without
from pipeline.training.zero.optimizer import (
    RATE_FACTOR,
    OfParts,
    build_optimizer,
    freeze,
    moments_of,
    skip_flag,
    update_averages,
    ways_of,
)
from pipeline.training.zero.stage_3 import gathered_ahead, reduce_scatter_coalesced
from pipeline.training.zero.state import (
    create_moments,
    flat_partitions,
    free_tensors,
    give_memory,
    inner_optimizer,
    local_fragments,
    local_gradients,
    narrow_first_moments,
    parts_in_partitions,
    publish_masters,
    spoil_gradients,
    swap,
)
from pipeline.training.zero.step_times import StepTimes
from pipeline.training.zero.update import UpdateWithoutWaiting, class_without_waiting
from shards.errors import UserError

_PRINT_NEVER = 2**31
_STAGE_3 = 3
# All methods of its backend that DeepSpeed calls in a step.
_EXCHANGES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """The result of one optimiser step: the global gradient norm before clipping, which may still be on the device, and
    whether the gradients were discarded."""

    grad_norm: torch.Tensor | float
    was_discarded: bool = False

    @property
    def was_skipped(self) -> bool:
        """Whether no update was made: the gradients were discarded, or their norm is not finite. Waits for the norm."""
        return is_skipped(float(self.grad_norm), was_discarded=self.was_discarded)


def is_skipped(grad_norm: float, *, was_discarded: bool) -> bool:
    """Returns whether an update is skipped: gradients that are discarded, or whose norm is not finite, change
    nothing."""
    return was_discarded or not math.isfinite(grad_norm)


def deepspeed_config(
    config: EngineConfig, plan: BatchPlan, *, clip_norm: float, on_cpu: bool = False, least_bucket: int = 0
) -> dict[str, Any]:
    """Returns DeepSpeed's configuration. It always sets clipping, whose default became 1.0 in 2026. A bucket takes at
    least `least_bucket` elements, those of the largest block: DeepSpeed keeps copies of tensors that fit in no bucket.
    Raises UserError for CUDA graphs with several passes per step."""
    if config.precision == "auto":
        raise ValueError("engine.precision is 'auto'; the engine needs the resolved one, bf16 or fp32")
    if config.cuda_graphs and plan.accumulation > 1:
        raise UserError(
            f"engine.cuda_graphs is on, but a step has {plan.accumulation} passes; allowed: one (between passes, "
            "gradients stay in the graphs' memory, which the next pass takes): give more GPUs, a smaller "
            "--global-batch or a larger --micro-batch, or --engine.no-cuda-graphs"
        )
    config = with_buckets_of(config, on_cpu=on_cpu)
    settings: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": clip_norm,
        "bf16": {"enabled": config.precision == "bf16"},
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": config.overlap == "on",  # it had data races (DeepSpeed #5545, #6351, #8061)
            "contiguous_gradients": True,
            # In stages 1 and 2, this is not a reduce-scatter, but the same all-reduce with two more copies of the
            # gradients.
            "reduce_scatter": config.zero_stage == 3,
            "reduce_bucket_size": max(config.reduce_bucket, least_bucket),
            # By default, stage 3 replaces torch's linear function in the whole process by one in Python. That one takes
            # the host longer, and rounds the product to bf16 before it adds the bias.
            "memory_efficient_linear": False,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": _PRINT_NEVER,
        "wall_clock_breakdown": False,
        # This timer is on by default, and waits for the device twice in each micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }
    if config.zero_stage == 3 and least_bucket:
        settings["zero_optimization"] |= gathered_ahead(least_bucket)
    if config.precision == "bf16":
        # By default, the sum is rounded to bf16 at each rank (benchmarks/results/reduce_precision.json).
        settings["communication_data_type"] = reduced_in(config)
        if plan.accumulation > 1:
            # By default, stage 1 would add up micro-batches in bf16.
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _quiet_deepspeed() -> Any:
    """Imports and initialises DeepSpeed, without its unwanted side effects."""
    # Not imported at the top: the import chooses an accelerator from the environment, which `world.enter` prepares.
    with without("mlflow"):
        import deepspeed  # noqa: PLC0415
    leave_dynamo_out()

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings(
        "ignore", message=".*(all_gather_into_tensor|reduce_scatter_tensor)", category=FutureWarning
    )
    # Skips the run-time C++ build of a shared-memory collective that only inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed imports its Muon kernels for every optimiser, and decorates them with torch.compile. That takes a second
    # per rank, and nothing here calls them.
    deepspeed.runtime.compiler.compile = lambda: lambda function: function
    # If stage 1 adds up micro-batches in fp32, DeepSpeed would take its BF16_Optimizer, which sends nothing during the
    # backward pass.
    deepspeed.DeepSpeedEngine._do_optimizer_sanity_check = lambda *_: deepspeed.runtime.zero.config.ZERO_OPTIMIZATION
    deepspeed.runtime.zero.stage3.reduce_scatter_coalesced = reduce_scatter_coalesced
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


class FrozenWeights:
    """This rank's parts of the parameters that need no gradient, float32, with arbitrary values at first.

    DeepSpeed knows only the weights that its optimiser updates. Frozen weights have no moments, but are kept in fp32
    and saved in every checkpoint. Each rank holds an equal part of every such tensor, cut as in ZeRO-3. The parts are
    saved and filled like the masters of trained weights, and `publish` copies them to the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self._parts: dict[str, Fragment] = {}
        self._sizes: dict[str, int] = {}
        for name, parameter in self._parameters.items():
            numel = int(getattr(parameter, "ds_numel", parameter.numel()))
            size = -(-numel // num_ranks)
            start = min(rank * size, numel)
            held = torch.empty(min(size, numel - start), dtype=torch.float32, device=parameter.device)
            self._parts[name] = Fragment(name=name, start=start, length=held.numel(), slots={MASTER: held})
            self._sizes[name] = size

    def fragments(self) -> list[Fragment]:
        """Returns what this rank holds, as live views."""
        return [part for part in self._parts.values() if part.length]

    @torch.no_grad()
    def publish(self) -> None:
        """Updates the model's own weights from all ranks' parts. Collective, one tensor at a time."""
        for name, parameter in self._parameters.items():
            part = self._parts[name]
            own = part.slots[MASTER].to(parameter.dtype)
            if hasattr(parameter, "ds_tensor"):  # stage 3: the model has only the rank's own share
                parameter.ds_tensor.data.flatten()[: part.length].copy_(own)
                continue
            padded = own.new_zeros(self._sizes[name])
            padded[: part.length] = own
            gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, padded)
            parameter.copy_(torch.cat(gathered)[: parameter.numel()].reshape(parameter.shape))

    def free(self) -> None:
        """Frees the memory of the parts."""
        for part in self._parts.values():
            part.slots[MASTER].untyped_storage().resize_(0)


@contextmanager
def timed_exchanges(times: StepTimes) -> Iterator[None]:
    """Counts DeepSpeed's exchanges between ranks inside the `with` block as `communication` of the steps. An exchange
    counts from its call to its end on the device. If it runs beside the passes, it counts only while they wait for it.
    Changes nothing on a single rank."""
    if times.is_alone:
        yield
        return
    import deepspeed.comm.comm  # noqa: PLC0415  # the engine has loaded it
    from deepspeed.runtime.zero import stage3, stage_1_and_2  # noqa: PLC0415

    backend, accelerator = deepspeed.comm.comm.cdb, stage_1_and_2.get_accelerator()
    first, third = stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3
    average, epilogue = first.average_tensor, third.independent_gradient_partition_epilogue
    wait = UpdateWithoutWaiting.wait_for_sums
    try:
        for name in _EXCHANGES:
            setattr(backend, name, _timed(getattr(backend, name), times))
        # Here the passes wait for sums on another stream: the sums of the previous bucket, and the last sums.
        UpdateWithoutWaiting.wait_for_sums = _timed(wait, times)  # type: ignore[method-assign]
        first.average_tensor = _timed_if(lambda zero: zero.overlap_comm and zero.reduction_stream, average, times)
        third.independent_gradient_partition_epilogue = _timed_if(
            lambda zero: zero.reduce_and_partition_stream not in (None, accelerator.default_stream()), epilogue, times
        )
        yield
    finally:
        first.average_tensor, third.independent_gradient_partition_epilogue = average, epilogue
        UpdateWithoutWaiting.wait_for_sums = wait  # type: ignore[method-assign]
        for name in _EXCHANGES:
            vars(backend).pop(name, None)  # this restores the method of its class


def _timed_if(is_beside: Callable[[Any], Any], method: Callable[..., Any], times: StepTimes) -> Callable[..., Any]:
    """Wraps a method of a ZeRO optimiser. The method's time counts as communication if the optimiser's sums run on a
    separate stream."""

    def timed(zero: Any, *args: Any, **options: Any) -> Any:
        with times.exchanging() if is_beside(zero) else nullcontext():
            return method(zero, *args, **options)

    return timed


def _timed(exchange: Callable[..., Any], times: StepTimes) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        with times.exchanging():
            work = exchange(*args, **options)
        return _TimedWork(work, times) if work is not None else None

    return timed


class _TimedWork(dist.Work):
    """An exchange that has begun and for which DeepSpeed waits later."""

    def __init__(self, work: Any, times: StepTimes) -> None:
        super().__init__()
        self._work, self._times = work, times

    def wait(self, *args: Any, **options: Any) -> Any:
        with self._times.exchanging():
            return self._work.wait(*args, **options)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class Engine:
    """A model under ZeRO. A step is `accumulation` calls of `accumulate`, followed by one call of `update`; with SAM,
    `accumulation` calls and one of `climb` come before. The model may be on meta, without values; `load` then fills
    it."""

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
        deepspeed = _quiet_deepspeed()
        # DeepSpeed would make a group of its own. In one group, sums and gathers that begin on several streams have the
        # same order on all ranks.
        deepspeed.utils.groups._WORLD_GROUP = dist.group.WORLD
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        on_cpu = deepspeed.accelerator.get_accelerator().device_name() == "cpu"
        self.layout = layout_of(self.shapes, ways_of(self.shapes, optimizer))
        own: Any = model  # a ViT, if the optimiser is Adafactor
        num_heads = own.config.size.num_heads if optimizer.name == "adafactor" else 0
        least = largest_block(self.layout)
        settings = deepspeed_config(config, plan, clip_norm=clip_norm, on_cpu=on_cpu, least_bucket=least)
        if config.precision == "bf16":
            model = model.to(torch.bfloat16)
        for block in flatten_blocks(model, self.layout):
            # Stage 3 gathers a block as a whole, and needs no hooks in its layers.
            deepspeed.utils.set_z3_leaf_module(block, True)
        if next(model.parameters()).is_meta:
            give_memory(model, settings)
        freeze(model, optimizer)
        self._deepspeed, *_ = deepspeed.initialize(
            model=model,
            optimizer=build_optimizer(model.named_parameters(), optimizer, layout=self.layout),
            config=settings,
            dist_init_required=False,
        )
        self._zero = self._deepspeed.optimizer
        if config.zero_stage < _STAGE_3:
            self._zero.__class__ = class_without_waiting(self._zero.__class__)
        self._optimizer, self._ema_decay, self._has_graphs = optimizer, ema_decay, config.cuda_graphs
        self._stage = config.zero_stage
        if isinstance(inner := inner_optimizer(self._zero), OfParts):
            inner.parts = parts_in_partitions(self._zero, self._trained())
            places = [place for _, each in self._trained() for place in each]
            factorings = factorings_of(places, num_heads=num_heads) if optimizer.name == "adafactor" else {}
            inner.about = {"num_tensors": len(places), "factorings": factorings}
        self._frozen = FrozenWeights(self._deepspeed.module)
        masters = flat_partitions(self._zero) if ema_decay else []
        self.before_update: Callable[[], None] = lambda: None  # orders the update after copies of the state
        self._averages = {master: master.detach().clone() for master in masters}

    @property
    def module(self) -> nn.Module:
        """The model. Under stage 3, its weights are gathered while it runs, so all ranks must run it together."""
        module: nn.Module = self._deepspeed.module
        return module

    def train(self, training: bool) -> None:
        """Switches dropout on or off. Under stage 3, frees the weights that an evaluation has left gathered."""
        self._deepspeed.train(training)
        if training and self._stage == _STAGE_3:
            self._zero._partition_all_parameters()

    def accumulate(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
        """Makes the forward and backward pass of one micro-batch, and returns its detached loss. If the loss is not
        finite, the gradients are made NaN, since the gradients of an infinite loss may be finite. The update is then
        skipped."""
        if self._has_graphs:  # results of the last micro-batch are no longer needed
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        loss = loss_of(self._deepspeed)
        value = loss.detach()
        loss.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: torch.where(value.isfinite(), gradient, torch.nan)
        )
        self._deepspeed.backward(loss)
        if not self._deepspeed.is_gradient_accumulation_boundary():
            self._deepspeed.step()
        return loss.detach()

    def climb(self) -> None:
        """SAM: perturbs the model's weights by the gradients accumulated so far, which are then dropped. The next
        gradients are those at the perturbed weights, until `update` publishes the masters again, which keep their
        values. Collective."""
        self._zero.is_discarded, self._zero.climbs_by = False, self._optimizer.sam_rho
        self.before_update()
        self._deepspeed.step()
        self._zero.climbs_by = 0.0

    def update(self, *, learning_rate: float, ema_decay: float | None = None, discard: bool = False) -> UpdateResult:
        """Takes an optimiser step with the gradients accumulated so far, at this learning rate (times the factor of
        each layer) and with this decay of the average (None: the run's decay). Gradients whose norm is not finite
        change no tensor of the state; stages 1 and 2 decide that on the device. `discard`: drops the gradients."""
        norm_before = None
        if isinstance(self._zero, UpdateWithoutWaiting):
            self._zero.is_discarded = discard
        elif discard:
            norm_before = spoil_gradients(self._zero, list(self.gradients().values()))
        for group in self._zero.param_groups:
            group["lr"] = learning_rate * group[RATE_FACTOR]
        self.before_update()
        self._deepspeed.step()
        if self._averages and not (discard or self._zero.overflow):
            masters = [master.detach() for master in self._averages]
            decay = self._ema_decay if ema_decay is None else ema_decay
            found_inf = skip_flag(inner_optimizer(self._zero))
            update_averages(list(self._averages.values()), masters, decay=decay, found_inf=found_inf)
        norm = self._deepspeed.get_global_grad_norm() if norm_before is None else norm_before
        return UpdateResult(grad_norm=norm, was_discarded=discard)

    def destroy(self) -> None:
        """Removes DeepSpeed's hooks from the model. The engine cannot be used afterwards."""
        self._deepspeed.destroy()

    def fragments(self) -> list[Fragment]:
        """Returns this rank's part of the master weights, moments and averages, as live views. Weights that are not
        trained have no moments."""
        return [*self._trained_fragments(), *self._frozen.fragments()]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns live views of this rank's part of each reduced gradient, by name. They are valid only between the
        last micro-batch and `update`."""
        return local_gradients(self._zero, self._trained())

    @property
    def trained_names(self) -> tuple[str, ...]:
        """The names of the parameters that updates change."""
        return tuple(place.name for _, places in self._trained() for place in places)

    def _trained(self) -> list[tuple[nn.Parameter, tuple[ParameterPlace, ...]]]:
        """Returns the tensors that DeepSpeed updates, each with the parameters in it."""
        named = self._deepspeed.module.named_parameters()
        return [(tensor, self.layout[name]) for name, tensor in named if tensor.requires_grad]

    def _trained_fragments(self) -> list[Fragment]:
        return local_fragments(self._zero, self._trained(), averages=self._averages)

    def load(
        self,
        fill: Callable[[Fragment, str], None],
        *,
        moments: list[str],
        num_updates: int,
        filled: Callable[[], None] = lambda: None,
    ) -> None:
        """Overwrites masters and moments. `fill(fragment, slot)` must copy into `fragment.slots[slot]`, at once or by
        the time `filled` returns. If the average is not among `moments`, it begins with the values of the masters. Each
        parameter gets the other `moments` that the optimiser keeps for it."""
        create_moments(self._zero, names=[name for name in moments if name != AVERAGE], num_updates=num_updates)
        with torch.no_grad():
            for flat in (*flat_partitions(self._zero), *self._averages.values()):
                flat.zero_()  # the padding, which no fragment has
        fragments = self._trained_fragments()
        for fragment in fragments:
            kept = (AVERAGE, *moments_of(fragment.name, self._optimizer))
            for slot in (MASTER, *(moment for moment in moments if moment in kept)):
                fill(fragment, slot)
        for fragment in self._frozen.fragments():
            fill(fragment, MASTER)
        filled()
        if self._optimizer.first_moment == "bf16":
            narrow_first_moments(self._zero)
        if self._averages and AVERAGE not in moments:
            for fragment in fragments:
                fragment.slots[AVERAGE].copy_(fragment.slots[MASTER])
        publish_masters(self._zero, also=self._frozen.publish)

    @property
    def has_averages(self) -> bool:
        """Whether the engine averages the weights."""
        return bool(self._ema_decay)

    def swap_averages(self) -> None:
        """Exchanges the model's weights and the averaged ones. A second call restores both exactly. There must be no
        update or save between the two calls. Collective."""
        self.before_update()
        for master, average in self._averages.items():
            swap(master.detach(), average)
        publish_masters(self._zero, also=self._frozen.publish)

    def free(self) -> None:
        """Frees the engine's memory. The engine cannot be used afterwards."""
        self.destroy()
        self._frozen.free()
        free_tensors(self._zero, self._deepspeed.module.parameters(), averages=self._averages)

"""Decides where a run starts, and fills the engine accordingly. In this order:

    1. the newest of its own checkpoints that stands and verifies
    2. the weights that the job names (--initial.weights)
    3. scratch: the initial values of the job's seed

Before that, every rank decides in the same way (rank_agreement.py) whether blocks are compiled, and the precision,
which a run keeps once it has started.
"""

import logging
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from pipeline.checkpoints.checkpoint import Checkpoints
from pipeline.checkpoints.fragments import Fragment
from pipeline.checkpoints.manifest import MASTER, CheckpointManifest
from pipeline.models.build import Model, checkpoint_blocks, compile_blocks, compile_fault, shapes_of, unfilled_model
from pipeline.models.initial import initial_tensor
from pipeline.models.weights.fit import fit_weights
from pipeline.models.weights.folder import open_weights
from pipeline.models.weights.tensor_checks import TensorByName
from pipeline.ranks.devices import Bf16
from pipeline.ranks.world import World
from pipeline.training.fitting.first_pass import engine_that_fits, one_pass
from pipeline.training.fitting.memory import Topology, memory_of
from pipeline.training.settings.job import EngineConfig, TrainingJob, scaled_by_rate
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.layers import freeze, is_trained
from shards.errors import InvalidDataError, UserError

Precision = Literal["bf16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class PrecisionChoice:
    """`message`: the reason (empty if the job names a precision that is fine here). `is_warning`: it is slow here."""

    precision: Precision
    message: str = ""
    is_warning: bool = False


def choose_precision(wanted: Literal["auto", "bf16", "fp32"], *, recorded: str, bf16: Bf16) -> PrecisionChoice:
    """`wanted`: what the job says. `recorded`: the precision in the checkpoint that the run continues from, empty
    if it starts. `bf16`: what every rank's device can do."""
    if wanted != "auto":
        return _as_demanded(wanted, recorded=recorded, bf16=bf16)
    if recorded in ("bf16", "fp32"):
        return _as_recorded("bf16" if recorded == "bf16" else "fp32", bf16=bf16)
    precision: Precision = "bf16" if bf16.is_native else "fp32"
    return PrecisionChoice(precision=precision, message=f"precision {precision}: {bf16.reason}")


def _as_demanded(wanted: Precision, *, recorded: str, bf16: Bf16) -> PrecisionChoice:
    before = f" (the run began with {recorded})" if recorded not in ("", wanted) else ""
    if wanted == "bf16" and not bf16.is_native:
        advice = "" if recorded == "bf16" else "; --engine.precision auto would take fp32"
        message = f"precision bf16, as the job says{before}, though {bf16.reason}{advice}"
        return PrecisionChoice(precision=wanted, message=message, is_warning=True)
    return PrecisionChoice(precision=wanted, message=f"precision {wanted}, as the job says{before}" if before else "")


def _as_recorded(recorded: Precision, *, bf16: Bf16) -> PrecisionChoice:
    message = f"precision {recorded}, as when the run started"
    if (recorded == "bf16") == bf16.is_native:
        return PrecisionChoice(precision=recorded, message=message)
    is_slow = recorded == "bf16"
    return PrecisionChoice(precision=recorded, message=f"{message}, though {bf16.reason}", is_warning=is_slow)


log = logging.getLogger(__name__)
_CPU = torch.device("cpu")


def start_engine(job: TrainingJob, plan: BatchPlan, world: World, *, is_compiled: bool) -> tuple[Engine, BatchPlan]:
    """The engine, still to be filled, and its plan: this one, or on a GPU one with a smaller micro-batch if its memory
    does not suffice. Collective."""

    def build(plan: BatchPlan) -> Engine:
        return Engine(
            starting_model(job, is_compiled=is_compiled),
            config=job.engine,
            plan=plan,
            optimizer=scaled_by_rate(job.optimizer, peak_rate=job.schedule.learning_rate),
            clip_norm=job.clip_norm,
            ema_decay=job.ema_decay,
        )

    def first_pass(engine: Engine, plan: BatchPlan) -> None:
        stand_in = partial(stand_in_model, job, is_compiled=is_compiled, device=world.device)
        topology = Topology(num_ranks=world.num_ranks, is_on_gpu=True)
        memory = memory_of(job, topology, micro_batch=plan.micro_batch)
        held_bytes = memory.peak - memory.activations
        one_pass(job, engine, plan, device=world.device, stand_in=stand_in, held_bytes=held_bytes)

    if world.device.type == "cuda":
        pairs = job.data.mixup.alpha > 0
        engine, plan = engine_that_fits(plan, build=build, first_pass=first_pass, pairs=pairs, world=world)
    else:
        engine = build(plan)
    return engine, plan


def fill_engine(
    engine: Engine, job: TrainingJob, checkpoints: Checkpoints, manifest: CheckpointManifest | None
) -> None:
    """Gives it the state that the run starts from. `manifest`: of its checkpoint, None if it has none. Collective."""
    if manifest:
        fill_from_checkpoint(engine, checkpoints, manifest, job=job)
    else:
        _fill_from_weights(engine, starting_weights(job))


def starting_weights(job: TrainingJob) -> TensorByName:
    """Tensor by name for a run without a checkpoint: fitted weights if the job names some, else initial ones."""

    shapes = shapes_of(job.model)

    def scratch(name: str) -> Any:
        return initial_tensor(name, shapes[name], seed=job.seed, position_std=job.model.position_std)

    if not job.initial.weights:
        return scratch
    weights, initial = open_weights(job.initial.weights), job.initial
    return fit_weights(weights, job.model, initial=scratch, new_head=initial.new_head, mode=initial.resample)


def starting_model(job: TrainingJob, *, is_compiled: bool) -> Model:
    """The job's model on meta, before it has any memory, with its blocks compiled and recomputed as the job says."""
    with torch.device("meta"):
        model = unfilled_model(job.model)
    if is_compiled:
        compile_blocks(model)
    if job.engine.activation_checkpointing:
        checkpoint_blocks(model)
    return model


def stand_in_model(job: TrainingJob, *, is_compiled: bool, device: torch.device) -> Model:
    """A whole model of the job's size and precision on a device, for a trial of its memory: all its weights are 0."""
    model = starting_model(job, is_compiled=is_compiled)
    if job.engine.precision == "bf16":
        model.to(torch.bfloat16)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    freeze(model, job.optimizer)
    return model


def _fill_from_weights(engine: Engine, tensor: TensorByName) -> None:
    """Puts unrounded fp32 values into the masters (DeepSpeed made them from its bf16 copy)."""

    def fill(fragment: Fragment, slot: str) -> None:
        flat = tensor(fragment.name).flatten()
        fragment.slots[slot].copy_(flat[fragment.start : fragment.start + fragment.length])

    engine.load(fill, moments=[], num_updates=0)


def fill_from_checkpoint(
    engine: Engine, checkpoints: Checkpoints, manifest: CheckpointManifest, *, job: TrainingJob
) -> None:
    """Masters and moments from the fragments that any number of ranks wrote under any ZeRO stage."""

    if {name: tensor.shape for name, tensor in manifest.tensors.items()} != engine.shapes:
        where = f"{checkpoints.store.url}/{manifest.id.folder}"
        raise InvalidDataError(f"{where} has other tensors than the model that it names; start in another --run-dir")
    _refuse_other_moments(manifest, job, where=f"{checkpoints.store.url}/{manifest.id.folder}")

    wanted: list[tuple[Fragment, str]] = []  # all of it at once takes fewer requests

    def fill(fragment: Fragment, slot: str) -> None:
        wanted.append((fragment, slot))

    def filled() -> None:
        checkpoints.load_all(manifest, wanted)

    engine.load(fill, moments=list(manifest.moments), num_updates=manifest.num_updates, filled=filled)
    checkpoints.loaded()


def _refuse_other_moments(manifest: CheckpointManifest, job: TrainingJob, *, where: str) -> None:
    """InvalidDataError unless the checkpoint has moments of the weights that the job trains, and of no others."""
    for name, tensor in manifest.tensors.items():
        expected = {MASTER, *manifest.moments} if is_trained(name, job.optimizer) else {MASTER}
        if set(tensor.slots) != expected:
            raise InvalidDataError(
                f"{where} has {', '.join(sorted(tensor.slots))} of {name}; allowed: {', '.join(sorted(expected))}; "
                "start in another --run-dir"
            )


def will_compile(config: EngineConfig, device: torch.device) -> bool:
    """Whether a run on this device compiles its blocks: "auto" if it works. UserError if "on" does not."""
    is_wanted = config.compile == "on" or (config.compile == "auto" and device.type == "cuda" and config.zero_stage < 3)
    # torch proposes TF32 to everybody who compiles: bf16 runs have no use for it, and fp32 runs chose not to have it.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)
    fault = compile_fault(device) if is_wanted else ""
    if not fault:
        return is_wanted
    needed = "Triton and a C compiler" if device.type == "cuda" else "a C++ compiler"
    missing = f"torch.compile does not work on this {device.type}: {fault}. It needs {needed} and Python's headers"
    if config.compile == "on":
        raise UserError(f"{missing} (Debian: apt-get install g++ python3-dev); install them, or --engine.compile off")
    log.warning("%s; the run continues without it, more slowly (--engine.compile off hides this)", missing)
    return False


def with_precision(
    job: TrainingJob, manifest: CheckpointManifest | None, *, bf16: Bf16, say: bool = False
) -> TrainingJob:
    """The job with its precision decided: "auto" takes that of the checkpoint, if there is one. `say`: log the
    reason."""
    recorded = manifest.job.precision if manifest else ""
    choice = choose_precision(job.engine.precision, recorded=recorded, bf16=bf16)
    if say and choice.message:
        log.log(logging.WARNING if choice.is_warning else logging.INFO, choice.message)
    return replace(job, engine=replace(job.engine, precision=choice.precision))

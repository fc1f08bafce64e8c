"""Where a run starts. In this order:

    1. the newest of its own checkpoints that stands and verifies
    2. the weights that the job names (--initial.weights)
    3. scratch: the initial values of the job's seed

And what all ranks decide together before it does: whether they compile, and in which precision they compute.
"""

import logging
import warnings
from dataclasses import replace
from typing import Any

import torch

from pipeline.bf16 import Bf16
from pipeline.collectives import all_agree, gather_json
from pipeline.models.build import Model, checkpoint_blocks, compile_blocks, compile_fault, shapes_of, unfilled_model
from pipeline.models.initial import initial_tensor
from pipeline.models.tensor_checks import TensorByName
from pipeline.models.weights import fit_weights, open_weights
from pipeline.training.batch_plan import BatchPlan
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.config import EngineConfig, TrainingJob, scaled_by_rate
from pipeline.training.engine import Engine
from pipeline.training.manifest import Manifest
from pipeline.training.precision import choose_precision, least_of
from pipeline.training.zero_state import Fragment
from pipeline.world import World, bf16_of
from shards.errors import InvalidDataError, UserError

log = logging.getLogger(__name__)


def start_engine(
    job: TrainingJob, plan: BatchPlan, checkpoints: Checkpoints, manifest: Manifest | None, *, is_compiled: bool
) -> Engine:
    """The engine with the weights that the run starts from. `manifest`: of its checkpoint, None if it has none."""
    weights = None if manifest else starting_weights(job)
    engine = Engine(
        starting_model(job, is_compiled=is_compiled),
        config=job.engine,
        plan=plan,
        optimizer=scaled_by_rate(job.optimizer, peak_rate=job.schedule.learning_rate),
        clip_norm=job.clip_norm,
        ema_decay=job.ema_decay,
    )
    if manifest:
        _fill_from_checkpoint(engine, checkpoints, manifest)
    elif weights:
        _fill_from_weights(engine, weights)
    return engine


def starting_weights(job: TrainingJob) -> TensorByName:
    """Tensor by name for a run without a checkpoint: fitted weights if the job names some, else initial ones."""

    shapes = shapes_of(job.model)

    def scratch(name: str) -> Any:
        return initial_tensor(name, shapes[name], seed=job.seed, position_std=job.model.position_std)

    if not job.initial.weights:
        return scratch
    return fit_weights(open_weights(job.initial.weights), job.model, initial=scratch, new_head=job.initial.new_head)


def starting_model(job: TrainingJob, *, is_compiled: bool) -> Model:
    """The job's model before its weights are filled in, with its blocks compiled and recomputed as the job says."""
    model = unfilled_model(job.model)
    if is_compiled:
        compile_blocks(model)
    if job.engine.activation_checkpointing:
        checkpoint_blocks(model)
    return model


def _fill_from_weights(engine: Engine, tensor: TensorByName) -> None:
    """Puts unrounded fp32 values into the masters (DeepSpeed made them from its bf16 copy)."""

    def fill(fragment: Fragment, slot: str) -> None:
        flat = tensor(fragment.name).flatten()
        fragment.slots[slot].copy_(flat[fragment.start : fragment.start + fragment.length])

    engine.load(fill, moments=[], num_updates=0)


def _fill_from_checkpoint(engine: Engine, checkpoints: Checkpoints, manifest: Manifest) -> None:
    """Masters and moments from the fragments that any number of ranks wrote under any ZeRO stage."""

    if {name: tensor.shape for name, tensor in manifest.tensors.items()} != engine.shapes:
        where = f"{checkpoints.store.url}/{manifest.id.folder}"
        raise InvalidDataError(f"{where} has other tensors than the model that it names; start in another --run-dir")

    def fill(fragment: Fragment, slot: str) -> None:
        checkpoints.load(manifest, fragment, slot)

    engine.load(fill, moments=list(manifest.moments), num_updates=manifest.num_updates)
    checkpoints.loaded()


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


def all_will_compile(is_compiled: bool, world: World) -> bool:
    """True if every rank can compile: otherwise none does, so that all compute the same way. Collective."""
    if all_agree(is_compiled, device=world.device):
        return True
    if is_compiled:
        log.warning("rank %d does not compile the model's blocks either, since another rank cannot", world.rank)
    return False


def bf16_of_all(world: World) -> Bf16:
    """Whether every rank's device computes bf16 natively: all compute the same way. Collective."""
    mine = bf16_of(world.device)
    found = gather_json({"is_native": mine.is_native, "reason": mine.reason}, device=world.device)
    return least_of([Bf16(**one) for one in found])


def with_precision(job: TrainingJob, manifest: Manifest | None, *, bf16: Bf16, say: bool = False) -> TrainingJob:
    """The job with its precision decided: "auto" takes that of the checkpoint, if there is one. `say`: log the
    reason."""
    recorded = manifest.job.precision if manifest else ""
    choice = choose_precision(job.engine.precision, recorded=recorded, bf16=bf16)
    if say and choice.message:
        log.log(logging.WARNING if choice.is_warning else logging.INFO, choice.message)
    return replace(job, engine=replace(job.engine, precision=choice.precision))

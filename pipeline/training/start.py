"""Where a run starts: its own newest checkpoint, named weights, or scratch; and what must still be the same."""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from pipeline.bf16 import Bf16
from pipeline.collectives import all_agree, gather_json
from pipeline.data.training_data import changes, is_of_decoder
from pipeline.models.build import Model, checkpoint_blocks, compile_blocks, compile_fault, shapes_of, unfilled_model
from pipeline.models.config import ModelConfig
from pipeline.models.initial import initial_tensor
from pipeline.models.weights import TensorByName, fit_weights, open_weights
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.config import EngineConfig, TrainingJob
from pipeline.training.engine import Engine
from pipeline.training.manifest import Manifest
from pipeline.training.precision import choose_precision, least_of
from pipeline.training.same_run import STEPS, other_values
from pipeline.training.zero_state import Fragment
from pipeline.world import World, bf16_of
from shards.differences import Difference, as_lines, differences, flattened
from shards.errors import UserError

log = logging.getLogger(__name__)
_WARMUP = "schedule.warmup_steps"


@dataclass(frozen=True, kw_only=True)
class SavedJob:
    """What a checkpoint or a DONE marker says of the job that wrote it."""

    step: int
    model: dict[str, Any]
    loss: str
    optimizer: str
    data_state: dict[str, Any]
    ema_decay: float = 0.0  # older versions did not average
    precision: str = ""  # what engine.precision came to; empty in the DONE marker of an older version
    job: dict[str, Any] = field(default_factory=dict)  # all of it, resolved; older versions did not record it


def saved_job(manifest: Manifest) -> SavedJob:
    """The job behind a checkpoint."""
    record = manifest.record
    return SavedJob(
        step=manifest.id.step,
        model=record["model"],
        loss=record["loss"],
        optimizer=record["optimizer"],
        data_state=manifest.data_state,
        ema_decay=record.get("ema_decay", record.get("average_factor", 0.0)),  # its name in older versions
        precision=record.get("engine", {}).get("precision", ""),
        job=record.get("job", {}),
    )


def will_compile(config: EngineConfig, device: torch.device) -> bool:
    """Whether a run on this device compiles its blocks: as asked, "auto" where it works. UserError where "on" fails."""
    is_wanted = config.compile == "on" or (config.compile == "auto" and device.type == "cuda" and config.zero_stage < 3)
    # torch proposes TF32 to whoever compiles: bf16 runs have no use for it, and fp32 runs asked for better.
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
    """Whether every rank compiles, where this one would or not: else none does, so that all compute the same way."""
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
    """The job with its precision decided: the checkpoint's where "auto" continues from one. `say`: log it and why."""
    recorded = saved_job(manifest).precision if manifest else ""
    choice = choose_precision(job.engine.precision, recorded=recorded, bf16=bf16)
    if say and choice.message:
        log.log(logging.WARNING if choice.is_warning else logging.INFO, choice.message)
    return replace(job, engine=replace(job.engine, precision=choice.precision))


def starting_model(job: TrainingJob, *, is_compiled: bool) -> Model:
    """The job's model with weights that mean nothing yet, its blocks run as the job asks."""
    model = unfilled_model(job.model)
    if is_compiled:
        compile_blocks(model)
    if job.engine.activation_checkpointing:
        checkpoint_blocks(model)
    return model


def starting_weights(job: TrainingJob) -> TensorByName:
    """Tensor by name for a run without a checkpoint: fitted weights where the job names some, else initial ones."""

    shapes = shapes_of(job.model)

    def scratch(name: str) -> Any:
        return initial_tensor(name, shapes[name], seed=job.seed, position_std=job.model.position_std)

    if not job.initial.weights:
        return scratch
    return fit_weights(open_weights(job.initial.weights), job.model, initial=scratch, new_head=job.initial.new_head)


def fill_from_weights(engine: Engine, tensor: TensorByName) -> None:
    """Puts unrounded fp32 values into the masters (DeepSpeed made them from its bf16 copy)."""

    def fill(fragment: Fragment, slot: str) -> None:
        flat = tensor(fragment.name).flatten()
        fragment.slots[slot].copy_(flat[fragment.start : fragment.start + fragment.length])

    engine.load(fill, moments=[], num_updates=0)


def fill_from_checkpoint(engine: Engine, checkpoints: Checkpoints, manifest: Manifest) -> None:
    """Masters and moments from the fragments of any world and stage."""

    def fill(fragment: Fragment, slot: str) -> None:
        checkpoints.load(manifest, fragment, slot)

    engine.load(fill, moments=list(manifest.moments), num_updates=manifest.num_updates)
    checkpoints.loaded()


def refuse_changes(
    saved: SavedJob, *, data_state: dict[str, Any], job: TrainingJob, is_done: bool = False, extend: bool = False
) -> None:
    """A continued run must be the same run, and a finished one the one that is asked for; UserError names what differs.

    Ranks and the engine may change (stage, precision, compilation, checkpointing): they change results to rounding.
    """
    before = {
        "model": asdict(ModelConfig(**saved.model)),  # fields that an older version had not are at their defaults
        "loss": saved.loss,
        "optimizer": {"name": saved.optimizer},
        "ema_decay": saved.ema_decay,
    }
    now = {
        "model": asdict(job.model),
        "loss": job.loss,
        "optimizer": {"name": job.optimizer.name},
        "ema_decay": job.ema_decay,
    }
    changed = differences(before, now)
    others = other_values(saved.job, asdict(job), is_done=is_done)
    changed += [change for change in others if change.field not in flattened(before)]
    changed += changes(saved.data_state, data_state, allow_other_decoder=job.data.allow_other_decoder)
    _refuse_other_steps(saved, job, extend=extend, others=changed)
    if changed:
        hint = "; --data.allow-other-decoder accepts other versions" if any(map(is_of_decoder, changed)) else ""
        ended = "holds a run that finished with other values"
        how = ended if is_done else "holds a run that cannot be continued with other values"
        raise UserError(f"{job.run_dir} {how}:\n{as_lines(changed)}\nUse the same values, or another --run-dir{hint}")


def _refuse_other_steps(saved: SavedJob, job: TrainingJob, *, extend: bool, others: Sequence[Difference]) -> None:
    """`others` are said too, but not the warm-up: it follows the steps, and --extend keeps it."""
    before = saved.job.get(STEPS, job.steps)  # older versions did not record it
    if saved.step > job.steps:
        raise UserError(
            f"{job.run_dir} has {saved.step} steps already, --steps is {job.steps}; give {saved.step} or more, "
            "or another --run-dir"
        )
    if job.steps == before or (job.steps > before and extend):
        return
    hint = "; to continue it with more steps, add --extend" if job.steps > before else ""
    other_steps = Difference(field=STEPS, before=before, now=job.steps)
    changed = [other_steps, *(other for other in others if other.field != _WARMUP)]
    raise UserError(
        f"{job.run_dir} holds a run of another length:\n{as_lines(changed)}\n"
        f"The learning rate depends on it. Use the same value, or another --run-dir{hint}"
    )

"""Where a run starts: its own newest checkpoint, named weights, or scratch; and what must still be the same."""

import logging
from dataclasses import asdict
from typing import Any

from pipeline.models import ModelConfig
from pipeline.models.initial import initial_tensor
from pipeline.models.vit import shapes_of
from pipeline.models.weights import TensorByName, fit_weights, open_weights
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.config import TrainingJob
from pipeline.training.engine import Engine
from pipeline.training.manifest import Manifest
from pipeline.training.zero_state import Fragment
from shards.errors import UserError

log = logging.getLogger(__name__)


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


def refuse_changes(manifest: Manifest, *, data_state: dict[str, Any], model: ModelConfig, run_dir: str) -> None:
    """A continued run must read the same batches into the same model; UserError names what differs."""
    saved_model: dict[str, Any] = manifest.record["model"]
    pairs = [(f"model.{key}", saved_model.get(key), value) for key, value in asdict(model).items()]
    pairs += [(f"data: {key}", manifest.data_state.get(key), value) for key, value in data_state.items()]
    changed = [f"{name} was {before!r}, now {now!r}" for name, before, now in pairs if before != now]
    if changed:
        raise UserError(
            f"{run_dir} holds a run that can not be continued like this: {'; '.join(changed)}. "
            "Use the same values, or another --run-dir"
        )

"""The end of a run: its weights, and the marker RUN/DONE that vouches for them."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pipeline.data.position import StreamPosition
from pipeline.models.usage import Usage
from pipeline.models.weights import save_weights
from pipeline.training.checkpoint import read_tensor
from pipeline.training.config import TrainingJob
from pipeline.training.manifest import Manifest
from pipeline.training.saved_job import STEPS, SavedJob, position_of_format_1, saved_job_of_format_1
from pipeline.training.zero_state import AVERAGE, MASTER
from shards.store import Store


@dataclass(frozen=True, kw_only=True)
class Done:
    """The DONE marker: the last checkpoint, with its position and job as in its manifest, and the sha256 of the weights
    made from it."""

    step: int
    checkpoint: str
    weights_sha256: str
    position: StreamPosition
    job: SavedJob


_DONE = TypeAdapter(Done)


def read_done(run_dir: Path) -> Done | None:
    """The DONE marker, if the weights beside it are those that it vouches for."""
    try:
        done = done_from_json((run_dir / "DONE").read_text())
        digest = _sha256(run_dir / "weights" / "model.safetensors")
    except (OSError, ValueError):
        return None
    return done if done.weights_sha256 == digest else None


def done_to_json(done: Done) -> str:
    """One line of JSON."""
    return _DONE.dump_json(done).decode()


def done_from_json(text: str) -> Done:
    """The marker, also one of an older version. ValueError if it is none."""
    values = json.loads(text)
    try:
        if "position" not in values:
            values |= _from_format_1(values["job"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no DONE marker: {error}") from error
    return _DONE.validate_json(json.dumps(values))


def _from_format_1(saved: dict[str, Any]) -> dict[str, Any]:
    """Position and job out of the one field that held both. A marker that has no job knows its length at least."""
    job = saved_job_of_format_1(saved)
    position = position_of_format_1(saved, saved["data_state"], step=saved["step"])
    return {"position": position, "job": job | {"job": job["job"] or {STEPS: saved["step"]}}}


def finish(run_dir: Path, job: TrainingJob, manifest: Manifest, *, store: Store, labels: tuple[str, ...]) -> None:
    """Weights from the final checkpoint (any ZeRO stage), averaged ones if the job averages, then the DONE marker."""
    folder = run_dir / "weights"
    slot = AVERAGE if job.ema_decay else MASTER
    save_weights(
        folder,
        config=job.model,
        labels=labels,
        tensor=lambda name: read_tensor(store, manifest, name, slot=slot),
        usage=Usage(loss=job.loss, transform=job.evaluation.transform),
    )
    done = Done(
        step=manifest.id.step,
        checkpoint=manifest.id.folder,
        weights_sha256=_sha256(folder / "model.safetensors"),
        position=manifest.position,
        job=manifest.job,
    )
    waiting = run_dir / "DONE.part"
    waiting.write_text(done_to_json(done) + "\n")
    waiting.replace(run_dir / "DONE")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

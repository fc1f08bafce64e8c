"""The end of a run: its weights, and the marker RUN/DONE that vouches for them."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pipeline.models.usage import Usage
from pipeline.models.weights import save_weights
from pipeline.training.checkpoint import read_tensor
from pipeline.training.config import TrainingJob
from pipeline.training.manifest import Manifest
from pipeline.training.same_run import STEPS
from pipeline.training.start import SavedJob, saved_job
from pipeline.training.zero_state import AVERAGE, MASTER
from shards.store import Store


def read_done(run_dir: Path) -> dict[str, Any] | None:
    """The DONE marker, where the weights that it vouches for are the ones that lie there; else None."""
    try:
        marker: dict[str, Any] = json.loads((run_dir / "DONE").read_text())
        digest = _sha256(run_dir / "weights" / "model.safetensors")
        SavedJob(**marker["job"])
        return marker if marker["weights_sha256"] == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def job_of(marker: dict[str, Any]) -> SavedJob:
    """The job that a marker is of. One of an older version has no more of it than its length."""
    saved = SavedJob(**marker["job"])
    return saved if saved.job else replace(saved, job={STEPS: saved.step})


def finish(run_dir: Path, job: TrainingJob, manifest: Manifest, *, store: Store, labels: tuple[str, ...]) -> None:
    """Weights out of the final checkpoint (any ZeRO stage), averaged ones where the job asks, then the DONE marker."""
    folder = run_dir / "weights"
    slot = AVERAGE if job.ema_decay else MASTER
    save_weights(
        folder,
        config=job.model,
        labels=labels,
        tensor=lambda name: read_tensor(store, manifest, name, slot=slot),
        usage=Usage(loss=job.loss, transform=job.evaluation.transform),
    )
    digest = _sha256(folder / "model.safetensors")
    saved = asdict(saved_job(manifest))
    marker = {"step": manifest.id.step, "checkpoint": manifest.id.folder, "weights_sha256": digest, "job": saved}
    waiting = run_dir / "DONE.part"
    waiting.write_text(json.dumps(marker) + "\n")
    waiting.replace(run_dir / "DONE")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

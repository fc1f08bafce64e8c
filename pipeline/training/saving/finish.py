"""The end of a run: its weights, and the marker RUN/DONE that vouches for them."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter

from pipeline.checkpoints.manifest import Manifest
from pipeline.checkpoints.rank_file_in import RankFiles
from pipeline.checkpoints.saved_job import STEPS, SavedJob, position_of_format_1, saved_job_of_format_1
from pipeline.data.position import StreamPosition
from pipeline.training.saving.taken_weights import save_checkpoint_weights
from pipeline.training.settings.job import TrainingJob
from shards.errors import InvalidDataError
from shards.files.json_lines import write_whole
from shards.files.seal import sealed, unsealed
from shards.files.typed_json import parse_json
from shards.local_file import open_local_file, read_local_text
from shards.store import Store

_MOST_BYTES = 16 << 20  # of the marker


@dataclass(frozen=True, kw_only=True)
class Done:
    """The DONE marker: the last checkpoint, with its position and job as in its manifest, and the sha256 of the weights
    made from it."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: Annotated[int, Field(ge=0)]
    checkpoint: str
    weights_sha256: str
    position: StreamPosition
    job: SavedJob


_DONE = TypeAdapter(Done)


def read_done(run_dir: Path) -> Done | None:
    """The DONE marker, if the weights beside it are those that it vouches for."""
    try:
        done = done_from_json(read_local_text(run_dir / "DONE", most_bytes=_MOST_BYTES))
        digest = _sha256(run_dir / "weights" / "model.safetensors")
    except (OSError, ValueError, InvalidDataError):
        return None
    return done if done.weights_sha256 == digest else None


def done_to_json(done: Done) -> str:
    """One line of JSON, with a digest of itself."""
    return sealed(_DONE.dump_json(done)).decode()


def done_from_json(text: str) -> Done:
    """The marker, also one of an older version. ValueError if it is none."""
    values = parse_json(text)
    try:
        if "digest" in values:
            return _DONE.validate_json(unsealed(text.encode()))
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
    save_checkpoint_weights(folder, job, manifest, files=RankFiles(store, manifest), labels=labels)
    done = Done(
        step=manifest.id.step,
        checkpoint=manifest.id.folder,
        weights_sha256=_sha256(folder / "model.safetensors"),
        position=manifest.position,
        job=manifest.job,
    )
    write_whole(run_dir / "DONE", done_to_json(done).encode())


def _sha256(path: Path) -> str:
    with open_local_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

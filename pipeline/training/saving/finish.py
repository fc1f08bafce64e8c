"""Makes weights from checkpoints, at the end of a run or from any checkpoint of a running one, and writes the marker
RUN/DONE.

The marker holds the digest of the weights in RUN/weights.
"""

import hashlib
import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter

from pipeline.checkpoints.manifest import AVERAGE, MASTER, CheckpointId, CheckpointManifest, SavedJob
from pipeline.checkpoints.rank_file_in import RankFiles, RetiredError, open_checkpoint, refuse_retired, tensors_in_order
from pipeline.checkpoints.stored import CheckpointChoice, chosen, standing_in
from pipeline.data.position import StreamPosition
from pipeline.data.training_data import open_training_data
from pipeline.models.build import shapes_of
from pipeline.models.config import ModelConfig
from pipeline.models.masked import output_names
from pipeline.models.weights.folder import save_weights
from pipeline.models.weights.usage import Usage
from pipeline.training.reporting.ledger import last_saved
from pipeline.training.settings.job import TrainingJob
from shards.errors import InvalidDataError, StorageError, UserError, disk_fault
from shards.files.local_files import open_local_file, read_local_text, write_whole
from shards.files.looks import patiently
from shards.files.typed_json import sealed, unsealed
from shards.store import Store

log = logging.getLogger(__name__)
_MOST_LISTINGS = 5  # how many times to list the store if the run deletes checkpoints before they are read
Labels = tuple[str, ...]
_MOST_BYTES = 16 << 20  # largest marker that is read


@dataclass(frozen=True, kw_only=True)
class TakenRun:
    """A run from which weights are taken. `labels_for`: returns the names of the classes for a checkpoint's
    manifest."""

    run_dir: Path
    job: TrainingJob
    store: Store
    labels_for: Callable[[CheckpointManifest], Labels]


def save_checkpoint_weights(
    folder: Path,
    job: TrainingJob,
    manifest: CheckpointManifest,
    *,
    files: RankFiles,
    labels: Labels,
    is_raw: bool = False,
) -> None:
    """Writes a weights folder from a checkpoint of any ZeRO stage: the averaged weights if the job averages them and
    `is_raw` is False, else the raw ones. Settings that no tensor shows, such as the head's constant, come from the
    checkpoint, because job.yaml may have been edited since. Raises InvalidDataError if the checkpoint has other tensors
    than the job's model."""
    if {name: tensor.shape for name, tensor in manifest.tensors.items()} != dict(shapes_of(job.model)):
        raise InvalidDataError(f"{manifest.id.folder} has other tensors than the model in the run's job.yaml")
    slot = AVERAGE if job.ema_decay and not is_raw else MASTER
    save_weights(
        folder,
        config=ModelConfig(**manifest.job.model),
        labels=output_names(job.model) if job.model.masked_patches else labels,
        tensor=tensors_in_order(files, manifest, slot=slot),
        usage=Usage(loss=job.loss, transform=job.evaluation.transform),
    )


def take_weights(folder: Path, source: TakenRun, *, choice: CheckpointChoice, is_raw: bool) -> CheckpointId:
    """Writes the weights of a checkpoint, completely or not at all, and returns which checkpoint it was. Takes the
    first of the chosen checkpoints that can be used, newest first. Raises UserError or InvalidDataError if there is
    none."""
    for _ in range(_MOST_LISTINGS):
        standing = standing_in(source.store, recorded=last_saved(source.run_dir))
        candidates = chosen(choice, standing, run_dir=source.run_dir, url=source.store.url)
        found, is_again = _take_first(folder, source, candidates, choice=choice, is_raw=is_raw)
        if found:
            return found
        if not is_again:
            raise InvalidDataError(
                f"none of the {len(candidates)} checkpoints in {source.store.url} can be used (see above); "
                "give another run"
            )
    stop = shlex.quote(str(source.run_dir / "STOP"))
    raise UserError(
        f"the run in {str(source.run_dir)!r} deletes its checkpoints faster than they are read; raise "
        f"--checkpoint.keep-newest when it next resumes, or ask it to stop (touch {stop})"
    )


def _take_first(
    folder: Path, source: TakenRun, candidates: list[CheckpointId], *, choice: CheckpointChoice, is_raw: bool
) -> tuple[CheckpointId | None, bool]:
    """Writes the weights of the first checkpoint that can be used. Returns that checkpoint, if any, and whether to list
    the store again."""
    is_again = False
    for candidate in candidates:
        try:
            _take(folder, source, candidate, is_raw=is_raw)
        except RetiredError as error:
            if choice.is_of_one:
                raise UserError(f"{error}: the run goes on, and keeps others; give another --step") from error
            log.warning("%s; taking a newer one", error)
            is_again = True
            break
        except InvalidDataError as error:
            if choice.is_of_one:
                raise InvalidDataError(
                    f"checkpoint {candidate.folder} cannot be used: {error}; give another"
                ) from error
            log.warning("skipping checkpoint %s: %s", candidate.folder, error)
        else:
            return candidate, False
    return None, is_again


def _take(folder: Path, source: TakenRun, checkpoint: CheckpointId, *, is_raw: bool) -> None:
    manifest, files = open_checkpoint(source.store, checkpoint)
    try:
        save_checkpoint_weights(
            folder, source.job, manifest, files=files, labels=source.labels_for(manifest), is_raw=is_raw
        )
    except StorageError:  # parts that were verified but not kept in memory are read again
        refuse_retired(source.store, checkpoint)
        raise


def labels_of_data(job: TrainingJob, manifest: CheckpointManifest) -> Labels:
    """Returns the names of the classes, from the dataset that the run was trained on. Raises UserError if that dataset
    cannot be opened or has changed."""
    todo = "give the names of the run's classes as --labels-file FILE, one per line"
    try:
        data = open_training_data(job.data)
        names = data.label_names
    except UserError as error:
        raise UserError(f"the run's dataset cannot be opened ({error}); {todo}") from error
    fingerprints = data.fingerprints
    if manifest.position.dataset not in (fingerprints, *fingerprints[: len(fingerprints) == 1]):
        raise UserError(f"{data.url} is not the dataset that the run was trained on: it was packed again; {todo}")
    return names


@dataclass(frozen=True, kw_only=True)
class Done:
    """The DONE marker: the last checkpoint, the position and the job in its manifest, and the sha256 of the weights
    made from it."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    step: Annotated[int, Field(ge=0)]
    checkpoint: str
    weights_sha256: str
    position: StreamPosition
    job: SavedJob


_DONE = TypeAdapter(Done)


def read_done(run_dir: Path) -> Done | None:
    """Reads the DONE marker. Returns None if it is missing or damaged, or if the weights beside it have another digest.
    Raises OSError if the disk fails for minutes, since that says nothing about the marker."""
    path, weights = run_dir / "DONE", run_dir / "weights" / "model.safetensors"
    try:
        done = done_from_json(patiently(path, lambda: read_local_text(path, most_bytes=_MOST_BYTES)))
        digest = patiently(weights, lambda: _sha256(weights))
    except (OSError, ValueError, InvalidDataError) as error:
        if disk_fault(error):
            raise
        return None
    return done if done.weights_sha256 == digest else None


def done_to_json(done: Done) -> str:
    """Returns the marker as one line of JSON, with a digest of that line."""
    return sealed(_DONE.dump_json(done)).decode()


def done_from_json(text: str) -> Done:
    """Parses the marker. Raises ValueError if it has another form, or if its digest is wrong."""
    return _DONE.validate_json(unsealed(text.encode()))


def finish(
    run_dir: Path, job: TrainingJob, manifest: CheckpointManifest, *, store: Store, labels: tuple[str, ...]
) -> None:
    """Writes the weights of the final checkpoint (averaged ones if the job averages them), then the DONE marker."""
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

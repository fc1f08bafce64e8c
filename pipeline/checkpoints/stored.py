"""The checkpoints of a run as a command sees them that only reads, alone, maybe while the run goes on and retires them.

Which of them stand is decided as the run itself decides it (attempts.py).
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pipeline.checkpoints.attempts import FAULTS, list_committed, read_attempts, standing_checkpoints
from pipeline.checkpoints.best import FILE_NAME, read_best
from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId, CheckpointManifest, manifest_from_json
from pipeline.checkpoints.rank_file_in import RankFiles
from shards.config_values import Range
from shards.errors import InvalidDataError, UserError
from shards.store import Store

_MOST_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class CheckpointChoice:
    """Which checkpoint: that of a step, or the one that RUN/best.json names, or else the newest."""

    step: Annotated[int, Range(0)] = 0
    is_best: bool = False

    @property
    def is_of_one(self) -> bool:
        """Whether no other checkpoint will do."""
        return self.is_best or self.step > 0


class RetiredError(Exception):
    """A checkpoint was deleted while it was read."""


def standing_in(store: Store, *, recorded: CheckpointId | None) -> list[CheckpointId]:
    """The standing checkpoints, newest first. `recorded`: the one in the last line of the run's ledger, which counts if
    it is there, whether it is listed or not."""
    if recorded and not store.exists(f"{recorded.folder}/{MANIFEST_NAME}"):
        recorded = None
    attempts = read_attempts(store, recorded=recorded)
    return standing_checkpoints(list_committed(store, recorded=recorded), attempts)


def chosen(choice: CheckpointChoice, standing: list[CheckpointId], *, run_dir: Path, url: str) -> list[CheckpointId]:
    """The checkpoints to take, the first that can be used; at least one. UserError if there is none such.

    `url`: where the run's checkpoints are.
    """
    if not standing:
        raise UserError(
            f"{str(run_dir)!r} has no committed checkpoint in {url}: the run has not saved yet, or they were moved; "
            f"wait for the first one (touch {shlex.quote(str(run_dir / 'SAVE'))} asks for it), or give another run"
        )
    if choice.is_best:
        return [_best_of(standing, run_dir)]
    if not choice.step:
        return standing
    found = [each for each in standing if each.step == choice.step]
    if not found:
        raise UserError(f"no checkpoint of step {choice.step} is in {url}; {steps_shown(standing)}")
    return found[:1]


def steps_shown(standing: list[CheckpointId]) -> str:
    """Which steps there are, in words."""
    shown = ", ".join(str(each.step) for each in standing[:_MOST_SHOWN])
    more = f" and {len(standing) - _MOST_SHOWN} older ones" if len(standing) > _MOST_SHOWN else ""
    return f"there are those of steps {shown}{more}" if len(standing) > 1 else f"there is only that of step {shown}"


def _best_of(standing: list[CheckpointId], run_dir: Path) -> CheckpointId:
    best = read_best(run_dir)
    if best is None:
        raise UserError(
            f"{run_dir / FILE_NAME} is missing: a run names its best checkpoint once it was evaluated "
            f"(--evaluation.url) with --checkpoint.keep-best; leave out --best, or give --step; {steps_shown(standing)}"
        )
    if best.id not in standing:
        raise UserError(
            f"{run_dir / FILE_NAME} names {best.checkpoint}, which is not there any more; {steps_shown(standing)}: "
            "give one of them as --step"
        )
    return best.id


def open_checkpoint(store: Store, checkpoint: CheckpointId) -> tuple[CheckpointManifest, RankFiles]:
    """A checkpoint whose every file has the bytes that its manifest promises.

    InvalidDataError if one has not, and RetiredError if the checkpoint is no longer there.
    """
    try:
        manifest = manifest_from_json(store.read(f"{checkpoint.folder}/{MANIFEST_NAME}"))
        if manifest.id != checkpoint:
            raise ValueError(f"its manifest is that of {manifest.id.folder}")
        files = RankFiles(store, manifest)
        for name in sorted(manifest.files):
            files.verify(name)
    except FAULTS as error:
        refuse_retired(store, checkpoint)
        raise InvalidDataError(str(error)) from error
    return manifest, files


def refuse_retired(store: Store, checkpoint: CheckpointId) -> None:
    """RetiredError if a checkpoint is not there any more: manifests are the first to be deleted."""
    if not store.exists(f"{checkpoint.folder}/{MANIFEST_NAME}"):
        raise RetiredError(f"checkpoint {checkpoint.folder} was deleted while it was read")

"""Chooses a stored checkpoint for a command that only reads: the newest, the checkpoint of a given step, or the best.

The run may still be active and delete checkpoints in the meantime. The checkpoints that count are the ones that the run
itself would count (attempts.py).

RUN/best.json names the checkpoint with the best score on the held-out dataset. The file is written after that
checkpoint's commit, as a whole or not at all. If a run is killed, the file may be one evaluation behind, and the store
may have lost the checkpoint that it names. So readers check that the checkpoint exists.
"""

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pipeline.checkpoints.attempts import list_committed, read_attempts, standing_checkpoints
from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId, id_from_path
from shards.config_values import Range, shown_value
from shards.errors import InvalidDataError, UserError, disk_fault
from shards.files.local_files import read_local_file, write_whole
from shards.files.looks import patiently
from shards.files.typed_json import read_record, sealed, unsealed
from shards.store import Store

FILE_NAME = "best.json"
_MOST_BYTES = 1 << 16
_MOST_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Best:
    """A checkpoint's folder, relative to the root of the checkpoints, and its scores on the held-out dataset with the
    fingerprint `dataset`. Raises ValueError if the folder does not belong to a checkpoint of this step."""

    step: Annotated[int, Range(1)]
    checkpoint: str
    accuracy: Annotated[float, Range(0, 1)]
    loss: float
    images: Annotated[int, Range(1)]
    dataset: str

    def __post_init__(self) -> None:
        if self.id.step != self.step:
            raise ValueError(f"checkpoint is {shown_value(self.checkpoint)}; allowed: one of step {self.step}")

    @property
    def id(self) -> CheckpointId:
        """The id of the checkpoint. Raises ValueError if the folder does not belong to a checkpoint."""
        found = id_from_path(f"{self.checkpoint}/{MANIFEST_NAME}")
        if found is None:
            raise ValueError(f"checkpoint is {shown_value(self.checkpoint)}; allowed: step-N/attempt-TOKEN")
        return found

    def is_better_than(self, other: "Best") -> bool:
        """Returns whether this checkpoint has a higher accuracy than the other or, at the same accuracy, a lower
        loss."""
        return (self.accuracy, -self.loss) > (other.accuracy, -other.loss)


def read_best(run_dir: Path) -> Best | None:
    """Returns the content of RUN/best.json; None if there is no such file. Raises InvalidDataError if it is damaged."""
    path = run_dir / FILE_NAME
    try:
        data = patiently(path, lambda: read_local_file(path, most_bytes=_MOST_BYTES))
        return read_record(Best, unsealed(data))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InvalidDataError) as error:
        if disk_fault(error):
            raise
        raise InvalidDataError(f"{path} cannot be read ({error})") from error


def write_best(run_dir: Path, best: Best) -> None:
    """Writes RUN/best.json. If that fails, the file is as it was before."""
    write_whole(run_dir / FILE_NAME, sealed(json.dumps(asdict(best), allow_nan=False).encode()))


@dataclass(frozen=True, kw_only=True)
class CheckpointChoice:
    """The choice of a checkpoint: by its step, as the best one (RUN/best.json), or by default the newest."""

    step: Annotated[int, Range(0)] = 0
    is_best: bool = False

    @property
    def is_of_one(self) -> bool:
        """Whether the choice allows exactly one checkpoint."""
        return self.is_best or self.step > 0


def standing_in(store: Store, *, recorded: CheckpointId | None) -> list[CheckpointId]:
    """Returns the standing checkpoints, newest first. `recorded`: the checkpoint in the last line of the run's ledger,
    which counts if its manifest exists, even if it is not listed."""
    if recorded and not store.exists(f"{recorded.folder}/{MANIFEST_NAME}"):
        recorded = None
    attempts = read_attempts(store, recorded=recorded)
    return standing_checkpoints(list_committed(store, recorded=recorded), attempts)


def chosen(choice: CheckpointChoice, standing: list[CheckpointId], *, run_dir: Path, url: str) -> list[CheckpointId]:
    """Returns the checkpoints to try, in this order; at least one. Raises UserError if there is none. `url`: where the
    run's checkpoints are."""
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
    """Returns a text that says which steps have a checkpoint."""
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

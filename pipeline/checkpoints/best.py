"""RUN/best.json: the checkpoint with the best score on the held-out dataset, so that people and commands find it.

It is written after that checkpoint's commit, whole or not at all. A killed run may leave it one evaluation behind, and
a store may have lost what it names: who reads it checks that the checkpoint is there.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pipeline.checkpoints.manifest import MANIFEST_NAME, CheckpointId, id_from_path
from shards.errors import InvalidDataError
from shards.files.local_files import read_local_file, write_whole
from shards.files.typed_json import read_record, sealed, unsealed
from shards.schema.config_values import Range, shown_value

FILE_NAME = "best.json"
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Best:
    """A checkpoint's folder below the checkpoints' root, and its scores on the held-out dataset with the fingerprint
    `dataset`. ValueError if the folder is not that of a checkpoint of this step."""

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
        """The id of the checkpoint. ValueError if the folder is not that of a checkpoint."""
        found = id_from_path(f"{self.checkpoint}/{MANIFEST_NAME}")
        if found is None:
            raise ValueError(f"checkpoint is {shown_value(self.checkpoint)}; allowed: step-N/attempt-TOKEN")
        return found

    def is_better_than(self, other: "Best") -> bool:
        """Whether it has a higher accuracy or, at the same accuracy, a lower loss."""
        return (self.accuracy, -self.loss) > (other.accuracy, -other.loss)


def read_best(run_dir: Path) -> Best | None:
    """What RUN/best.json names; None if there is no such file. InvalidDataError if it is damaged, or does not have the
    digest that it carries."""
    path = run_dir / FILE_NAME
    try:
        data = read_local_file(path, most_bytes=_MOST_BYTES)
        return read_record(Best, unsealed(data))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InvalidDataError) as error:
        raise InvalidDataError(f"{path} cannot be read ({error})") from error


def write_best(run_dir: Path, best: Best) -> None:
    """RUN/best.json, whole or as it was before."""
    write_whole(run_dir / FILE_NAME, sealed(json.dumps(asdict(best), allow_nan=False).encode()))

"""How weights are used: the meaning of their logits, and how images are prepared for them. Kept in config.json."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config_values import LossName
from pipeline.evaluation_transform import EvaluationTransform
from shards.errors import UserError
from shards.files.typed_json import parse_json, record_from
from shards.local_file import read_local_file
from shards.schema.config_values import refuse_wrong_values

_MOST_BYTES = 64 << 20  # of a config.json, which names the classes


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How to read logits and prepare images. Weights that do not say, of other libraries and of older runs, get the
    defaults."""

    loss: LossName = "softmax"
    """Loss of the training: softmax probabilities add up to 1 over all classes, sigmoid ones stand alone."""
    transform: EvaluationTransform = EvaluationTransform()
    """How the run's own evaluation prepares images."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="usage.")


DEFAULT_USAGE = Usage()


def read_usage(path: Path) -> Usage:
    """What the config.json of a weights folder, or of the one in a run directory, says. The defaults if there is none,
    or it cannot be read: whoever opens the weights says why."""
    for folder in (path, path / "weights"):
        with suppress(OSError, ValueError, UserError):
            description = parse_json(read_local_file(folder / "config.json", most_bytes=_MOST_BYTES))
            if isinstance(description, dict):
                return usage_of(description)
    return DEFAULT_USAGE


def usage_of(description: Mapping[str, Any]) -> Usage:
    """What a config.json says under "usage". Raises ValueError or UserError if it is invalid."""
    said = description.get("usage")
    if said is None:
        return Usage()
    try:
        return record_from(Usage, said, where="usage.")
    except UserError as error:
        raise UserError(f"usage.{error}") from error

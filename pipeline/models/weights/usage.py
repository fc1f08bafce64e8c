"""How weights are used: the meaning of their logits, and how images are prepared for them. Kept in config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config_values import LossName
from pipeline.evaluation_transform import EvaluationTransform
from shards.errors import UserError
from shards.files.typed_json import record_from
from shards.schema.config_values import refuse_wrong_values


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How to read logits and prepare images. Weights of other libraries, which do not say, get the
    defaults."""

    loss: LossName = "softmax"
    """Loss of the training: softmax probabilities add up to 1 over all classes, sigmoid ones stand alone."""
    transform: EvaluationTransform = EvaluationTransform()
    """How the run's own evaluation prepares images."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="usage.")


DEFAULT_USAGE = Usage()


def usage_of(description: Mapping[str, Any]) -> Usage:
    """What a config.json says under "usage". Raises ValueError or UserError if it is invalid."""
    said = description.get("usage")
    if said is None:
        return Usage()
    try:
        return record_from(Usage, said, where="usage.")
    except UserError as error:
        raise UserError(f"usage.{error}") from error

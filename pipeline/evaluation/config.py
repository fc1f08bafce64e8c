"""What to evaluate on, and how images are prepared for it. Loads no torch: the command line reads it."""

from dataclasses import dataclass
from typing import Annotated

from pipeline.evaluation_transform import EvaluationTransform
from shards.config_values import Range, refuse_wrong_values


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What to evaluate on, and how often."""

    url: str = ""
    """Dataset to evaluate on: a folder or s3://bucket/prefix; in training, empty: no evaluation."""
    every_steps: Annotated[int, Range(0, zero="only at the end")] = 0
    """Steps between two evaluations during training; 0: only at the end."""
    batch_size: Annotated[int, Range(1)] = 100
    """Images per batch on each rank."""
    transform: EvaluationTransform = EvaluationTransform()
    """How images are brought to the model's size."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="evaluation.")

"""What to evaluate on, and how images are prepared for it. Loads no torch: the command line reads it."""

from dataclasses import dataclass

from pipeline.evaluation_transform import EvaluationTransform
from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What to evaluate on, and how often."""

    url: str = ""
    """Dataset to evaluate on: a folder or s3://bucket/prefix; in training, empty means that nothing is evaluated."""
    every_steps: int = 0
    """Steps between two evaluations during training; 0: only at the end."""
    batch_size: int = 100
    """Images per batch, on each rank."""
    transform: EvaluationTransform = EvaluationTransform()

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.every_steps < 0:
            raise UserError(f"allowed are a batch_size of 1 or more and every_steps of 0 or more: {self}")

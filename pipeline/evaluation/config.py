"""What to evaluate on, and how images are prepared for it. Loads no torch: the command line reads it."""

from dataclasses import dataclass

from pipeline.data.config import EvaluationTransform
from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What to evaluate on. `every_steps` 0: only at the end of training; `url` empty: never."""

    url: str = ""
    every_steps: int = 0
    batch_size: int = 100
    transform: EvaluationTransform = EvaluationTransform()

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.every_steps < 0:
            raise UserError(f"allowed are a batch_size of 1 or more and every_steps of 0 or more: {self}")

"""How images are prepared for an evaluation. Weights keep it, too: models and data both import this module.

Loads no torch: the command line reads it.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from shards.config_values import Range, refuse_wrong_values


@dataclass(frozen=True, kw_only=True)
class EvaluationTransform:
    """How an image is brought to the model's size, with nothing random."""

    mode: Literal["resize", "central_crop"] = "resize"
    """resize: straight to the model's size; central_crop: resize the short side, then cut out the centre."""
    short_side: Annotated[int, Range(0, zero="256/224 of the model's size")] = 0
    """Pixels of the short side before a central crop; at least the model's size; 0: 256/224 of it, the paper's
    proportion."""
    antialias: bool = False
    """Average over all pixels that an output pixel covers, as in training."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="transform.")

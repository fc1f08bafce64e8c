"""What becomes different when weights are converted, and the formats they are written in. Loads no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pipeline.models.config import Mode
from shards.config_values import Range, refuse_wrong_values

Format = Literal["patchline", "vision_transformer", "big_vision", "timm", "hugging_face"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """What becomes different on the way. Without `new_head`, a head that does not fit is refused."""

    image_size: Annotated[int, Range(1)] | None = None
    """Image size in pixels that position embeddings are resampled for; none: as it is."""
    num_classes: Annotated[int, Range(1)] | None = None
    """Classes of the new head; none: as many as the old one has."""
    new_head: bool = False
    """Drop the head, and the hidden layer before it, for a head of zeros."""
    resample: Mode = "paper"
    """How position embeddings are resampled: the paper's way, bicubic, or timm's."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")

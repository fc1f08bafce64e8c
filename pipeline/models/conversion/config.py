"""What changes when weights are converted, and the formats to write them in. Loads no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pipeline.models.config import MOST_CLASSES, MOST_PIXELS, Mode
from shards.config_values import Range, refuse_wrong_values

PixelName = Literal["paper", "imagenet", "clip"]
Take = Literal["raw", "averaged"]
Format = Literal["patchline", "vision_transformer", "big_vision", "timm", "hugging_face"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """Changes to make to the weights. Without `new_head`, a head that does not fit is refused."""

    image_size: Annotated[int, Range(1, MOST_PIXELS)] | None = None
    """Image size in pixels that position embeddings are resampled for; none: unchanged."""
    num_classes: Annotated[int, Range(1, MOST_CLASSES)] | None = None
    """Classes of the new head; none: as many as the old one has."""
    new_head: bool = False
    """Replace the head, and the hidden layer before it, with a linear head of zeros."""
    resample: Mode = "paper"
    """How position embeddings are resampled: the paper's way, bicubic, or timm's."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")

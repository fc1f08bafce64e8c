"""The settings of `import` and `export`: hints, changes and formats. This module does not import torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pipeline.models.config import (
    MOST_CLASSES,
    MOST_PIXELS,
    Gelu,
    Mode,
    ResNetEpsilons,
)
from shards.config_values import Range, refuse_wrong_values

PixelName = Literal["paper", "imagenet", "clip"]
Take = Literal["raw", "averaged"]
Format = Literal["patchline", "vision_transformer", "big_vision", "timm", "hugging_face"]
Pair = tuple[int, int]  # height, width


@dataclass(frozen=True, kw_only=True)
class Change:
    """Changes to make to the weights. Without `new_head`, a head that does not fit is refused."""

    image_size: Annotated[int, Range(1, MOST_PIXELS)] | None = None
    """Image size in pixels that position embeddings are resampled for; none: unchanged."""
    patch: Annotated[int, Range(1, MOST_PIXELS)] | None = None
    """Patch size in pixels that a Vision Transformer's kernel is resized for, and its position embeddings are resampled
    for, as in a training step that draws this size (tokens.patch_sizes); none: unchanged."""
    num_classes: Annotated[int, Range(1, MOST_CLASSES)] | None = None
    """Classes of the new head; none: the old head's number."""
    new_head: bool = False
    """Replace the head, and the hidden layer before it, with a linear head of zeros."""
    resample: Mode = "paper"
    """How position embeddings are resampled: the paper's way, bicubic, or timm's."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")


@dataclass(frozen=True, kw_only=True)
class Hints:
    """What the user says about a file of weights because the file itself does not."""

    model: str = ""
    """Name of the model that the file must hold, such as vit_b16; empty: any."""
    num_heads: Annotated[int, Range(1)] | None = None
    """Attention heads per layer, if the file does not say; none: the usual value of its format."""
    gelu: Gelu | None = None
    """Form of the GELU, if the file does not say; none: the usual value of its format."""
    layer_norm_epsilon: Annotated[float, Range(above=0)] | None = None
    """Epsilon of every LayerNorm, if the file does not say; none: the usual value of its format."""
    resnet_epsilons: ResNetEpsilons | None = None
    """Epsilons of the ResNet's norms, if the file does not say; none: the usual value of its format."""
    pixels: PixelName | None = None
    """Pixels that the weights were trained on, if the file does not say: the paper's (mean and deviation 0.5),
    ImageNet's or CLIP's, which are folded into the patch embedding; none: the paper's."""
    grid_side: Annotated[int, Range(1, MOST_PIXELS)] | None = None
    """Side of the square grid of position embeddings, in patches, if the file does not say."""
    take: Take | None = None
    """Which weights to take from a PyTorch file that holds both the raw weights and their average over training."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")

    @property
    def grid(self) -> Pair | None:
        """The grid that `grid_side` declares; None if it is not given."""
        return (self.grid_side, self.grid_side) if self.grid_side else None

    def advice(self) -> str:
        """Returns what to do if tensors do not fit: give another file, or leave out the hints that were given."""
        given = [f"--model {self.model}"] if self.model else []
        given += [f"--num-heads {self.num_heads}"] if self.num_heads else []
        return "Give the file of another model" + (f", or leave out {' and '.join(given)}" if given else "")

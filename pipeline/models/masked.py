"""Masked patch prediction (section 4.6 and appendix B.1.2): the mean colours to predict, and the head that does.

Shape letters: B images, H W pixels, N patches, D width, K classes.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from pipeline.models.config import MEAN_COLOURS
from pipeline.models.head import LinearHead

_BITS, _LEVELS, _MOST_PIXEL = 3, 8, 255
NOT_PREDICTED = -1


class ColourHead(LinearHead):
    """The classifier of mean colours, for each patch, with the embedding that stands for a masked patch."""

    def __init__(self, width: int, *, constant: float) -> None:
        super().__init__(width, MEAN_COLOURS, constant=constant)
        self.mask = Mask(width)


class Mask(nn.Module):
    """Corrupts patch embeddings, before positions are added. A module of its own, since ZeRO-3 gathers by module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, patches_BND: torch.Tensor, sources_BN: torch.Tensor) -> torch.Tensor:
        """[B, N, D], each patch from the place that int64[B, N] `sources_BN` says: 0 to N - 1, or N for [mask]."""
        batch, _, width = patches_BND.shape
        with_mask = torch.cat([patches_BND, self.token.to(patches_BND.dtype).expand(batch, 1, width)], dim=1)
        return with_mask.gather(1, sources_BN[:, :, None].expand(-1, -1, width))


def mean_colours(images_BHW3: torch.Tensor, *, side: int) -> torch.Tensor:
    """int64[B, N], 64 r + 8 g + b of each patch of `side` pixels of uint8[B, H, W, 3] images: 3 bits of each channel's
    mean m in [0, 1], floor(8 m), at most 7. In integers, so that every device finds the same."""
    batch, height, width, channels = images_BHW3.shape
    # (B, H/P, P, W/P, P, 3) -> (B, H/P, W/P, 3) -> (B, N, 3)
    parts = images_BHW3.long().reshape(batch, height // side, side, width // side, side, channels)
    sums_BN3 = parts.sum(dim=(2, 4)).flatten(1, 2)
    bits_BN3 = (_LEVELS * sums_BN3 // (_MOST_PIXEL * side * side)).clamp(max=_LEVELS - 1)
    return (bits_BN3[..., 0] << 2 * _BITS) + (bits_BN3[..., 1] << _BITS) + bits_BN3[..., 2]


def masked_loss(logits_BNK: torch.Tensor, targets_BN: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in fp32 over the patches whose target is not NOT_PREDICTED."""
    return F.cross_entropy(logits_BNK.float().flatten(0, 1), targets_BN.flatten(), ignore_index=NOT_PREDICTED)


def colour_names() -> tuple[str, ...]:
    """The names of the classes, such as "red 7 green 0 blue 3"."""
    low = _LEVELS - 1
    return tuple(f"red {n >> 2 * _BITS} green {n >> _BITS & low} blue {n & low}" for n in range(MEAN_COLOURS))

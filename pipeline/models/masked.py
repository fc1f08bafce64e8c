"""Masked patch prediction (section 4.6 and appendix B.1.2): its targets, and the head that predicts them.

The paper tried three targets: the mean colour of a patch with 3 bits per channel, the mean colours of the cells of a 4
x 4 version of the patch, and all its pixels by L2. It does not say how pixels are scaled for L2. Here they are in [-1,
1], as the model sees them.

Shape letters: B images, H W pixels, N patches, D width, T targets of a patch, K outputs of the head.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from pipeline.models.config import MEAN_COLOURS, PARTS_PER_SIDE, MaskedTarget, ModelConfig
from pipeline.models.layers import LinearHead, centred

_BITS, _LEVELS, _MOST_PIXEL = 3, 8, 255
_CHANNELS = ("red", "green", "blue")
NOT_PREDICTED = -1


class ColourHead(LinearHead):
    """The head that predicts the colours of each patch. It also holds the embedding that replaces a masked patch."""

    def __init__(self, width: int, num_outputs: int, *, constant: float) -> None:
        super().__init__(width, num_outputs, constant=constant)
        self.mask = Mask(width)


class Mask(nn.Module):
    """Corrupts patch embeddings, before positions are added. It is a separate module, because ZeRO-3 gathers parameters
    module by module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, patches_BND: torch.Tensor, sources_BN: torch.Tensor) -> torch.Tensor:
        """Returns the corrupted embeddings, [B, N, D]. `sources_BN`, int64[B, N], says which patch is taken for each
        place: 0 to N - 1, or N for [mask]."""
        batch, _, width = patches_BND.shape
        with_mask = torch.cat([patches_BND, self.token.to(patches_BND.dtype).expand(batch, 1, width)], dim=1)
        return with_mask.gather(1, sources_BN[:, :, None].expand(-1, -1, width))


def mean_colours(images_BHW3: torch.Tensor, *, side: int) -> torch.Tensor:
    """Returns the mean colour of each patch of `side` pixels in uint8[B, H, W, 3] images: int64[B, N], 64 r + 8 g + b.
    Each of r, g and b is 3 bits of the channel's mean m in [0, 1]: floor(8 m), at most 7. All arithmetic is in
    integers, so that every device returns the same."""
    batch, height, width, channels = images_BHW3.shape
    # (B, H/P, P, W/P, P, 3) -> (B, H/P, W/P, 3) -> (B, N, 3)
    parts = images_BHW3.long().reshape(batch, height // side, side, width // side, side, channels)
    sums_BN3 = parts.sum(dim=(2, 4)).flatten(1, 2)
    bits_BN3 = (_LEVELS * sums_BN3 // (_MOST_PIXEL * side * side)).clamp(max=_LEVELS - 1)
    return (bits_BN3[..., 0] << 2 * _BITS) + (bits_BN3[..., 1] << _BITS) + bits_BN3[..., 2]


def masked_targets(images_BHW3: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Returns the targets of each patch of uint8[B, H, W, 3] images: int[B, N, T].

    Per patch, they are one colour for `mean`, 16 colours, row by row, for `parts`, and the values of all pixels, 0 to
    255, row by row and red first, for `pixels`.
    """
    side = config.stride
    if config.masked_target == "mean":
        return mean_colours(images_BHW3, side=side)[:, :, None]
    batch, rows, columns = images_BHW3.shape[0], images_BHW3.shape[1] // side, images_BHW3.shape[2] // side
    if config.masked_target == "parts":
        values, cells = mean_colours(images_BHW3, side=side // PARTS_PER_SIDE), PARTS_PER_SIDE
    else:
        values, cells = images_BHW3.short(), side
    # (B, H/P, cells, W/P, cells, C) -> (B, H/P, W/P, cells, cells, C) -> (B, N, T)
    return values.reshape(batch, rows, cells, columns, cells, -1).transpose(2, 3).flatten(3).flatten(1, 2)


def masked_loss(outputs_BNK: torch.Tensor, targets_BNT: torch.Tensor, *, target: MaskedTarget) -> torch.Tensor:
    """Returns the mean loss in fp32: the cross-entropy of colours, or the squared error of pixels in [-1, 1]. Targets
    that are NOT_PREDICTED do not count. The number of targets that count is the same for each image."""
    if target != "pixels":
        logits = outputs_BNK.float().reshape(-1, MEAN_COLOURS)  # (B, N, T * 512) -> (B * N * T, 512)
        return F.cross_entropy(logits, targets_BNT.flatten(), ignore_index=NOT_PREDICTED)
    is_predicted_BN1 = targets_BNT[:, :, :1] != NOT_PREDICTED
    differences_BNK = torch.where(is_predicted_BN1, outputs_BNK.float() - centred(targets_BNT, torch.float32), 0.0)
    return differences_BNK.square().sum() / (is_predicted_BN1.sum() * targets_BNT.shape[2])


def output_names(config: ModelConfig) -> tuple[str, ...]:
    """Returns the names of the head's outputs: "red 7 green 0 blue 3" for a mean, with "row 0 column 3" before it for a
    part, or "row 15 column 0 blue" for a pixel."""
    if config.masked_target == "mean":
        return colour_names()
    is_parts = config.masked_target == "parts"
    side, names = (PARTS_PER_SIDE, colour_names()) if is_parts else (config.stride, _CHANNELS)
    return tuple(f"row {row} column {column} {name}" for row in range(side) for column in range(side) for name in names)


def colour_names() -> tuple[str, ...]:
    """Returns the names of the colours, such as "red 7 green 0 blue 3"."""
    low = _LEVELS - 1
    return tuple(f"red {n >> 2 * _BITS} green {n >> _BITS & low} blue {n & low}" for n in range(MEAN_COLOURS))

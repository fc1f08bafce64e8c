"""The embedding of patches, and its kernel for patches of another size.

The kernel is resized by the PI-resize of "FlexiViT: One Model for All Patch Sizes" (Beyer et al., CVPR 2023, arXiv
2212.08013; `resample_patchemb` in big_vision's models/proj/flexi/vit.py). If B is the matrix that resizes a patch x
bilinearly, the new weights are the pseudo-inverse of B's transpose times the old weights w. If patches grow, <x, w> =
<B x, new w> then holds for every patch; if they shrink, it holds in the least-squares sense.

Bilinear resizing treats rows and columns alike, so B is the Kronecker product of a small matrix with itself, and so is
the pseudo-inverse. big_vision inverts the large matrix. Here the small one is inverted. It multiplies the kernel's rows
and then its columns.

Shape letters: B images, N patches, D width, P Q old and new side of a patch, C channels.
"""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import nn


class PatchEmbedding(nn.Linear):
    """The dense layer from patches, rows before columns before channels, to tokens. `side`: the side of the patches
    that its kernel is for. It resizes the kernel itself, because ZeRO-3 has the weights only while this layer runs."""

    def __init__(self, *, side: int, channels: int, width: int) -> None:
        super().__init__(side * side * channels, width)
        self.side = side

    def forward(self, x_BNP: torch.Tensor, side: int | None = None) -> torch.Tensor:
        """Returns the tokens of patches, [B, N, D]. `side`: the side of these patches, for which the kernel is resized
        in this pass; the kernel itself gets the gradients. None: the kernel's own side."""
        weight = self.weight
        if side not in (None, self.side):
            weight = resized_patches(self.weight, from_side=self.side, to_side=side).to(self.weight.dtype)
        return F.linear(x_BNP, weight, self.bias)


def resized_patches(weight: torch.Tensor, *, from_side: int, to_side: int) -> torch.Tensor:
    """Resizes a patch embedding, float[D, P * P * C], to [D, Q * Q * C], rows before columns before channels, in fp32
    or, if the weight has it, fp64. Gradients flow to the weight. Raises ValueError if the weight does not belong to
    patches of `from_side`."""
    if weight.shape[1] % from_side**2:
        raise ValueError(f"a patch embedding of {list(weight.shape)} is not of patches of {from_side} x {from_side} px")
    dtype = torch.promote_types(weight.dtype, torch.float32)
    if from_side == to_side:
        return weight.to(dtype)
    inverse_QP = torch.from_numpy(_inverse_resizing(from_side, to_side)).to(weight.device, non_blocking=True)
    # (D, P * P * C) -> (D, P, P, C) -> (D, Q, P, C) -> (D, Q, Q, C)
    weight_DPPC = weight.double().reshape(len(weight), from_side, from_side, -1)
    weight_DQPC = torch.einsum("yr,drck->dyck", inverse_QP, weight_DPPC)
    return torch.einsum("xc,dyck->dyxk", inverse_QP, weight_DQPC).flatten(1).to(dtype)


@cache
def _inverse_resizing(from_side: int, to_side: int) -> NDArray[np.float64]:
    """Returns the pseudo-inverse of the transpose of the matrix that resizes one axis, float64[Q, P]."""
    return np.linalg.pinv(_resizing(from_side, to_side).T).astype(np.float64, copy=False)


def _resizing(from_side: int, to_side: int) -> NDArray[np.float64]:
    """Returns the matrix of bilinear resizing along one axis, float64[Q, P], as tf.image.resize does it: half-pixel
    centres, without antialiasing."""
    places = np.clip((np.arange(to_side) + 0.5) * from_side / to_side - 0.5, 0, from_side - 1)
    lower = places.astype(np.int64)
    upper, share = np.minimum(lower + 1, from_side - 1), places - lower
    found = np.zeros((to_side, from_side))
    rows = np.arange(to_side)
    found[rows, lower] += 1 - share
    found[rows, upper] += share
    return found

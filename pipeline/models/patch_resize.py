"""The patch embedding at another patch size: PI-resize of "FlexiViT: One Model for All Patch Sizes" (Beyer et al.,
2023), `resample_patchemb` in big_vision's models/proj/flexi/vit.py.

If B is the matrix that resizes a patch x bilinearly, the new weights are the pseudo-inverse of its transpose times the
old ones w: then <x, w> = <B x, new w> for every patch, if patches grow, and in the least-squares sense if they shrink.

Shape letters: D width, P Q old and new side of a patch, C channels.
"""

import torch
import torch.nn.functional as F  # noqa: N812


def resized_patches(weight: torch.Tensor, *, from_side: int, to_side: int) -> torch.Tensor:
    """float32[D, Q * Q * C] from float[D, P * P * C], rows before columns before channels. ValueError if the weight is
    not of patches of `from_side`."""
    if weight.shape[1] % from_side**2:
        raise ValueError(f"a patch embedding of {list(weight.shape)} is not of patches of {from_side} x {from_side} px")
    if from_side == to_side:
        return weight.float()
    weight_DPC = weight.double().reshape(len(weight), from_side**2, -1)
    inverse_PQ = torch.linalg.pinv(_resizing(from_side, to_side, device=weight.device))
    # (P * P, Q * Q) and (D, P * P, C) -> (D, Q * Q, C)
    return torch.einsum("pq,dpc->dqc", inverse_PQ, weight_DPC).flatten(1).float()


def _resizing(from_side: int, to_side: int, *, device: torch.device) -> torch.Tensor:
    """float64[Q * Q, P * P]: the matrix of bilinear resizing, as tf.image.resize does it: half-pixel centres, without
    antialiasing."""
    basis_1PP = torch.eye(from_side**2, dtype=torch.float64, device=device).reshape(-1, 1, from_side, from_side)
    resized = F.interpolate(basis_1PP, size=(to_side, to_side), mode="bilinear", align_corners=False)
    return resized.flatten(1).T

"""Principal components of the filters that embed patches: Figure 7 (left) of "An Image is Worth 16x16 Words".

Shape letters: D filters (the width), P patch, K components.
"""

from dataclasses import dataclass

import torch

from pipeline.models.vit import ViT


@dataclass(frozen=True, kw_only=True)
class Components:
    """`filters`: float32[K, P, P, 3], of length 1 each; `shares`: of the filters' variance, the largest first."""

    filters: torch.Tensor
    shares: tuple[float, ...]


def patch_filters(model: ViT) -> torch.Tensor | None:
    """float32[D, P, P, 3]: the weights of each pixel of a patch. None for a hybrid, whose patches are of features."""
    if model.embed.resnet is not None:
        return None
    side = model.embed.patch_places
    return model.embed.patch.weight.detach().float().cpu().reshape(-1, side, side, 3)


def principal_components(filters_DPP3: torch.Tensor, *, most: int = 28) -> Components:
    """The first `most` principal components of the filters about their mean, or as many as there are.

    The sign of a component says nothing; here its largest weight is positive.
    """
    flat_DF = filters_DPP3.double().flatten(1)
    _, values_K, rows_KF = torch.linalg.svd(flat_DF - flat_DF.mean(dim=0), full_matrices=False)
    rows_KF = rows_KF[:most]
    largest_K1 = rows_KF.gather(1, rows_KF.abs().argmax(dim=1, keepdim=True))
    variances_K = values_K**2
    total = float(variances_K.sum())
    shares = (variances_K[:most] / total).tolist() if total > 0 else [0.0] * len(rows_KF)
    signed_KF = (rows_KF * largest_K1.sign()).float()
    return Components(filters=signed_KF.reshape(-1, *filters_DPP3.shape[1:]), shares=tuple(shares))

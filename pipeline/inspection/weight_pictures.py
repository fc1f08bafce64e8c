"""Pictures of weights, as in Figure 7 of "An Image is Worth 16x16 Words": filters and position embeddings.

The figure's left part shows the principal components of the filters that embed patches. Its centre shows how similar
position embeddings are to each other: it has a tile for each patch of the grid, at the patch's place in the image. A
tile shows the cosine similarity of the patch's position embedding with the embedding of every patch, from -1 (dark) to
1 (bright).

Shape letters: D width (the number of filters), P patch, K components, N tokens (class token, patches), H W the grid,
T U the tiles that are shown, down and across.
"""

from dataclasses import dataclass

import torch

from pipeline.models.positions import Grid
from pipeline.models.vit import ViT

MOST_SIDE, LEAST_SIDE = 1536, 384  # the side of a picture, in pixels
_GAP = 2  # the gap between two tiles, in pixels
# Points of matplotlib's viridis, at equal distances from -1 to 1.
_VIRIDIS = (
    *((68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141)),
    *((39, 173, 129), (92, 200, 99), (170, 220, 50), (253, 231, 37)),
)


@dataclass(frozen=True, kw_only=True)
class Components:
    """Principal components. `filters`: float32[K, P, P, 3], each of length 1; `shares`: their shares of the filters'
    variance, the largest first."""

    filters: torch.Tensor
    shares: tuple[float, ...]


def patch_filters(model: ViT) -> torch.Tensor | None:
    """Returns the weights of each pixel of a patch, float32[D, P, P, 3]; None for a hybrid, whose patches consist of
    features."""
    if model.embed.resnet is not None:
        return None
    side = model.embed.patch.side
    return model.embed.patch.weight.detach().float().cpu().reshape(-1, side, side, 3)


def principal_components(filters_DPP3: torch.Tensor, *, most: int = 28) -> Components:
    """Returns the first `most` principal components of the filters about their mean, or all of them if there are fewer.

    The sign of a component is arbitrary; here the weight that is largest in magnitude is positive.
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


def similarities(table_ND: torch.Tensor, *, grid: Grid) -> torch.Tensor:
    """Returns the cosine similarities of each tile's position embedding with all patches' embeddings: float32[T, U, H,
    W]. `table_ND`: the embeddings, float[N, D].

    The class token, which comes first, has no position in the image and is left out. In a large grid only every second
    (third ...) patch has a tile, so that the picture fits MOST_SIDE.
    """
    height, width = grid
    grid_HWD = table_ND.float()[-height * width :].reshape(height, width, -1)
    unit_HWD = torch.nn.functional.normalize(grid_HWD, dim=-1).nan_to_num(0.0)
    every = next(every for every in range(1, max(grid) + 1) if _least_side(grid, every) <= MOST_SIDE)
    return torch.einsum("tud,hwd->tuhw", unit_HWD[::every, ::every], unit_HWD)


def _least_side(grid: Grid, every: int) -> int:
    return max(-(-cells // every) * (cells + _GAP) for cells in grid)


def levels(similar: torch.Tensor) -> torch.Tensor:
    """Returns similarities from -1 to 1 as levels from 0 to 255, uint8 of the same shape."""
    return ((similar.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def picture(levels_TUHW: torch.Tensor) -> torch.Tensor:
    """Draws the tiles with white gaps between them, each value as a square of pixels: uint8[height, width, 3] on the
    host."""
    tiles_down, tiles_across, height, width = levels_TUHW.shape
    pixels = max(1, LEAST_SIDE // max(tiles_down * height, tiles_across * width))
    rgb_TUHW3 = _colours()[levels_TUHW.cpu().long()]
    # each value a square: (T, U, H, W, 3) -> (T, U, H * pixels, W * pixels, 3)
    tiles = rgb_TUHW3.repeat_interleave(pixels, dim=2).repeat_interleave(pixels, dim=3)
    framed = torch.nn.functional.pad(tiles, (0, 0, 0, _GAP, 0, _GAP), value=255)
    # (T, U, h, w, 3) -> (T * h, U * w, 3)
    whole = framed.transpose(1, 2).reshape(tiles_down * framed.shape[2], tiles_across * framed.shape[3], 3)
    return whole[:-_GAP, :-_GAP].contiguous()


def _colours() -> torch.Tensor:
    """Returns the colour of each level, interpolated between the points of the scale: uint8[256, 3]."""
    points = torch.tensor(_VIRIDIS, dtype=torch.float32)
    places = torch.linspace(0, len(points) - 1, 256)
    below = places.floor().clamp(max=len(points) - 2).long()
    share = (places - below).unsqueeze(-1)
    return (points[below] * (1 - share) + points[below + 1] * share).round().to(torch.uint8)

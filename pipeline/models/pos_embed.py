"""Position embeddings at another resolution ("An Image is Worth 16x16 Words", section 3.2).

Three methods are in use, and the same weights give different logits with each:
- `paper`: scipy.ndimage.zoom(order=1) of the reference code, which is bilinear interpolation with aligned corners.
- `bicubic`: Hugging Face transformers' ViT, bicubic without aligned corners or antialiasing.
- `timm`: timm's resample_abs_pos_embed, bicubic with antialiasing (another cubic, and smoother if the grid shrinks).
The class token's embedding has no position in the grid and stays as it is.

Shape letters: N tokens, L positions along one axis, D width.
"""

import torch
import torch.nn.functional as F  # noqa: N812

from pipeline.models.config import Mode

Grid = tuple[int, int]


def resample_position_embeddings(
    table_ND: torch.Tensor, *, from_grid: Grid, to_grid: Grid, mode: Mode = "paper", num_prefix_tokens: int = 1
) -> torch.Tensor:
    """Position embeddings of a `to_grid` (height, width in patches) from those of a `from_grid`.

    `table_ND`: float[prefix + height * width, D], class token first. Returns float32[prefix + new height * new width,
    D]. Raises ValueError if the table does not fit the grid, or a grid has no patch.
    """
    num_patches = from_grid[0] * from_grid[1]
    if table_ND.shape[0] != num_prefix_tokens + num_patches or min(*from_grid, *to_grid) < 1:
        raise ValueError(
            f"{table_ND.shape[0]} position embeddings do not fit {num_prefix_tokens} + {from_grid[0]} x {from_grid[1]}"
            f", or cannot be made {to_grid[0]} x {to_grid[1]}"
        )
    if from_grid == to_grid:
        return table_ND.float()
    prefix_ND, grid_ND = table_ND[:num_prefix_tokens].float(), table_ND[num_prefix_tokens:]
    grid_1DHW = grid_ND.reshape(1, *from_grid, -1).permute(0, 3, 1, 2)
    resampled_1DHW = _interpolate(grid_1DHW, to_grid, mode)
    # (1, D, H, W) -> (H * W, D)
    resampled_ND = resampled_1DHW.permute(0, 2, 3, 1).reshape(to_grid[0] * to_grid[1], -1).float()
    return torch.cat([prefix_ND, resampled_ND])


def resample_axis_embeddings(table_LD: torch.Tensor, *, length: int, mode: Mode = "paper") -> torch.Tensor:
    """One axis of 2-D learned position embeddings: float[L, D] -> float32[length, D]."""
    from_grid, to_grid = (table_LD.shape[0], 1), (length, 1)
    return resample_position_embeddings(table_LD, from_grid=from_grid, to_grid=to_grid, mode=mode, num_prefix_tokens=0)


def _interpolate(grid_1DHW: torch.Tensor, to_grid: Grid, mode: Mode) -> torch.Tensor:
    if mode == "paper":  # fp32 positions would be off by a few millionths; the originals of the other two use fp32
        return F.interpolate(grid_1DHW.double(), size=to_grid, mode="bilinear", align_corners=True)
    return F.interpolate(grid_1DHW.float(), size=to_grid, mode="bicubic", align_corners=False, antialias=mode == "timm")

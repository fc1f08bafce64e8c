"""Position embeddings at another resolution ("An Image is Worth 16x16 Words", section 3.2), pure.

The reference code resamples the grid with scipy.ndimage.zoom(order=1), which is bilinear interpolation with aligned
corners (checked against scipy in the tests); the class token's embedding stays as it is.
"""

import torch
import torch.nn.functional as F  # noqa: N812


def resample_position_embeddings(
    table_ND: torch.Tensor, *, from_grid: tuple[int, int], to_grid: tuple[int, int]
) -> torch.Tensor:
    """Position embeddings of a `to_grid` (height, width in patches) from those of a `from_grid`.

    `table_ND`: float[1 + height * width, D], class token first. Returns float32[1 + new height * new width, D].
    """
    num_patches = from_grid[0] * from_grid[1]
    if table_ND.shape[0] != 1 + num_patches:
        raise ValueError(f"{table_ND.shape[0]} position embeddings do not fit 1 + {from_grid[0]} x {from_grid[1]}")
    if from_grid == to_grid:
        return table_ND.float()
    class_1D, grid_ND = table_ND[:1].float(), table_ND[1:].double()  # fp32 places would be off by a few millionths
    grid_1DHW = grid_ND.reshape(1, *from_grid, -1).permute(0, 3, 1, 2)
    resampled_1DHW = F.interpolate(grid_1DHW, size=to_grid, mode="bilinear", align_corners=True)
    # (1, D, H, W) -> (H * W, D)
    resampled_ND = resampled_1DHW.permute(0, 2, 3, 1).reshape(to_grid[0] * to_grid[1], -1).float()
    return torch.cat([class_1D, resampled_ND])

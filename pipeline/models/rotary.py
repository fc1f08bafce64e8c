"""Rotary position embeddings in two dimensions: RoPE-Axial of "Rotary Position Embedding for Vision Transformer" (Heo
et al., 2024), as in timm's vit_base_patch16_rope_224.

Pairs of neighbouring channels of queries and keys are turned, the first half of them by angles that grow with a patch's
column and the second half with its row, so that their products depend on the distance of two patches alone. The class
token and registers are not turned. The frequencies are those of the paper's ViTs: from 1 down to almost 1 / 100, where
EVA-02 takes 10,000 as language models do.

Shape letters: B images, N tokens, h heads, d width of a head, W H columns and rows of patches.
"""

import torch

from pipeline.models.pos_embed import Grid

_TEMPERATURE = 100.0


def rotations(
    grid: Grid, head_width: int, *, num_prefix_tokens: int, device: torch.device | None = None
) -> torch.Tensor:
    """float32[2, N, d]: the cosine and the sine for each channel of each token of a grid (height, width in patches).
    `head_width` is d, a multiple of 4."""
    num_frequencies = head_width // 4
    exponent = torch.arange(num_frequencies, dtype=torch.float64, device=device) / num_frequencies
    angles_x_WF, angles_y_HF = (
        torch.outer(torch.arange(length, dtype=torch.float64, device=device), 1 / _TEMPERATURE**exponent)
        for length in (grid[1], grid[0])
    )
    x_HWF, y_HWF = angles_x_WF[None].expand(grid[0], -1, -1), angles_y_HF[:, None].expand(-1, grid[1], -1)
    # (H, W, d / 2) -> (H * W, d): both channels of a pair turn by the same angle
    angles_Nd = torch.cat([x_HWF, y_HWF], dim=-1).flatten(0, 1).repeat_interleave(2, dim=-1)
    angles_Nd = torch.nn.functional.pad(angles_Nd, (0, 0, num_prefix_tokens, 0))
    return torch.stack([angles_Nd.cos(), angles_Nd.sin()]).float()


def rotated(x_BNhd: torch.Tensor, rotation_2Nd: torch.Tensor) -> torch.Tensor:
    """Queries or keys, turned in fp32 or better: (a, b) becomes (a cos - b sin, b cos + a sin)."""
    cosine_N1d, sine_N1d = rotation_2Nd.unsqueeze(2)
    across_BNhd = torch.stack([-x_BNhd[..., 1::2], x_BNhd[..., ::2]], dim=-1).flatten(-2)
    turned_BNhd: torch.Tensor = x_BNhd * cosine_N1d + across_BNhd * sine_N1d
    return turned_BNhd.to(x_BNhd.dtype)

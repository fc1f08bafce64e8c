"""Position embeddings: the kinds that a model may have, and how they are resampled for another resolution.

"An Image is Worth 16x16 Words", appendix D.4, describes learned tables, for the input or for each layer, and embeddings
of the distance between two tokens. The fixed sines follow "Better plain ViT baselines for ImageNet-1k" (Beyer et al.,
2022; big_vision's models/vit.py, posemb_sincos_2d).

Rotary embeddings are RoPE-Axial of "Rotary Position Embedding for Vision Transformer" (Heo et al., 2024), as in timm's
vit_base_patch16_rope_224. Pairs of neighbouring channels of queries and keys are rotated: the first half of the pairs
by angles proportional to the patch's column, the second half by angles proportional to its row. The product of a query
and a key therefore depends only on the distance between their patches. The class token and registers are not turned.
There, frequencies go from 1 down to almost 1 / 100, and places are the numbers of columns and rows. EVA-02 (Fang et
al., 2023) has frequencies down to almost 1 / 10,000, like those of language models, and stretches the places of another
grid to the grid of pre-training. DINOv3 (Simeoni et al., 2025) places the centres of patches on an axis of fixed
length. Source of all: timm's layers/pos_embed_sincos.py.

Sines and rotary places of a model are those of the grid of its own image size. Images of another size, such as the
smaller ones with which a run may begin, get the same places in fewer or more steps, so that a patch's position says
where in the image it is. A number of patches from zero would say where it is only at one size. A model that is
fine-tuned at another size has another grid of its own, which it counts from zero, as in big_vision and timm.

Three methods of resampling a learned table (section 3.2) are in use, and the same weights give different logits with
each:
- `paper`: scipy.ndimage.zoom(order=1) of the reference code, which is bilinear interpolation with aligned corners.
- `bicubic`: Hugging Face transformers' ViT, bicubic without aligned corners or antialiasing.
- `timm`: timm's resample_abs_pos_embed, bicubic with antialiasing, which has a different kernel and gives smoother
  results if the grid shrinks. The class token's embedding has no position in the grid and stays as it is.

Shape letters: B images, H W rows and columns of patches, L positions along one axis, N tokens, O distances (2 N - 1),
D width, h heads, d width of a head.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from pipeline.models.config import Mode, ModelConfig

Grid = tuple[int, int]
Table = nn.Parameter | None
_SINE_TEMPERATURE = 10_000.0


def position_tables(config: ModelConfig) -> tuple[Table, Table, Table]:
    """Returns the learned position embeddings: one table for all tokens, [1, N, D], or one for columns, [W, D/2], and
    one for rows, [H, D/2]. A table that the model does not have is None."""
    (height, width), size = config.grid, config.size
    if config.has_table:
        return nn.Parameter(torch.zeros(1, config.num_class_tokens + height * width, size.width)), None, None
    if config.position == "learned_2d":
        x_WD, y_HD = torch.zeros(width, size.width // 2), torch.zeros(height, size.width // 2)
        return None, nn.Parameter(x_WD), nn.Parameter(y_HD)
    return None, None, None


class Positions(nn.Module):
    """The learned position embeddings of one layer, for the model's own grid. The tables have the same form as those
    for the input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_class_tokens = config.num_class_tokens
        self.position, self.position_x, self.position_y = position_tables(config)

    def forward(self) -> torch.Tensor:
        """Returns the embeddings, [1, N, D]."""
        if self.position is not None:
            return self.position
        if self.position_x is None or self.position_y is None:
            raise ValueError("a table of columns comes with one of rows")
        return from_axes(self.position_x, self.position_y, num_prefix_tokens=self.num_class_tokens)


def from_axes(x_WD: torch.Tensor, y_HD: torch.Tensor, *, num_prefix_tokens: int) -> torch.Tensor:
    """Makes 2-D position embeddings [1, N, D] from embeddings of columns and rows, D/2 each. The class token gets
    zeros, since it is learned itself and needs no position."""
    height, width = len(y_HD), len(x_WD)
    both_HWD = torch.cat([x_WD[None].expand(height, -1, -1), y_HD[:, None].expand(-1, width, -1)], dim=-1)
    # (H, W, D) -> (1, prefix + H * W, D)
    return F.pad(both_HWD.flatten(0, 1), (0, 0, num_prefix_tokens, 0)).unsqueeze(0)


def sines(
    length: int, width: int, *, own_length: int | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Computes the fixed position embeddings of one axis, float32[L, D/2]: the sines of the positions and then their
    cosines, each with D/4 frequencies from 1 down to 1 / 10,000. `width` is D, a multiple of 4 and at least 8.

    Places are 0, 1, 2, ... in a grid of `own_length` (None: `length`) patches. Another number of patches is stretched
    onto it: the first and the last patch keep their places, as if a learned table were resampled.
    """
    num_frequencies = width // 4
    exponent = torch.arange(num_frequencies, dtype=torch.float64, device=device) / (num_frequencies - 1)
    places = torch.arange(length, dtype=torch.float64, device=device)
    if own_length is not None and own_length != length:
        places = places * ((own_length - 1) / max(1, length - 1))
    angles = torch.outer(places, 1 / _SINE_TEMPERATURE**exponent)
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


class RelativePositions(nn.Module):
    """1-D relative attention. It adds a term to the logits of each pair of tokens: the query times an embedding of its
    distance to the key in the sequence.

    The paper does not say whether heads share embeddings. Here each head has its own, so the embeddings of one distance
    have D numbers over all heads. The class token is the first token of the sequence.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.size.num_heads
        self.num_tokens = config.num_prefix_tokens + config.grid[0] * config.grid[1]
        self.relative = nn.Parameter(torch.zeros(2 * self.num_tokens - 1, config.size.width))

    def forward(self, q_BhNd: torch.Tensor) -> torch.Tensor:
        """Returns [B, h, N, N]: entry (i, j) is query i times the embedding of i - j, divided by sqrt(d)."""
        num_tokens = q_BhNd.shape[2]
        if num_tokens != self.num_tokens:
            raise ValueError(
                f"{num_tokens} tokens; relative positions are of {self.num_tokens}: give images of one size"
            )
        # (O, h * d) -> (h, O, d)
        r_hOd = self.relative.to(q_BhNd.dtype).reshape(len(self.relative), self.num_heads, -1).transpose(0, 1)
        logits_BhNO = (q_BhNd * q_BhNd.shape[-1] ** -0.5) @ r_hOd.mT
        place_N = torch.arange(num_tokens, device=q_BhNd.device)
        distance_NN = place_N[:, None] - place_N[None, :] + num_tokens - 1
        logits_BhNN: torch.Tensor = logits_BhNO.gather(-1, distance_NN.expand(*q_BhNd.shape[:2], -1, -1))
        return logits_BhNN


def rotations(
    config: ModelConfig, grid: Grid, *, patch: int | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Computes the cosine and the sine for each channel of each token of a grid (height, width in patches): float32[2,
    N, d]. `patch`: the side in pixels of the patches, if it is not the configuration's."""
    num_frequencies = config.size.width // config.size.num_heads // 4
    exponent = torch.arange(num_frequencies, dtype=torch.float64, device=device) / num_frequencies
    frequency_F = 1 / config.rotary_temperature**exponent
    own_length = config.rotary_grid or config.image_size // (patch or config.stride)
    angles_x_WF, angles_y_HF = (
        torch.outer(_rotary_places(config, length, own_length=own_length, device=device), frequency_F)
        for length in (grid[1], grid[0])
    )
    x_HWF, y_HWF = angles_x_WF[None].expand(grid[0], -1, -1), angles_y_HF[:, None].expand(-1, grid[1], -1)
    # (H, W, d / 2) -> (H * W, d): both channels of a pair turn by the same angle
    angles_Nd = torch.cat([x_HWF, y_HWF], dim=-1).flatten(0, 1).repeat_interleave(2, dim=-1)
    angles_Nd = torch.nn.functional.pad(angles_Nd, (0, 0, config.num_prefix_tokens, 0))
    return torch.stack([angles_Nd.cos(), angles_Nd.sin()]).float()


def _rotary_places(config: ModelConfig, length: int, *, own_length: int, device: torch.device | None) -> torch.Tensor:
    """Returns the places of the patches along one axis, float64[L]: numbers, which are stretched onto `own_length`
    patches, or centres on an axis of fixed length."""
    places_L = torch.arange(length, dtype=torch.float64, device=device)
    if config.rotary_places == "centred":
        return 2 * math.pi * (2 * (places_L + 0.5) / length - 1)
    if config.rotary_places == "from_one":
        places_L = places_L + 1
    return places_L * (own_length / length)


def rotated(x_BNhd: torch.Tensor, rotation_2Nd: torch.Tensor) -> torch.Tensor:
    """Rotates queries or keys, in fp32 or better: (a, b) becomes (a cos - b sin, b cos + a sin). If the tokens of each
    image have other places, `rotation_2Nd` is [2, B, N, d]."""
    cosine_N1d, sine_N1d = rotation_2Nd.unsqueeze(-2)
    across_BNhd = torch.stack([-x_BNhd[..., 1::2], x_BNhd[..., ::2]], dim=-1).flatten(-2)
    turned_BNhd: torch.Tensor = x_BNhd * cosine_N1d + across_BNhd * sine_N1d
    return turned_BNhd.to(x_BNhd.dtype)


def resample_position_embeddings(
    table_ND: torch.Tensor, *, from_grid: Grid, to_grid: Grid, mode: Mode = "paper", num_prefix_tokens: int = 1
) -> torch.Tensor:
    """Resamples position embeddings of a `from_grid` (height, width in patches) for a `to_grid`.

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
    """Resamples one axis of 2-D learned position embeddings: float[L, D] -> float32[length, D]."""
    from_grid, to_grid = (table_LD.shape[0], 1), (length, 1)
    return resample_position_embeddings(table_LD, from_grid=from_grid, to_grid=to_grid, mode=mode, num_prefix_tokens=0)


def _interpolate(grid_1DHW: torch.Tensor, to_grid: Grid, mode: Mode) -> torch.Tensor:
    if mode == "paper":  # in fp32 it would be off by a few millionths; the originals of the other two modes use fp32
        return F.interpolate(grid_1DHW.double(), size=to_grid, mode="bilinear", align_corners=True)
    return F.interpolate(grid_1DHW.float(), size=to_grid, mode="bicubic", align_corners=False, antialias=mode == "timm")

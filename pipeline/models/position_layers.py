"""Position embeddings and where they are added ("An Image is Worth 16x16 Words", appendix D.4): learned tables, of the
input or a layer's own, embeddings of the distance between two tokens, and fixed sines ("Better plain ViT baselines for
ImageNet-1k", Beyer et al., 2022; big_vision's models/vit.py, posemb_sincos_2d).

Shape letters: B images, H W rows and columns of patches, L places along one axis, N tokens, O distances (2 N - 1), D
width, h heads, d width of a head.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from pipeline.models.config import ModelConfig

Table = nn.Parameter | None
_TEMPERATURE = 10_000.0


def position_tables(config: ModelConfig) -> tuple[Table, Table, Table]:
    """Learned position embeddings: one table [1, N, D], or one of columns and one of rows, [W, D/2] and [H, D/2]; None
    for those that the model does not have."""
    (height, width), size = config.grid, config.size
    if config.position == "learned_1d":
        return nn.Parameter(torch.zeros(1, config.num_class_tokens + height * width, size.width)), None, None
    if config.position == "learned_2d":
        x_WD, y_HD = torch.zeros(width, size.width // 2), torch.zeros(height, size.width // 2)
        return None, nn.Parameter(x_WD), nn.Parameter(y_HD)
    return None, None, None


class Positions(nn.Module):
    """Learned position embeddings of the model's own grid, as those of the input: [1, N, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_class_tokens = config.num_class_tokens
        self.position, self.position_x, self.position_y = position_tables(config)

    def forward(self) -> torch.Tensor:
        """[1, N, D]."""
        if self.position is not None:
            return self.position
        if self.position_x is None or self.position_y is None:
            raise ValueError("a table of columns comes with one of rows")
        return from_axes(self.position_x, self.position_y, num_prefix_tokens=self.num_class_tokens)


def from_axes(x_WD: torch.Tensor, y_HD: torch.Tensor, *, num_prefix_tokens: int) -> torch.Tensor:
    """2-D position embeddings [1, N, D] from those of columns and rows, D/2 each. The class token is learned itself and
    needs no position: zero."""
    height, width = len(y_HD), len(x_WD)
    both_HWD = torch.cat([x_WD[None].expand(height, -1, -1), y_HD[:, None].expand(-1, width, -1)], dim=-1)
    # (H, W, D) -> (1, prefix + H * W, D)
    return F.pad(both_HWD.flatten(0, 1), (0, 0, num_prefix_tokens, 0)).unsqueeze(0)


def sines(length: int, width: int, *, device: torch.device | None = None) -> torch.Tensor:
    """float32[L, D/2]: fixed position embeddings of one axis, the sines of the places and then their cosines, each with
    D/4 frequencies from 1 down to 1 / 10,000. `width` is D, a multiple of 4 from 8 on."""
    num_frequencies = width // 4
    exponent = torch.arange(num_frequencies, dtype=torch.float64, device=device) / (num_frequencies - 1)
    places = torch.arange(length, dtype=torch.float64, device=device)
    angles = torch.outer(places, 1 / _TEMPERATURE**exponent)
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


class RelativePositions(nn.Module):
    """1-D relative attention: for each pair of tokens, the query times an embedding of how far the key is behind it in
    the sequence, as a term of the logits. The paper does not say whether heads share embeddings; here each has its own
    (as its position embeddings have D numbers), and the class token is the first of the sequence."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.size.num_heads
        self.num_tokens = config.num_prefix_tokens + config.grid[0] * config.grid[1]
        self.relative = nn.Parameter(torch.zeros(2 * self.num_tokens - 1, config.size.width))

    def forward(self, q_BhNd: torch.Tensor) -> torch.Tensor:
        """[B, h, N, N]: entry (i, j) is query i times the embedding of i - j, divided by sqrt(d)."""
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

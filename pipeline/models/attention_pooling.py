"""Attention pooling: a learned token that attends to all patches ("Scaling Vision Transformers", Zhai et al., 2022;
MAPHead in big_vision's models/vit.py, AttentionPoolLatent in timm).

Shape letters: B images, N patches, D width, h heads, d width of a head.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from pipeline.models.config import ModelConfig
from pipeline.models.mlp import MLP


class AttentionPool(nn.Module):
    """[B, N, D] patches after the last norm -> [B, D]: attention of the probe to them, then x + MLP(LayerNorm(x)). As
    in big_vision, without dropout."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.num_heads = config.size.width, config.size.num_heads
        self.probe = nn.Parameter(torch.zeros(1, 1, width))
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_epsilon)
        self.mlp = MLP(replace(config, dropout=0.0))

    def forward(self, x_BND: torch.Tensor) -> torch.Tensor:
        q_Bh1d, k_BhNd, v_BhNd = self.parts(x_BND)
        a_Bh1d = F.scaled_dot_product_attention(q_Bh1d, k_BhNd, v_BhNd)
        # (B, h, 1, d) -> (B, D)
        y_BD = self.out(a_Bh1d.transpose(1, 2).flatten(1))
        result: torch.Tensor = y_BD + self.mlp(self.norm(y_BD))
        return result

    def parts(self, x_BND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The probe's query, the same for each image, [B, h, 1, d], and keys and values, [B, h, N, d]."""
        batch, num_patches, _ = x_BND.shape
        q_11hd = self.query(self.probe).reshape(1, 1, self.num_heads, -1)
        # (B, N, 2 * D) -> (2, B, h, N, d)
        kv_2BhNd = self.key_value(x_BND).reshape(batch, num_patches, 2, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return q_11hd.transpose(1, 2).expand(batch, -1, -1, -1), kv_2BhNd[0], kv_2BhNd[1]

"""The MLP of a transformer's layers and of attention pooling, and the GELU in it.

Shape letters: B images, N tokens, D width, M MLP width.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from pipeline.models.config import ModelConfig


class MLP(nn.Module):
    """Two dense layers with a GELU between (in the JAX code its tanh approximation), dropout after each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.size
        self.dense1 = nn.Linear(size.width, size.mlp_width)
        self.dense2 = nn.Linear(size.mlp_width, size.width)
        self.dropout = nn.Dropout(config.dropout)
        self.gelu = tanh_gelu if config.gelu == "tanh" else F.gelu

    def forward(self, z_BND: torch.Tensor) -> torch.Tensor:
        hidden_BNM = self.dropout(self.gelu(self.dense1(z_BND)))
        out_BND: torch.Tensor = self.dropout(self.dense2(hidden_BNM))
        return out_BND


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU of any shape by its tanh approximation (Hendrycks and Gimpel, 2016): x / 2 (1 + tanh u)."""
    if torch.compiler.is_compiling():
        return gelu_by_sigmoid(x)
    return F.gelu(x, approximate="tanh")


def gelu_by_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The same function as x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3): it makes a compiled MLP a tenth
    faster, since an exponential costs less than a tanh (benchmarks/kernels.py). In fp32 or better, then rounded."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    twice_u = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide * torch.sigmoid(twice_u)).to(x.dtype)

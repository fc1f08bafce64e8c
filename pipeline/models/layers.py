"""Layers that several models share: pixels in [-1, 1], the MLP, the classifier, and attention pooling.

The classifier of every model is linear, starts at zero, and computes in fp32 whatever the precision of the rest. In
attention pooling, a learned token attends to all patches ("Scaling Vision Transformers", Zhai et al., 2022; MAPHead in
big_vision's models/vit.py, AttentionPoolLatent in timm).

Shape letters: B images, N tokens or patches, D width, M MLP width, K classes, h heads, d width of a head.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from pipeline.models.config import Gelu, ModelConfig

MIDDLE = 127.5


def centred(images_BHW3: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales uint8 or float[B, H, W, 3] pixels from 0..255 to [-1, 1], in fp32, and returns them in `dtype`."""
    return ((images_BHW3.float() - MIDDLE) / MIDDLE).to(dtype)


def norm_layer(config: ModelConfig, width: int) -> nn.Module:
    """Returns the model's norm of `width` channels."""
    kind = nn.RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return kind(width, eps=config.layer_norm_epsilon)


class MLP(nn.Module):
    """Two dense layers with a GELU between them (in the JAX code, its tanh approximation), and dropout after each.
    `fused`: computes the MLP instead where gradients are needed, if it is given (fused_mlp.py).

    With SwiGLU, the first layer has the gate's outputs first, and then as many that the gate multiplies.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.size
        is_gated, has_norm = config.mlp == "swiglu", config.inner_norms != "none"
        self.dense1 = nn.Linear(size.width, (1 + is_gated) * size.mlp_width)
        self.norm = norm_layer(config, size.mlp_width) if has_norm else None
        self.dense2 = nn.Linear(size.mlp_width, size.width)
        self.dropout = nn.Dropout(config.dropout)
        self.is_tanh = config.gelu == "tanh"
        gelus: dict[Gelu, Callable[[torch.Tensor], torch.Tensor]]
        gelus = {"tanh": tanh_gelu, "exact": F.gelu, "quick": quick_gelu}
        self.gelu = swiglu if is_gated else gelus[config.gelu]
        self.fused: Callable[[torch.Tensor, MLP], torch.Tensor] | None = None

    def forward(self, z_BND: torch.Tensor) -> torch.Tensor:
        if self.fused is not None and torch.is_grad_enabled():
            return self.fused(z_BND, self)
        hidden_BNM = self.dropout(self.gelu(self.dense1(z_BND)))
        if self.norm is not None:
            hidden_BNM = self.norm(hidden_BNM)
        out_BND: torch.Tensor = self.dropout(self.dense2(hidden_BNM))
        return out_BND


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """Computes the GELU by its tanh approximation (Hendrycks and Gimpel, 2016), x / 2 (1 + tanh u), for any shape."""
    if torch.compiler.is_compiling():
        return gelu_by_sigmoid(x)
    return F.gelu(x, approximate="tanh")


def gelu_by_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Computes the function of `tanh_gelu` as x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3), in fp32 or better,
    and rounds the result. On a CPU, a compiled MLP takes 15 % less time with it, since an exponential costs less than a
    tanh (benchmarks/results/kernels.json)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    twice_u = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide * torch.sigmoid(twice_u)).to(x.dtype)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Computes x sigmoid(1.702 x), an approximation of the GELU (Hendrycks and Gimpel, 2016), for any shape."""
    return x * torch.sigmoid(1.702 * x)


def swiglu(x_BNG: torch.Tensor) -> torch.Tensor:
    """Returns the SiLU of the first half of the channels times the second half, [B, N, M] for [B, N, 2 M]."""
    gate_BNM, value_BNM = x_BNG.chunk(2, dim=-1)
    return F.silu(gate_BNM) * value_BNM


class LinearHead(nn.Linear):
    """A linear classifier that computes in fp32, whatever its weights' precision. `constant` is added to each logit."""

    def __init__(self, width: int, num_classes: int, *, constant: float) -> None:
        if num_classes < 1:
            raise ValueError("num_classes is 0: take it from the dataset before the model is built")
        super().__init__(width, num_classes)
        self.constant = constant

    def forward(self, y_BD: torch.Tensor) -> torch.Tensor:
        """Returns the float32[B, K] logits of [B, D] representations."""
        return F.linear(y_BD.float(), self.weight.float(), self.bias.float()) + self.constant


class AttentionPool(nn.Module):
    """Pools [B, N, D] patches after the last norm to [B, D]. The probe attends to the patches, which gives y; the
    result is y + MLP(norm(y)). There is no dropout, as in big_vision."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.num_heads = config.size.width, config.size.num_heads
        self.probe = nn.Parameter(torch.zeros(1, 1, width))
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.norm = norm_layer(config, width)
        self.mlp = MLP(replace(config, dropout=0.0, mlp="plain", inner_norms="none"))

    def forward(self, x_BND: torch.Tensor) -> torch.Tensor:
        q_Bh1d, k_BhNd, v_BhNd = self.parts(x_BND)
        a_Bh1d = F.scaled_dot_product_attention(q_Bh1d, k_BhNd, v_BhNd)
        # (B, h, 1, d) -> (B, D)
        y_BD = self.out(a_Bh1d.transpose(1, 2).flatten(1))
        result: torch.Tensor = y_BD + self.mlp(self.norm(y_BD))
        return result

    def parts(self, x_BND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the probe's query, [B, h, 1, d], which is the same for every image, and the patches' keys and values,
        [B, h, N, d] each."""
        batch, num_patches, _ = x_BND.shape
        q_11hd = self.query(self.probe).reshape(1, 1, self.num_heads, -1)
        # (B, N, 2 * D) -> (2, B, h, N, d)
        kv_2BhNd = self.key_value(x_BND).reshape(batch, num_patches, 2, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return q_11hd.transpose(1, 2).expand(batch, -1, -1, -1), kv_2BhNd[0], kv_2BhNd[1]

"""Vision Transformer ("An Image is Worth 16x16 Words", equations 1 to 4), details as in the authors' JAX code.

Shape letters: B images, H W pixels, P patch, N tokens (1 + patches), D width, K classes, h heads, d width of a head.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from pipeline.models.config import ModelConfig, Size
from pipeline.models.initial import initial_tensor

LAYER_NORM_EPSILON = 1e-6  # flax's default, not PyTorch's 1e-5


def build_model(config: ModelConfig, *, seed: int = 0) -> "ViT":
    """The model with initial weights that depend on (seed, tensor name) alone."""
    model = ViT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            parameter.copy_(initial_tensor(name, shape, seed=seed, position_std=config.position_std))
    return model


class ViT(nn.Module):
    """uint8[B, H, W, 3] images -> float32[B, K] logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.num_classes < 1:
            raise ValueError("num_classes is 0: take it from the dataset before the model is built")
        self.config, size = config, config.size
        self.embed = Embedding(size, num_tokens=1 + config.grid[0] * config.grid[1], dropout=config.dropout)
        self.blocks = nn.ModuleList(Block(size, dropout=config.dropout) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width, eps=LAYER_NORM_EPSILON)
        self.representation = nn.Linear(size.width, size.width) if config.representation else None
        self.head = Head(size.width, config.num_classes, constant=config.head_bias)

    def forward(self, images_BHW3: torch.Tensor) -> torch.Tensor:
        """float32[B, K] logits."""
        features_BD = self.features(images_BHW3)
        logits_BK: torch.Tensor = self.head(features_BD)
        return logits_BK

    def features(self, images_BHW3: torch.Tensor) -> torch.Tensor:
        """The image representation y of equation 4 (after the hidden tanh layer where there is one): [B, D]."""
        z_BND = self.embed(images_BHW3)
        for block in self.blocks:
            z_BND = block(z_BND)
        y_BD: torch.Tensor = self.norm(z_BND[:, 0])  # equation 4
        return y_BD if self.representation is None else torch.tanh(self.representation(y_BD))


class Embedding(nn.Module):
    """Equation 1: patches times E, class token in front, position embeddings added."""

    def __init__(self, size: Size, *, num_tokens: int, dropout: float) -> None:
        super().__init__()
        self.patch_pixels = size.patch
        self.patch = nn.Linear(size.patch * size.patch * 3, size.width)
        self.class_token = nn.Parameter(torch.zeros(1, 1, size.width))
        self.position = nn.Parameter(torch.zeros(1, num_tokens, size.width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, images_BHW3: torch.Tensor) -> torch.Tensor:
        """uint8[B, H, W, 3] -> [B, N, D]."""
        batch, height, width, _ = images_BHW3.shape
        p = self.patch_pixels
        x_BHW3 = ((images_BHW3.float() - 127.5) / 127.5).to(self.patch.weight.dtype)  # value range [-1, 1]
        # (B, H/P, P, W/P, P, 3) -> (B, H/P * W/P, P * P * 3)
        x_BNP = x_BHW3.reshape(batch, height // p, p, width // p, p, 3).transpose(2, 3).flatten(3).flatten(1, 2)
        z_BND = torch.cat([self.class_token.expand(batch, -1, -1), self.patch(x_BNP)], dim=1)
        summed: torch.Tensor = self.dropout(z_BND + self.position)
        return summed


class Block(nn.Module):
    """Equations 2 and 3: pre-norm attention and MLP, each with its residual."""

    def __init__(self, size: Size, *, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width, eps=LAYER_NORM_EPSILON)
        self.attention = Attention(size.width, size.num_heads)
        self.norm2 = nn.LayerNorm(size.width, eps=LAYER_NORM_EPSILON)
        self.mlp = MLP(size, dropout=dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, z_BND: torch.Tensor) -> torch.Tensor:
        z_BND = z_BND + self.dropout(self.attention(self.norm1(z_BND)))  # equation 2
        result: torch.Tensor = z_BND + self.mlp(self.norm2(z_BND))  # equation 3
        return result


class Attention(nn.Module):
    """Multi-head self-attention; q, k and v in one product, no dropout on q, k, v (appendix B.1)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, z_BND: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = z_BND.shape
        # (B, N, 3 * D) -> (3, B, h, N, d)
        qkv = self.qkv(z_BND).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        a_BhNd = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        # (B, h, N, d) -> (B, N, D)
        out_BND: torch.Tensor = self.out(a_BhNd.transpose(1, 2).reshape(batch, tokens, width))
        return out_BND


class MLP(nn.Module):
    """Two dense layers with the tanh-approximated GELU of the JAX code, dropout after each."""

    def __init__(self, size: Size, *, dropout: float) -> None:
        super().__init__()
        self.dense1 = nn.Linear(size.width, size.mlp_width)
        self.dense2 = nn.Linear(size.mlp_width, size.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, z_BND: torch.Tensor) -> torch.Tensor:
        hidden_BNM = self.dropout(F.gelu(self.dense1(z_BND), approximate="tanh"))
        out_BND: torch.Tensor = self.dropout(self.dense2(hidden_BNM))
        return out_BND


class Head(nn.Linear):
    """Linear classifier whose product, bias and constant are fp32 whatever the weights' precision."""

    def __init__(self, width: int, num_classes: int, *, constant: float) -> None:
        super().__init__(width, num_classes)
        self.constant = constant

    def forward(self, y_BD: torch.Tensor) -> torch.Tensor:
        """[B, D] -> float32[B, K]."""
        return F.linear(y_BD.float(), self.weight.float(), self.bias.float()) + self.constant


def shapes_of(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Name and shape of every parameter, without building the weights."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in ViT(config).named_parameters()}

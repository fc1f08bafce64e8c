"""Initial weights as in the paper's JAX code: every tensor a function of (seed, its name, its shape).

So no copy is kept or sent: each rank makes the part that it owns, and the fp32 master weights get the values before
they are rounded to bf16. Sources: vit_jax/models_vit.py and models_resnet.py (flax's default, lecun_normal, if they set
nothing else), BiT's models.py.
"""

import math
import zlib

import torch

from shards.hashing import derive_key

# Standard deviation of a unit normal truncated at +-2; flax's lecun_normal divides by it.
_TRUNCATED_STD = 0.87962566103423978


def initial_tensor(
    name: str, shape: tuple[int, ...], *, seed: int, position_std: float = 0.02, layer_scale: float = 0.0
) -> torch.Tensor:
    """float32 initial value of the parameter `name`; `position_std` and `layer_scale` as in ModelConfig. Raises
    ValueError for an unknown name."""
    generator = torch.Generator().manual_seed(derive_key(seed, zlib.crc32(name.encode())) >> 1)
    layer, kind = name.split(".")[-2:] if "." in name else ("", name)
    if layer in ("norm", "norm1", "norm2", "norm3", "norm_root", "norm_proj", "norm_out", "q_norm", "k_norm"):
        is_one = kind == "weight" and layer != "norm_out"  # gn3 of a post-activation unit, which starts as the identity
        return torch.ones(shape) if is_one else torch.zeros(shape)
    if kind in ("position", "position_x", "position_y", "relative"):
        return torch.empty(shape).normal_(std=position_std, generator=generator)
    if kind == "registers":  # as in DINOv2: equal ones would have equal gradients and stay equal
        return torch.empty(shape).normal_(std=1e-6, generator=generator)
    if layer == "head" or kind == "class_token" or (layer, kind) == ("mask", "token"):
        return torch.zeros(shape)
    if layer in ("scale1", "scale2") and kind == "gamma":
        return torch.full(shape, layer_scale)
    if layer in ("dense1", "dense2") and kind == "bias":
        return torch.empty(shape).normal_(std=1e-6, generator=generator)
    if kind == "bias":
        return torch.zeros(shape)
    if layer in ("patch", "representation", "conv_root", "conv1", "conv2", "conv3", "conv_proj"):
        return _lecun_normal(shape, generator)
    if layer == "qkv":  # q, k and v are three matrices: the fan of the fused one would make the bound too small
        matrices = [_xavier_uniform((shape[0] // 3, shape[1]), generator) for _ in range(3)]
        return torch.cat(matrices)
    if layer == "key_value":
        return torch.cat([_xavier_uniform((shape[0] // 2, shape[1]), generator) for _ in range(2)])
    if kind == "probe":  # flax takes the first of its last two dimensions, 1, for the fan in
        return _xavier_uniform((shape[1], shape[2]), generator).unsqueeze(0)
    if layer in ("out", "query", "dense1", "dense2"):
        return _xavier_uniform((shape[0], shape[1]), generator)
    raise ValueError(f"no initial value is defined for the parameter {name!r}")


def _lecun_normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Variance 1 / fan in after truncation at two deviations; `shape`: (out, in) or (out, in, kernel, kernel)."""
    std = math.sqrt(1.0 / math.prod(shape[1:])) / _TRUNCATED_STD
    return torch.nn.init.trunc_normal_(torch.empty(shape), std=std, a=-2 * std, b=2 * std, generator=generator)


def _xavier_uniform(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    bound = math.sqrt(6.0 / (shape[0] + shape[1]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)

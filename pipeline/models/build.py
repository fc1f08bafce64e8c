"""Builds models: initial weights, the shapes of parameters, and blocks that are compiled or recomputed.

Initial weights are as in the paper's JAX code, except for a head with `model.head_std`, which is timm's and DeiT's.
Every tensor is a function of (seed, its name, its shape), so no copy is kept or sent: each rank makes the part that it
owns, and the fp32 master weights get the values before they are rounded to bf16. Sources: vit_jax/models_vit.py and
models_resnet.py (flax's default, lecun_normal, if they set nothing else), BiT's models.py.
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pipeline.models.attention import allow_variants, kernel_in_use, key_caches_by_kernel
from pipeline.models.config import ModelConfig
from pipeline.models.resnet import BasicPreActivationUnit, BiT, HybridResNet, PostActivationUnit, PreActivationUnit
from pipeline.models.vit import Block, ViT
from shards.hashing import derive_key

# Standard deviation of a unit normal truncated at +-2; flax's lecun_normal divides by it.
_TRUNCATED_STD = 0.87962566103423978
# Standard deviations of DINOv2 and DeiT. Equal registers would have equal gradients and stay equal.
_TOKEN_STDS = {"registers": 1e-6, "distillation_token": 0.02}
Model = ViT | BiT
_NORMS = frozenset(
    ("norm", "norm1", "norm2", "norm3", "norm_root", "norm_proj", "norm_out", "q_norm", "k_norm", "patch_norm")
)
_DRAWS = frozenset({torch.Tensor.normal_, nn.init.kaiming_uniform_, nn.init.uniform_})


def build_model(config: ModelConfig, *, seed: int = 0) -> Model:
    """Builds the model with initial weights, which depend only on (seed, tensor name)."""
    model = unfilled_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_of(config, name, tuple(parameter.shape), seed=seed))
    return model


def unfilled_model(config: ModelConfig) -> Model:
    """Builds the model with arbitrary weights, to be filled from a checkpoint, a weights file or `initial_tensor`."""
    with _NoDraws():
        return BiT(config) if config.is_bit else ViT(config)


class _NoDraws(TorchFunctionMode):
    """A context in which torch's layers leave the memory of their parameters as it is. Drawing values for ViT-H/14 that
    nobody uses takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def initial_of(config: ModelConfig, name: str, shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    """Returns the float32 initial value of a model's parameter `name`."""
    is_gated = not config.is_bit and config.mlp == "swiglu"
    if is_gated and name.startswith("blocks.") and name.endswith("mlp.dense1.weight"):
        # The gate and what it multiplies are two matrices, as q, k and v are three.
        half = (shape[0] // 2, *shape[1:])
        return torch.cat([initial_tensor(f"{part}.{name}", half, seed=seed) for part in ("gate", "value")])
    stds = {"position_std": config.position_std, "head_std": config.head_std}
    return initial_tensor(name, shape, seed=seed, layer_scale=config.layer_scale, **stds)


def initial_tensor(
    name: str,
    shape: tuple[int, ...],
    *,
    seed: int,
    position_std: float = 0.02,
    head_std: float = 0.0,
    layer_scale: float = 0.0,
) -> torch.Tensor:
    """Returns the float32 initial value of the parameter `name`; `position_std`, `head_std` and `layer_scale` are as in
    ModelConfig. Raises ValueError for an unknown name."""
    generator = torch.Generator().manual_seed(derive_key(seed, zlib.crc32(name.encode())) >> 1)
    layer, kind = name.split(".")[-2:] if "." in name else ("", name)
    if layer in _NORMS:
        is_one = kind == "weight" and layer != "norm_out"  # gn3 of a post-activation unit, which starts as the identity
        return torch.ones(shape) if is_one else torch.zeros(shape)
    stds = dict.fromkeys(("position", "position_x", "position_y", "relative"), position_std) | _TOKEN_STDS
    if layer in ("head", "head_dist") and head_std:
        stds["weight"] = head_std
    if kind in stds:
        return torch.empty(shape).normal_(std=stds[kind], generator=generator)
    if layer in ("head", "head_dist") or kind == "class_token" or (layer, kind) == ("mask", "token"):
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
    if kind == "probe":  # flax takes the last dimension but one, 1, as the fan in
        return _xavier_uniform((shape[1], shape[2]), generator).unsqueeze(0)
    if layer in ("out", "query", "dense1", "dense2"):
        return _xavier_uniform((shape[0], shape[1]), generator)
    raise ValueError(f"no initial value is defined for the parameter {name!r}")


def _lecun_normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draws from a normal distribution, truncated at two deviations, that has the variance 1 / fan in after the
    truncation. `shape`: (out, in) or (out, in, kernel, kernel)."""
    std = math.sqrt(1.0 / math.prod(shape[1:])) / _TRUNCATED_STD
    return torch.nn.init.trunc_normal_(torch.empty(shape), std=std, a=-2 * std, b=2 * std, generator=generator)


def _xavier_uniform(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    bound = math.sqrt(6.0 / (shape[0] + shape[1]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def shapes_of(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Returns the name and shape of every parameter, without building the weights."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in unfilled_model(config).named_parameters()}


def blocks_of(model: Model) -> Iterator[nn.Module]:
    """Yields the repeated parts of a model: transformer blocks, and the units of its ResNet."""
    for module in model.modules():
        if isinstance(module, Block | PostActivationUnit | PreActivationUnit | BasicPreActivationUnit):
            yield module


def compile_blocks(
    model: Model,
    *,
    deterministic: bool = False,
    rounds_as_eager: bool = False,
    cuda_graphs: bool = False,
    on_gpu: bool = False,
    hooks_outside: bool = False,
    tuned: bool = False,
    recomputes: bool = False,
    backend: str = "inductor",
) -> None:
    """Compiles block by block with torch.compile, in place: parameters keep their names, and equal blocks share
    kernels.

    A block is compiled when it is first called: once for each kind of block and batch size, for training and for
    evaluation. On a GPU, inductor times variants of a reduction, and pads matrix products where that is faster, so a
    restarted run may add in another order. With `deterministic` it chooses by rule instead, as it always does on a CPU,
    and a restarted run computes the same bits. Dropout follows torch's generator, but draws other masks than without
    compilation.

    `rounds_as_eager`: intermediate results are rounded to bf16 even inside fused kernels, as without compilation.
    `on_gpu`: blocks keep the sum after a residual for the backward pass, instead of the branch (residuals.py).
    `cuda_graphs`: each block is launched as a CUDA graph; call torch.compiler.cudagraph_mark_step_begin before each
    micro-batch. `hooks_outside`: a block's hooks, with which ZeRO-3 gathers its weights, are not compiled. The blocks
    must get flat tensors before they are called. `tuned`: on a GPU, biases' gradients are summed in the kernels that
    compute or read them (bias_sums.py), and inductor searches around its choice of each kernel's sizes and warps
    (coordinate descent), except with `deterministic`. `recomputes`: Transformer blocks keep only their products and
    attention for the backward pass (residuals.py).
    """
    key_caches_by_kernel(kernel_in_use())
    allow_variants()
    options: dict[str, Any] = {}
    of_blocks: dict[str, Any] = {}  # in addition, for Transformer blocks
    if backend == "inductor":
        chosen = {
            "deterministic": deterministic,
            "emulate_precision_casts": rounds_as_eager,
            "triton.cudagraphs": cuda_graphs,
        }
        options = {name: True for name, is_on in chosen.items() if is_on}
        if on_gpu or recomputes:
            from pipeline.models.residuals import KeepResiduals  # noqa: PLC0415 - it loads inductor, which takes 1 s

            of_blocks["joint_custom_pre_pass"] = KeepResiduals(keeps_sums=on_gpu, recomputes=recomputes)
        if on_gpu and tuned:
            from pipeline.models.bias_sums import FuseBiasSums  # noqa: PLC0415 - as above

            options |= {"post_grad_custom_pre_pass": FuseBiasSums(), "coordinate_descent_tuning": not deterministic}
    for block in blocks_of(model):
        its = (options | of_blocks if isinstance(block, Block) else options) or None
        if hooks_outside:
            compiled = torch.compile(partial(_computed, block), backend=backend, dynamic=False, options=its)
            block.computed = compiled  # type: ignore[assignment]
        else:
            block.compile(backend=backend, dynamic=False, options=its)


def _computed(block: Any, *inputs: Any) -> Any:
    """Calls the method of the class that a block has when it is called: flat tensors change its class."""
    return type(block).computed(block, *inputs)


def compile_fault(device: torch.device) -> str:
    """Returns a line that says why torch.compile cannot make kernels for this device; empty if it can.

    To find out, it compiles a small kernel. This takes a few seconds, most of which a run that compiles spends anyway.
    """
    try:
        torch.compile(_doubled, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # from the compiler, Triton or the file system; it would fail in the run, too
        lines = str(error).splitlines() or [type(error).__name__]
        detail = [line.strip() for line in lines[1:] if "error:" in line]
        return ": ".join(lines[:1] + detail[:1])
    return ""


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def checkpoint_blocks(model: Model) -> None:
    """Turns on activation checkpointing: only the input of each block is kept; the rest is recomputed in the backward
    pass."""
    for module in model.modules():
        if isinstance(module, ViT | BiT | HybridResNet):
            module.checkpoint_blocks = True

"""Makes Transformer blocks keep their matrix products and attention, and recompute what is cheap in the backward pass.

This is selective recomputation ("Reducing Activation Recomputation in Large Transformer Models", Korthikanti et al.,
2022), with another choice of what is kept: a ViT's attention weights are never stored by its fused kernels, so what is
left to save are the inputs of dense layers that a norm or the GELU makes. A block of ViT-H/14 then keeps 10 tensors of
[B, N, D] instead of 16. A tensor is recomputed from tensors that autograd keeps anyway, by the same kernel, so all bits
stay the same.

Blocks that are not compiled do this with hooks on what autograd saves, here. In compiled blocks, the compiler does it
(residuals.py).

Kept anyway: the inputs of norms and their statistics, and the dense layers' results. Not recomputed: the MLP's hidden
layer after dropout, rotated queries and keys, and in axial attention along columns the reordered input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pipeline.models.vit import Block

_Compute = Callable[..., torch.Tensor]


def recompute_selectively(model: nn.Module) -> None:
    """Makes each Transformer block keep only its products and attention for the backward pass, in place. The blocks
    must not be compiled. A hybrid's ResNet keeps everything."""
    for module in model.modules():
        if isinstance(module, Block):
            module.recompute = _Recomputation(module)


@dataclass(frozen=True)
class _Again:
    """A tensor that is not kept: how to compute it, the packed tensors to compute it from, and its place in the result
    (shape, strides, first element)."""

    compute: _Compute
    inputs: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Recomputation:
    """A context for the forward pass of one block. In it, autograd keeps the outputs of norms and of the GELU as what
    they are computed from.

    PyTorch calls only the innermost hooks on saved tensors, so these call the ones around them. With ZeRO-3, those
    replace the gathered weights (flat_blocks.py).
    """

    def __init__(self, block: Block) -> None:
        # Tensors that need not be kept, by the address of their storage: each with how it is computed, and from what.
        self._made: dict[int, tuple[torch.Tensor, _Compute, tuple[torch.Tensor, ...]]] = {}
        self._hooks: saved_tensors_hooks | None = None
        for module in block.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.register_forward_hook(self._after_norm)
        block.mlp.gelu = partial(self._computed, block.mlp.gelu)

    def __enter__(self) -> None:
        around = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack, unpack = around or (_same, _same)
        self._hooks = saved_tensors_hooks(partial(self._packed, pack), partial(_unpacked, unpack))
        self._hooks.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(kind, error, traceback)
        self._hooks = None
        self._made.clear()

    def _after_norm(self, norm: nn.LayerNorm | nn.RMSNorm, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if self._hooks is not None:
            # By name: in a flat block (flat_blocks.py), they are views of its one tensor and no parameters of the norm.
            kind: _Compute = F.rms_norm
            scaled_by: tuple[torch.Tensor, ...] = (norm.weight,)
            if isinstance(norm, nn.LayerNorm):
                kind, scaled_by = F.layer_norm, (norm.weight, norm.bias)
            self._note(output, partial(_normalised, kind, norm.normalized_shape, norm.eps), (*inputs, *scaled_by))

    def _computed(self, compute: _Compute, x: torch.Tensor) -> torch.Tensor:
        result = compute(x)
        if self._hooks is not None:
            self._note(result, compute, (x,))
        return result

    def _note(self, result: torch.Tensor, compute: _Compute, inputs: tuple[torch.Tensor, ...]) -> None:
        # The result is held until it is packed, so that no other storage gets its address.
        detached = tuple(tensor.detach() for tensor in inputs)
        self._made[result.untyped_storage()._cdata] = (result.detach(), compute, detached)

    def _packed(self, pack: Callable[[torch.Tensor], Any], saved: torch.Tensor) -> Any:
        found = self._made.pop(saved.untyped_storage()._cdata, None)
        if found is None:
            return pack(saved)
        _, compute, inputs = found
        return _Again(compute, tuple(map(pack, inputs)), saved.shape, saved.stride(), int(saved.storage_offset()))


def _unpacked(unpack: Callable[[Any], torch.Tensor], packed: Any) -> torch.Tensor:
    if not isinstance(packed, _Again):
        return unpack(packed)
    with torch.no_grad():
        again = packed.compute(*map(unpack, packed.inputs))
    return again.as_strided(packed.shape, packed.stride, packed.offset)


def _normalised(
    kind: _Compute, shape: tuple[int, ...], epsilon: float | None, x: torch.Tensor, *parameters: torch.Tensor
) -> torch.Tensor:
    return kind(x, shape, *parameters, eps=epsilon)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor

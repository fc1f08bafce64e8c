"""An MLP whose GELU and whose first bias's gradient are computed inside its matrix products, by QuACK's kernels.

A product keeps its sums in registers until it writes them (its epilogue). Inductor writes the sums of the first
product, reads them for GELU and writes its result; in the backward pass it writes the gradient of that result, reads it
for the derivative of GELU, and sums what comes out for the bias. Here the first product writes both its sums and their
GELU, and the backward product of the second layer multiplies by the derivative and sums over tokens before it writes:
2.7 GB less of a block of ViT-H/14 with 256 images (benchmarks/fusion_gpu.py). All other products stay PyTorch's.

The two kernels are QuACK's (https://github.com/Dao-AILab/quack): `gemm_act`, and the epilogue `dact_dbias_mod`. They
are custom operators, so a compiled block remains one graph. Only this module loads QuACK, and only for a run that asks
for it. On a CPU the operators compute the same in plain PyTorch, rounded where QuACK rounds: sums, bias, GELU and its
derivative are fp32, and each result is rounded once. Without them, GELU would get the rounded sums, and its derivative
the rounded gradient.

Shape letters: B images, N tokens, T = B N, D width, M MLP width. u: the sums of the first product, h: their GELU.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.autograd.function import once_differentiable

from pipeline.models.layers import MLP
from pipeline.models.vit import Block

_LEAST_CAPABILITY = (9, 0)  # Hopper's; for older GPUs QuACK has other kernels, which nobody has tried here
_PACKAGE, _QUACK = "quack-kernels", "0.6."  # as in pyproject.toml


def fused_mlp_fault(device: torch.device) -> str:
    """Returns why this process cannot compute fused MLPs on a device; empty if it can."""
    if device.type != "cuda":
        return "QuACK has no kernels for a CPU"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        least, found = (".".join(map(str, each)) for each in (_LEAST_CAPABILITY, capability))
        return f"{name} has compute capability {found}, and the kernels begin with {least}"
    try:
        found = version(_PACKAGE) if find_spec("quack") else ""
    except PackageNotFoundError:  # another package named quack
        found = ""
    if found.startswith(_QUACK):
        return ""
    what = f"{_PACKAGE} is {found}, not {_QUACK}x" if found else f"{_PACKAGE} is not installed"
    return f"{what} (pip install 'patchline[quack]')"


def fuse_mlps(model: nn.Module) -> None:
    """Makes the MLP of each block compute its gradients by fused products, in place; parameters keep their names. Call
    it before blocks are compiled. The model must have no dropout."""
    _define_operators()
    for module in model.modules():
        if isinstance(module, Block):
            module.mlp.fused = _fused


def hidden_by_pytorch(
    x_TD: torch.Tensor, weight_MD: torch.Tensor, bias_M: torch.Tensor, is_tanh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns u and h, [T, M] each, in the precision of `x_TD`. `is_tanh`: whether GELU is its tanh approximation."""
    u_TM = F.linear(x_TD.float(), weight_MD.float(), bias_M.float())
    return u_TM.to(x_TD.dtype), F.gelu(u_TM, approximate=_form(is_tanh)).to(x_TD.dtype)


def hidden_gradients_by_pytorch(
    dy_TD: torch.Tensor, weight_DM: torch.Tensor, u_TM: torch.Tensor, is_tanh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradient of u, [T, M], and its sum over tokens, [M], which is the first bias's gradient. `dy_TD`: the
    gradient of the second layer's result; `weight_DM`: that layer's weight."""
    dh_TM = dy_TD.float() @ weight_DM.float()
    du_TM = torch.ops.aten.gelu_backward(dh_TM, u_TM.float(), approximate=_form(is_tanh))
    return du_TM.to(dy_TD.dtype), du_TM.sum(0).to(dy_TD.dtype)


def _form(is_tanh: bool) -> str:
    return "tanh" if is_tanh else "none"


def _quack_form(is_tanh: bool) -> str:
    return "gelu_tanh_approx" if is_tanh else "gelu_erf"


def hidden_by_quack(
    x_TD: torch.Tensor, weight_MD: torch.Tensor, bias_M: torch.Tensor, is_tanh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the same as `hidden_by_pytorch`, by one kernel of a GPU. Its tiles are QuACK's default for the GPU: to
    measure others, QuACK would copy the inputs several times and might choose others in the next run."""
    from quack.gemm_interface import gemm_act  # noqa: PLC0415 - optional, and takes seconds

    u_TM, h_TM = gemm_act(
        x_TD.contiguous(), weight_MD.mT, bias=bias_M.unsqueeze(0), activation=_quack_form(is_tanh), tuned=False
    )
    return u_TM, h_TM


def hidden_gradients_by_quack(
    dy_TD: torch.Tensor, weight_DM: torch.Tensor, u_TM: torch.Tensor, is_tanh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the same as `hidden_gradients_by_pytorch`, by one kernel of a GPU, which leaves a sum of each 128 tokens,
    and PyTorch's for the sum of those."""
    from quack.epilogue.library import dact_dbias_mod  # noqa: PLC0415 - as above

    epilogue = dact_dbias_mod(_quack_form(is_tanh))
    found = epilogue(dy_TD.contiguous(), weight_DM, u_TM, tuned=False)
    return found["D"], found["dwb"].to(dy_TD.dtype)


def _fake_hidden(
    x_TD: torch.Tensor,
    weight_MD: torch.Tensor,
    bias_M: torch.Tensor,  # noqa: ARG001
    is_tanh: bool,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    size = x_TD.shape[0], weight_MD.shape[0]
    return x_TD.new_empty(size), x_TD.new_empty(size)


def _fake_hidden_gradients(
    dy_TD: torch.Tensor,
    weight_DM: torch.Tensor,
    u_TM: torch.Tensor,
    is_tanh: bool,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    return dy_TD.new_empty(u_TM.shape), dy_TD.new_empty(weight_DM.shape[1:])


@cache
def _define_operators() -> None:
    """Defines the operators patchline::mlp_hidden and patchline::mlp_hidden_gradients: QuACK's on a GPU, PyTorch's on a
    CPU. They are defined when a job asks for fused MLPs, since that takes some milliseconds."""
    hidden = torch.library.custom_op("patchline::mlp_hidden", hidden_by_pytorch, mutates_args=())
    gradients = torch.library.custom_op("patchline::mlp_hidden_gradients", hidden_gradients_by_pytorch, mutates_args=())
    hidden.register_kernel("cuda", hidden_by_quack)
    gradients.register_kernel("cuda", hidden_gradients_by_quack)
    hidden.register_fake(_fake_hidden)
    gradients.register_fake(_fake_hidden_gradients)


class _FusedMLP(torch.autograd.Function):
    """The whole MLP. It keeps u and h for its backward pass, as a block without fused products does."""

    @staticmethod
    def forward(ctx: Any, z_BND: torch.Tensor, is_tanh: bool, *weights: torch.Tensor) -> torch.Tensor:
        """Returns the MLP's result, [B, N, D]. `weights`: the weight and the bias of each layer, in order."""
        weight1_MD, bias1_M, weight2_DM, bias2_D = weights
        x_TD = z_BND.reshape(-1, z_BND.shape[-1])
        u_TM, h_TM = torch.ops.patchline.mlp_hidden(x_TD, weight1_MD, bias1_M, is_tanh)
        ctx.save_for_backward(x_TD, weight1_MD, weight2_DM, u_TM, h_TM)
        ctx.is_tanh = is_tanh
        return F.linear(h_TM, weight2_DM, bias2_D).reshape(z_BND.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of the MLP's input and of each weight."""
        x_TD, weight1_MD, weight2_DM, u_TM, h_TM = ctx.saved_tensors
        dy_TD = dy_BND.reshape(-1, dy_BND.shape[-1])
        du_TM, dbias1_M = torch.ops.patchline.mlp_hidden_gradients(dy_TD, weight2_DM, u_TM, ctx.is_tanh)
        dx_BND = (du_TM @ weight1_MD).reshape(dy_BND.shape)
        return dx_BND, None, du_TM.mT @ x_TD, dbias1_M, dy_TD.mT @ h_TM, dy_TD.sum(0)


def _fused(z_BND: torch.Tensor, mlp: MLP) -> torch.Tensor:
    layers = mlp.dense1, mlp.dense2
    weights = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    result: torch.Tensor = _FusedMLP.apply(z_BND, mlp.is_tanh, *weights)  # type: ignore[no-untyped-call]
    return result

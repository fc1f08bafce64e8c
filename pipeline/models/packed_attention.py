"""Attention that writes the gradients of q, k and v into one tensor, in the order in which the product before it needs
them.

PyTorch's kernels return three gradients, which a copy then joins: in a block of ViT-H/14 with 256 images, it reads and
writes 1,011 MB. Two libraries have kernels that write wherever they are told to:

    flash3        FlashAttention-3 ("Fast and Accurate Attention with Asynchrony and Low-precision", Shah et al., 2024;
                  hopper/flash_api.cpp), by the operators behind PyTorch's own switch (torch/nn/attention/_fa3.py)
    cudnn_packed  cuDNN, by the graphs of its frontend (nvidia-cudnn-frontend), which takes any strides

Both are PyTorch operators, so that the compiler and autograd see one node. On a CPU they compute the same with
PyTorch's own kernel. No GPU has run them yet: `engine.attention` must name them.

Shape letters: B images, N tokens, h heads, d width of a head.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

FLASH3, CUDNN_PACKED = "flash3", "cudnn_packed"
_PACKAGES = {
    FLASH3: ("flash_attn_interface", "FlashAttention-3, from hopper/ of github.com/Dao-AILab/flash-attention"),
    CUDNN_PACKED: ("cudnn", "pip install patchline[cudnn]"),
}
_Q, _K, _V, _A, _LSE, _DA, _DQ, _DK, _DV = range(1, 10)  # the tensors of cuDNN's graphs
Tensors = tuple[torch.Tensor, torch.Tensor]


def packed_fault(name: str, device: torch.device) -> str:
    """Returns why the kernel `name` cannot run on this device; empty if nothing is known to be missing."""
    package, source = _PACKAGES[name]
    if device.type != "cuda":
        return f"{name} is a kernel for GPUs"
    if find_spec(package) is None:
        return f"the package {package} is not installed ({source})"
    return ""


def by_operator(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function that computes softmax(q k^T / sqrt(d)) v, [B, h, N, d], by the kernel `name` from q, k and v
    in one tensor, [3, B, h, N, d]. If that is a view of their product, [B, N, 3 x h x d], neither it nor its gradient
    is copied. On a GPU, fp32 is left to PyTorch, since the kernels do not support it."""
    operator = _operator(name)

    def attend_packed(qkv_3BhNd: torch.Tensor) -> torch.Tensor:
        if qkv_3BhNd.device.type == "cuda" and qkv_3BhNd.dtype == torch.float32:
            q_BhNd, k_BhNd, v_BhNd = qkv_3BhNd.unbind(0)
            return functional.scaled_dot_product_attention(q_BhNd, k_BhNd, v_BhNd)
        a_BNhd, _ = operator(qkv_3BhNd.permute(1, 3, 0, 2, 4).contiguous())
        return a_BNhd.transpose(1, 2)

    return attend_packed


@contextmanager
def flash3_switched_on() -> Iterator[None]:
    """Makes PyTorch's own attention use FlashAttention-3, too, wherever it would use flash. Raises RuntimeError if the
    package is missing, or has no gradients."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel")
        try:
            activate_flash_attention_impl("FA3")
        except ImportError as error:
            raise RuntimeError(f"FlashAttention-3 cannot be loaded: {error}") from error
    try:
        yield
    finally:
        restore_flash_attention_impl()


def _flash3(qkv_BN3hd: torch.Tensor) -> Tensors:
    q_BNhd, k_BNhd, v_BNhd = qkv_BN3hd.unbind(2)
    # As torch's switch does: several splits of the keys may add up in another order. 0: the kernel chooses.
    num_splits = 1 if torch.are_deterministic_algorithms_enabled() else 0
    a_BNhd, lse_BhN, *_ = torch.ops.flash_attn_3.fwd(
        q_BNhd, k_BNhd, v_BNhd, softmax_scale=_scale(qkv_BN3hd), num_splits=num_splits
    )
    return a_BNhd, lse_BhN


def _flash3_backward(
    da_BNhd: torch.Tensor, qkv_BN3hd: torch.Tensor, a_BNhd: torch.Tensor, lse_BhN: torch.Tensor
) -> torch.Tensor:
    dqkv_BN3hd = torch.empty_like(qkv_BN3hd)
    dq_BNhd, dk_BNhd, dv_BNhd = dqkv_BN3hd.unbind(2)
    torch.ops.flash_attn_3.bwd(
        da_BNhd.contiguous(),
        *qkv_BN3hd.unbind(2),
        a_BNhd,
        lse_BhN,
        dq=dq_BNhd,
        dk=dk_BNhd,
        dv=dv_BNhd,
        softmax_scale=_scale(qkv_BN3hd),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return dqkv_BN3hd


def _cudnn(qkv_BN3hd: torch.Tensor) -> Tensors:
    batch, tokens, _, heads, _ = qkv_BN3hd.shape
    a_BNhd = torch.empty_like(qkv_BN3hd[:, :, 0], memory_format=torch.contiguous_format)
    lse_BhN = qkv_BN3hd.new_empty((batch, heads, tokens), dtype=torch.float32)
    run = _cudnn_graph(tuple(qkv_BN3hd.shape), qkv_BN3hd.dtype, qkv_BN3hd.device)
    run(_by_number(qkv_BN3hd, _Q, _K, _V) | {_A: a_BNhd.transpose(1, 2), _LSE: lse_BhN.unsqueeze(-1)})
    return a_BNhd, lse_BhN


def _cudnn_backward(
    da_BNhd: torch.Tensor, qkv_BN3hd: torch.Tensor, a_BNhd: torch.Tensor, lse_BhN: torch.Tensor
) -> torch.Tensor:
    dqkv_BN3hd = torch.empty_like(qkv_BN3hd)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    run = _cudnn_graph(
        tuple(qkv_BN3hd.shape), qkv_BN3hd.dtype, qkv_BN3hd.device, is_backward=True, is_deterministic=is_deterministic
    )
    given = {_A: a_BNhd.transpose(1, 2), _DA: da_BNhd.contiguous().transpose(1, 2), _LSE: lse_BhN.unsqueeze(-1)}
    run(_by_number(qkv_BN3hd, _Q, _K, _V) | given | _by_number(dqkv_BN3hd, _DQ, _DK, _DV))
    return dqkv_BN3hd


def _by_number(qkv_BN3hd: torch.Tensor, *numbers: int) -> dict[int, torch.Tensor]:
    """Returns views of q, k and v, [B, h, N, d], by their numbers in a graph."""
    return dict(zip(numbers, qkv_BN3hd.permute(2, 0, 3, 1, 4), strict=True))


@cache
def _cudnn_graph(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_backward: bool = False,
    is_deterministic: bool = False,
) -> Callable[[dict[int, torch.Tensor]], None]:
    """Builds cuDNN's graph for q, k and v in one tensor of this shape, [B, N, 3, h, d]. Returns a function that runs it
    on tensors by their numbers. Raises RuntimeError if cuDNN has no kernel for it."""
    import cudnn  # noqa: PLC0415 - an optional package

    batch, tokens, _, heads, width = shape
    size, row = (batch, heads, tokens, width), heads * width
    packed, joined = (3 * tokens * row, width, 3 * row, 1), (tokens * row, width, row, 1)
    of_sums = {"dim": (batch, heads, tokens, 1), "stride": (heads * tokens, tokens, 1, 1)}
    types = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
    if dtype not in types:
        raise RuntimeError(f"cuDNN has no attention in {dtype}")
    handle = _cudnn_handle(device)
    graph = cudnn.pygraph(
        handle=handle,
        io_data_type=types[dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )

    def given(number: int, strides: tuple[int, ...]) -> Any:
        return graph.tensor(name=str(number), uid=number, dim=size, stride=strides, data_type=types[dtype])

    def made(tensor: Any, number: int, strides: tuple[int, ...]) -> None:
        tensor.set_output(True).set_uid(number).set_dim(size).set_stride(strides).set_data_type(types[dtype])

    q, k, v = (given(number, packed) for number in (_Q, _K, _V))
    try:
        if is_backward:
            sums = graph.tensor(name="sums", uid=_LSE, data_type=cudnn.data_type.FLOAT, **of_sums)
            gradients = graph.sdpa_backward(
                q=q,
                k=k,
                v=v,
                o=given(_A, joined),
                dO=given(_DA, joined),
                stats=sums,
                attn_scale=1 / math.sqrt(width),
                use_deterministic_algorithm=is_deterministic,
            )
            for gradient, number in zip(gradients, (_DQ, _DK, _DV), strict=True):
                made(gradient, number, packed)
        else:
            result, sums = graph.sdpa(q=q, k=k, v=v, attn_scale=1 / math.sqrt(width), generate_stats=True)
            made(result, _A, joined)
            sums.set_output(True).set_uid(_LSE).set_dim(of_sums["dim"]).set_stride(of_sums["stride"])
            sums.set_data_type(cudnn.data_type.FLOAT)
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except cudnn.cudnnGraphNotSupportedError as error:
        raise RuntimeError(f"cuDNN has no such kernel: {error}") from error

    def run(tensors: dict[int, torch.Tensor]) -> None:
        workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph.execute(tensors, workspace, handle=handle)

    return run


@cache
def _cudnn_handle(device: torch.device) -> Any:
    import cudnn  # noqa: PLC0415 - an optional package

    with torch.cuda.device(device):
        return cudnn.create_handle()


def _on_cpu(qkv_BN3hd: torch.Tensor) -> Tensors:
    a_BhNd, lse_BhN = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*qkv_BN3hd.permute(2, 0, 3, 1, 4))
    return a_BhNd.transpose(1, 2).contiguous(), lse_BhN.contiguous()


def _on_cpu_backward(
    da_BNhd: torch.Tensor, qkv_BN3hd: torch.Tensor, a_BNhd: torch.Tensor, lse_BhN: torch.Tensor
) -> torch.Tensor:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    da_BhNd, a_BhNd = da_BNhd.transpose(1, 2), a_BNhd.transpose(1, 2)
    gradients = backward(da_BhNd, *qkv_BN3hd.permute(2, 0, 3, 1, 4), a_BhNd, lse_BhN, 0.0, False)
    # (B, h, N, d), three times -> (B, N, 3, h, d)
    return torch.stack([gradient.transpose(1, 2) for gradient in gradients], dim=2)


def _fake(qkv_BN3hd: torch.Tensor) -> Tensors:
    batch, tokens, _, heads, width = qkv_BN3hd.shape
    lse_BhN = qkv_BN3hd.new_empty((batch, heads, tokens), dtype=torch.float32)
    return qkv_BN3hd.new_empty(batch, tokens, heads, width), lse_BhN


def _fake_backward(
    da_BNhd: torch.Tensor,  # noqa: ARG001
    qkv_BN3hd: torch.Tensor,
    a_BNhd: torch.Tensor,  # noqa: ARG001
    lse_BhN: torch.Tensor,  # noqa: ARG001
) -> torch.Tensor:
    return torch.empty_like(qkv_BN3hd)


def _keep(ctx: Any, inputs: tuple[torch.Tensor], output: Tensors) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _scale(qkv_BN3hd: torch.Tensor) -> float:
    width: int = qkv_BN3hd.shape[-1]
    return 1 / math.sqrt(width)


@cache
def _operator(name: str) -> Callable[[torch.Tensor], Tensors]:
    """Defines the operators patchline::attend_by_NAME and its backward: the kernel's on a GPU, PyTorch's own on a CPU.
    They are defined when a job names the kernel, since that takes some milliseconds."""
    forward, backward = _FUNCTIONS[name]
    operator = torch.library.custom_op(f"patchline::attend_by_{name}", _on_cpu, mutates_args=(), device_types="cpu")
    gradient = torch.library.custom_op(
        f"patchline::attend_by_{name}_backward", _on_cpu_backward, mutates_args=(), device_types="cpu"
    )
    operator.register_kernel("cuda")(forward)
    gradient.register_kernel("cuda")(backward)
    operator.register_fake(_fake)
    gradient.register_fake(_fake_backward)

    def of_saved(ctx: Any, da_BNhd: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = gradient(da_BNhd, *ctx.saved_tensors)
        return result

    operator.register_autograd(of_saved, setup_context=_keep)
    return operator


_FUNCTIONS: dict[str, tuple[Callable[..., Tensors], Callable[..., torch.Tensor]]] = {
    FLASH3: (_flash3, _flash3_backward),
    CUDNN_PACKED: (_cudnn, _cudnn_backward),
}

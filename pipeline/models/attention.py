"""Scaled-dot-product attention ("An Image is Worth 16x16 Words", appendix A) with the fastest kernels of each device.

On a GPU, a run calls `use_kernel` with the kernel of `engine.attention`. By default, this is the fastest of PyTorch's
own kernels, which the run measures when it starts. Without that call, as in a deterministic run that names no kernel,
PyTorch chooses. On a CPU, PyTorch's forward pass is fast enough, but it computes bf16 gradients in pieces too small for
the matrix units. Here they are computed as whole matrices, for as many heads and images at a time as fit the cache. On
a Xeon, this takes half to two thirds of PyTorch's time for up to 577 tokens and 7 % more for 1025
(benchmarks/results/kernels.json), and is as exact.

Shape letters: B images, h heads, N tokens, d width of a head, S = B x h.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise, product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from pipeline.models.packed_attention import CUDNN_PACKED, FLASH3, by_operator, flash3_switched_on, packed_fault
from pipeline.ranks.world import QUIET_PROFILER, set_defaults

_MOST_TOKENS = 640  # with more tokens, PyTorch's gradients are as fast
_CACHED_BYTES = 8 << 20  # the fp32 scores computed at a time; more would not stay in the cache
FLEX = "flex"
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    FLEX: None,
    FLASH3: SDPBackend.FLASH_ATTENTION,
    CUDNN_PACKED: SDPBackend.CUDNN_ATTENTION,
}
"""The kernels by their names in `engine.attention`, and PyTorch's own that a model uses where it does not call
`attend`. PyTorch's compiler makes flex; packed_attention.py has the last two."""
BY_NAME_ALONE = (FLEX, FLASH3, CUDNN_PACKED)
"""The kernels that a run uses only if its job names them: flex takes long to compile, and the others were never run on
a GPU."""
Layer = Callable[[], nn.Module]
"""Makes the part of a layer's attention between its two dense layers. It maps q, k and v in one tensor, [3, B, h, N,
d], to [B, h, N, d]."""
_OPERATORS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "patchline::attend_by_flash3": FLASH3,
    "patchline::attend_by_cudnn_packed": CUDNN_PACKED,
}
_MATH = "math"
_TAG = "; attention "
_KEPT_UP_TO, _EQUAL_UP_TO = 1.05, 1.02  # multiples of the fastest time: measurements of one kernel differ by as much
_WARM_UP_ROUNDS, _ROUNDS, _PASSES = 1, 5, 4
_MOST_VARIANTS = 64
_held, _used = ExitStack(), [""]


def _by_pytorch(qkv_3BhNd: torch.Tensor) -> torch.Tensor:
    q_BhNd, k_BhNd, v_BhNd = qkv_3BhNd.unbind(0)
    return F.scaled_dot_product_attention(q_BhNd, k_BhNd, v_BhNd)


_computes: list[Callable[[torch.Tensor], torch.Tensor]] = [_by_pytorch]


def attend(qkv_3BhNd: torch.Tensor) -> torch.Tensor:
    """Computes softmax(q k^T / sqrt(d)) v, [B, h, N, d], from q, k and v in one tensor, in that tensor's precision."""
    is_trained = qkv_3BhNd.requires_grad and torch.is_grad_enabled() and qkv_3BhNd.shape[-2] <= _MOST_TOKENS
    if is_trained and qkv_3BhNd.device.type == "cpu" and qkv_3BhNd.dtype == torch.bfloat16:
        # Plain functions if not compiling: the first call of a custom operator would import torch._dynamo, which takes
        # 1 s.
        operator = _attend_on_cpu if torch.compiler.is_compiling() else _Attend.apply
        result: torch.Tensor = operator(qkv_3BhNd)  # type: ignore[no-untyped-call]
        return result
    return _computes[0](qkv_3BhNd)


def packed_heads(product_BNP: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns q, k and v of each head, [3, B, h, N, d], as views of a layer's first product, [B, N, 3 x h x d]."""
    batch, tokens, _ = product_BNP.shape
    return product_BNP.reshape(batch, tokens, 3, num_heads, -1).permute(2, 0, 3, 1, 4)


def joined_heads(a_BhNd: torch.Tensor) -> torch.Tensor:
    """Returns the results of all heads for each token, [B, N, h x d], which a layer's second product takes."""
    batch, heads, tokens, width = a_BhNd.shape
    return a_BhNd.transpose(1, 2).reshape(batch, tokens, heads * width)


def kernel_seconds(
    name: str,
    shape: tuple[int, int, int, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    layer: Layer | None = None,
    is_compiled: bool = False,
    num_rounds: int = _ROUNDS,
) -> float | str:
    """Times a forward and a backward pass of what a layer computes between its two products, by the kernel `name`. q, k
    and v have the `shape` [B, h, N, d] and are views of one product, [B, N, 3 x h x d]. Its gradient is one tensor of
    the same order in memory, as the product's own gradients need it, so that joining dq, dk and dv is timed, too.

    Returns the median seconds, or a text that says why the kernel cannot be used. `layer`: makes the attention of a
    model's layer, with its masks and norms; None: `attend` alone. `is_compiled`: whether to time attention as in a
    compiled block. `num_rounds`: the rounds of which the median is taken; 1 finds out whether the kernel can be used.
    """
    batch, heads, tokens, width = shape
    size = batch, tokens, 3 * heads * width
    product_BNP = torch.randn(size, dtype=dtype, device=device, requires_grad=True)
    module = layer().to(device, dtype) if layer else attend
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    inputs, ends = [product_BNP, *parameters], []
    backend = KERNELS[name]
    if name in (FLASH3, CUDNN_PACKED) and (fault := packed_fault(name, device)):
        return fault

    def between_products(product_BNP: torch.Tensor) -> torch.Tensor:
        return joined_heads(module(packed_heads(product_BNP, heads)))

    compute = between_products
    try:
        with _chosen(name, device, [] if backend is None else [backend]):
            for number in range(1 + _WARM_UP_ROUNDS + num_rounds):
                # The first pass is not compiled, so that PyTorch's own error says why a kernel cannot be used.
                if number == 1 and is_compiled:
                    key_caches_by_kernel(name)
                    torch.compiler.reset()
                    compute = torch.compile(between_products, dynamic=False)
                    a_BND = compute(product_BNP)
                    torch.autograd.grad(a_BND, inputs, a_BND, allow_unused=True)
                ends.append(_time(device))
                for _ in range(_PASSES):  # launched without waiting, as in a step
                    a_BND = compute(product_BNP)
                    torch.autograd.grad(a_BND, inputs, a_BND, allow_unused=True)
    except RuntimeError as error:  # no kernel for this device, type or shape, or no memory for it
        return str(error).partition("\n")[0][:200]
    finally:
        key_caches_by_kernel(kernel_in_use())
    return statistics.median(after - before for before, after in pairwise(ends[_WARM_UP_ROUNDS:])) / _PASSES


def best_kernel(seconds: Mapping[str, float], *, recorded: str = "") -> str:
    """Chooses a kernel from the measured `seconds` of each. This function is pure.

    The checkpoint's kernel, `recorded`, is kept unless it is unavailable or at least 5 % slower than the fastest.
    Otherwise, the first kernel in KERNELS that is less than 2 % slower than the fastest is taken.
    """
    fastest = min(seconds.values())
    if recorded in seconds and seconds[recorded] < _KEPT_UP_TO * fastest:
        return recorded
    return next(name for name in KERNELS if name in seconds and seconds[name] < _EQUAL_UP_TO * fastest)


def kernel_in_use() -> str:
    """Returns the kernel that `use_kernel` set; empty if PyTorch chooses."""
    return _used[0]


def use_kernel(name: str) -> None:
    """Makes this process compute attention by the kernel `name` from now on, even in blocks that are already compiled.

    Inputs that the kernel does not support are computed by plain products. flex, flash3 and cudnn_packed are used only
    by `attend`. Elsewhere, PyTorch chooses with flex, and uses FlashAttention-3 with flash3 and cudnn with
    cudnn_packed. Raises RuntimeError if flash3's package is missing.
    """
    _held.close()
    _used[0], backend = name, KERNELS[name]
    _held.enter_context(_chosen(name, torch.device("cuda"), [] if backend is None else [backend, SDPBackend.MATH]))
    key_caches_by_kernel(name)
    if "torch._dynamo" in sys.modules:  # a compiled block keeps the kernel with which it was traced
        torch.compiler.reset()


def key_caches_by_kernel(name: str) -> None:
    """Adds to the key of the compiler's caches everything that decides attention's kernel while a block is traced.
    PyTorch leaves this out (pytorch #185449), so a process would otherwise run the kernel that an earlier process
    chose.

    The instruction set of this CPU is added, too: code for wider vectors gives other bits. All other state that is set
    before compiling is in the key already (deterministic algorithms, the precision of products, reductions in bf16 and
    fp16, threads, the compiler's options), or is read when a kernel runs (cuDNN's switches).
    """
    cuda: Any = torch.backends.cuda  # Any, because its functions have no types
    config = torch.compiler.config
    switches = {
        "flash": cuda.flash_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        _MATH: cuda.math_sdp_enabled(),
        "reduced sums": cuda.fp16_bf16_reduction_math_sdp_allowed(),
    }
    state = (name, *(one for one, is_on in switches.items() if is_on), torch._C._get_sdp_priority_order())
    cpu = torch.backends.cpu.get_cpu_capability()
    config.cache_key_tag = f"{config.cache_key_tag.partition(_TAG)[0]}{_TAG}{state} on {cpu}"


@contextmanager
def kernels_seen() -> Iterator[Counter[str]]:
    """Counts the calls of each fused kernel inside the context with PyTorch's profiler. The counter is filled when the
    context ends. It never has `math`, because its products look like any others."""
    calls: Counter[str] = Counter()
    set_defaults(QUIET_PROFILER)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield calls
    calls.update(_OPERATORS[event.name] for event in profiler.events() if event.name in _OPERATORS)


def kernel_that_ran(calls: Mapping[str, int], *, num_layers: int) -> str:
    """Returns the kernel that computed attention in the layers of a model, from the counts of `kernels_seen` over one
    pass or more. Attention pooling may call another kernel, once per pass."""
    if kernel_in_use() == FLEX:  # blocks traced with flex call none of the operators that are counted
        return FLEX
    name, num_calls = max(calls.items(), key=lambda each: each[1], default=(_MATH, 0))
    if name == "flash" and kernel_in_use() == FLASH3:  # PyTorch's operator of flash, which FlashAttention-3 computes
        name = FLASH3
    return name if num_calls >= num_layers else _MATH


@contextmanager
def _chosen(name: str, device: torch.device, backends: list[SDPBackend]) -> Iterator[None]:
    """Makes `attend` use the kernel `name` inside the context, and PyTorch's own attention the first of these backends
    that supports its inputs."""
    before = _computes[0]
    with ExitStack() as stack:
        if backends:  # PyTorch's own order prefers plain products to cuDNN
            stack.enter_context(sdpa_kernel(backends, set_priority=True))
        if name == FLASH3:
            stack.enter_context(flash3_switched_on())
        _computes[0] = _compute_of(name, device)
        stack.callback(_computes.__setitem__, 0, before)
        yield


def _compute_of(name: str, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function of `attend` for the kernel `name`."""
    if name == FLEX:
        flex = _compiled_flex(device)
        return lambda qkv_3BhNd: flex(*qkv_3BhNd.unbind(0))
    if name in (FLASH3, CUDNN_PACKED):
        return by_operator(name)
    return _by_pytorch


def _compiled_flex(device: torch.device) -> Callable[..., Any]:
    """Returns PyTorch's flex_attention, compiled for a GPU. On a CPU it is not compiled; it has no gradients there, and
    raises an error that says so."""
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 - it loads torch._dynamo

    if device.type != "cuda":
        return flex_attention
    allow_variants()
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return compiled


def allow_variants() -> None:
    """Lets torch compile up to 64 variants of one function in this process. It compiles 8 by default, and runs others
    uncompiled, with a warning. A run's steps may have 24 numbers of tokens (settings/tokens.py), stochastic depth and
    evaluations need variants of their own, and a hybrid's ResNet has units of more than 8 shapes."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)


def _time(device: torch.device) -> float:
    """Waits until the device has finished its work, and returns the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _forward(qkv_3BhNd: torch.Tensor) -> torch.Tensor:
    # Usually the result has these strides already, and nothing is copied.
    return _computes[0](qkv_3BhNd).transpose(1, 2).contiguous().transpose(1, 2)


def _backward(da_BhNd: torch.Tensor, qkv_3BhNd: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of `qkv_3BhNd`. It recomputes the attention weights, so that nothing that grows with N^2 is
    kept from the forward pass."""
    # It has the same strides, so that the three gradients need not be joined by a copy.
    dqkv_3BhNd = torch.empty_like(qkv_3BhNd)
    _, batch, heads, tokens, _ = qkv_3BhNd.shape
    num_heads = min(heads, max(1, _CACHED_BYTES // (4 * tokens**2)))
    num_images = max(1, _CACHED_BYTES // (4 * heads * tokens**2))
    for image, head in product(range(0, batch, num_images), range(0, heads, num_heads)):
        some = slice(image, image + num_images), slice(head, head + num_heads)
        for into, gradient in zip(dqkv_3BhNd, _gradients(da_BhNd[some], qkv_3BhNd[:, *some]), strict=True):
            into[some] = gradient
    return dqkv_3BhNd


def _gradients(da_BhNd: torch.Tensor, qkv_3BhNd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of q, k and v from the gradient `da_BhNd` of the result."""
    scale, shape = float(da_BhNd.shape[-1]) ** -0.5, da_BhNd.shape
    # (B, h, N, d) -> (B * h, N, d), each copied once: as slices of one product they would be copied at every use
    da_SNd, q_SNd, k_SNd, v_SNd = (tensor.reshape(-1, *shape[2:]) for tensor in (da_BhNd, *qkv_3BhNd))
    # In bf16 a score of 8 would be off by up to 0.03, and its weight by 3 %, so scores and their softmax are fp32.
    scores_SNN = _scaled_product(q_SNd.float(), k_SNd.float().mT, scale)
    shares_SNN = torch.softmax(scores_SNN, dim=-1).to(q_SNd.dtype)
    dv_SNd = shares_SNN.mT @ da_SNd
    dshares_SNN = da_SNd @ v_SNd.mT
    dscores_SNN = torch.ops.aten._softmax_backward_data(dshares_SNN, shares_SNN, -1, shares_SNN.dtype)
    dq_SNd, dk_SNd = _scaled_product(dscores_SNN, k_SNd, scale), _scaled_product(dscores_SNN.mT, q_SNd, scale)
    return dq_SNd.view(shape), dk_SNd.view(shape), dv_SNd.view(shape)


def _scaled_product(a_SNM: torch.Tensor, b_SMK: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns scale x (a b), scaled before it is rounded."""
    return torch.baddbmm(a_SNM.new_empty(1), a_SNM, b_SMK, beta=0, alpha=scale)


def _fake_result(qkv_3BhNd: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without values that has the result's shape and strides. In memory, tokens come before heads."""
    _, batch, heads, tokens, width = qkv_3BhNd.shape
    return qkv_3BhNd.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _fake_gradient(da_BhNd: torch.Tensor, qkv_3BhNd: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(qkv_3BhNd)


def _keep(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward_by_operator(ctx: Any, da_BhNd: torch.Tensor) -> torch.Tensor:
    (qkv_3BhNd,) = ctx.saved_tensors
    result: torch.Tensor = _attend_on_cpu_backward(da_BhNd, qkv_3BhNd)
    return result


class _Attend(torch.autograd.Function):
    """Attention on a CPU as an autograd function, which needs no custom operators."""

    @staticmethod
    def forward(ctx: Any, qkv_3BhNd: torch.Tensor) -> torch.Tensor:
        """Returns the result, [B, h, N, d]."""
        ctx.save_for_backward(qkv_3BhNd)
        return _forward(qkv_3BhNd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, da_BhNd: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of `qkv_3BhNd`."""
        return _backward(da_BhNd, *ctx.saved_tensors)


# Custom operators, because torch.compile would unroll the loop of plain functions.
_attend_on_cpu = torch.library.custom_op("patchline::attend_on_cpu", _forward, mutates_args=())
_attend_on_cpu_backward = torch.library.custom_op("patchline::attend_on_cpu_backward", _backward, mutates_args=())
_attend_on_cpu.register_fake(_fake_result)
_attend_on_cpu_backward.register_fake(_fake_gradient)
_attend_on_cpu.register_autograd(_backward_by_operator, setup_context=_keep)

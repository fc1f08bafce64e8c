"""Attention: PyTorch's own forward everywhere; bf16 gradients on a CPU that are as exact and save as little memory
for backward."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.models import attention
from pipeline.models.attention import (
    KERNELS,
    attend,
    best_kernel,
    kernel_in_use,
    kernel_seconds,
    kernel_that_ran,
    kernels_seen,
    key_caches_by_kernel,
    use_kernel,
)
from pipeline.models.config import ModelConfig
from pipeline.models.vit import Attention, AttentionAlone

CPU = torch.device("cpu")
CHECKOUT = Path(__file__).resolve().parents[3]
SHAPES = [
    pytest.param((5, 12, 197, 64), id="B/16, more images than go at a time"),
    pytest.param((2, 2, 257, 80), id="H/14's, whose scale is no power of two"),
    pytest.param((1, 7, 640, 16), id="one image is more than goes at a time: some of its heads do"),
    pytest.param((1, 1, 1, 8), id="one token"),
]


def fused(shape: tuple[int, ...], dtype: torch.dtype, *, spread: float = 1.0) -> torch.Tensor:
    """q, k, v: [3, B, h, N, d], strided as views of their product."""
    batch, heads, tokens, width = shape
    generator = torch.Generator().manual_seed(0)
    product = torch.randn(batch, tokens, 3, heads, width, generator=generator) * spread
    return product.to(dtype).permute(2, 0, 3, 1, 4).requires_grad_()


def pytorchs(qkv: torch.Tensor) -> torch.Tensor:
    """The same with plain PyTorch."""
    q, k, v = qkv.unbind(0)
    return F.scaled_dot_product_attention(q, k, v)


def gradient(qkv: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """A gradient of the result that is the same in every precision."""
    seed = torch.Generator().manual_seed(1)
    towards = torch.randn(result.shape, generator=seed).to(torch.bfloat16).to(result.dtype)
    return torch.autograd.grad(result, qkv, towards)[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward_is_pytorchs_to_the_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    qkv = fused(shape, dtype)
    expected = pytorchs(qkv)
    assert torch.equal(attend(qkv), expected)
    with torch.no_grad():
        assert torch.equal(attend(qkv), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_in_fp32_are_pytorchs_to_the_bit(shape: tuple[int, ...]) -> None:
    qkv = fused(shape, torch.float32)
    assert torch.equal(gradient(qkv, attend(qkv)), gradient(qkv, pytorchs(qkv)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spread", [pytest.param(0.5, id="even shares"), pytest.param(2.0, id="sharp shares")])
def test_gradients_in_bf16_are_right_to_its_rounding(shape: tuple[int, ...], spread: float) -> None:
    """Those of q, k and v against fp64 on the same numbers. A step of bf16 is 1/256, and PyTorch's own gradients are as
    far off."""
    qkv = fused(shape, torch.bfloat16, spread=spread)
    exact = qkv.detach().double().requires_grad_()
    found, expected = gradient(qkv, attend(qkv)), gradient(exact, pytorchs(exact))
    for one, other in zip(found.double(), expected, strict=True):
        assert float((one - other).norm()) <= 1.2 / 256 * float(other.norm()) + 1e-12


def test_between_forward_and_backward_only_q_k_and_v_are_kept() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    qkv = fused((2, 3, 197, 64), torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend(qkv)
    assert [(tensor.data_ptr(), tensor.shape) for tensor in kept] == [(qkv.data_ptr(), qkv.shape)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_operator_of_compiled_blocks_computes_the_same_bits(shape: tuple[int, ...]) -> None:
    qkv = fused(shape, torch.bfloat16)
    compiled = torch.ops.patchline.attend_on_cpu(qkv)
    assert torch.equal(compiled, attend(qkv))
    assert compiled.stride() == attend(qkv).stride()
    assert torch.equal(gradient(qkv, compiled), gradient(qkv, attend(qkv)))


# B/16's takes six seconds. The third shape is divided as well.
@pytest.mark.parametrize(
    "shape", [pytest.param(*SHAPES[0].values, id=SHAPES[0].id, marks=pytest.mark.long), *SHAPES[1:]]
)
def test_torchs_own_check_of_an_operator(shape: tuple[int, ...]) -> None:
    """Checks schema, autograd, and that the shapes and strides declared for torch.compile are those of the results."""
    qkv = fused(shape, torch.bfloat16)
    torch.library.opcheck(torch.ops.patchline.attend_on_cpu.default, (qkv,))
    gradient_of_result = torch.ones_like(attend(qkv).detach())
    torch.library.opcheck(torch.ops.patchline.attend_on_cpu_backward.default, (gradient_of_result, qkv.detach()))


def test_another_kernel_of_pytorchs_gives_the_strides_that_were_promised() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        torch.library.opcheck(torch.ops.patchline.attend_on_cpu.default, (fused((2, 3, 7, 8), torch.bfloat16),))


def test_more_tokens_and_forward_mode_are_left_to_pytorch() -> None:
    """With more tokens, whole matrices take as long; in forward mode, the operator would silently give a derivative of
    zero."""
    many = fused((1, 1, 641, 8), torch.bfloat16)
    assert torch.equal(gradient(many, attend(many)), gradient(many, pytorchs(many)))
    qkv = fused((1, 2, 5, 8), torch.bfloat16).detach()
    with pytest.raises(NotImplementedError):
        torch.func.jvp(attend, (qkv,), (torch.ones_like(qkv),))


def test_importing_it_loads_no_compiler() -> None:
    """That would add a second to each start of the command line."""
    code = "import sys, pipeline.models; sys.exit('torch._inductor.compile_fx' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(CHECKOUT)})


def test_a_kernel_is_timed_or_says_why_it_cannot_be_used() -> None:
    timed = {name: kernel_seconds(name, (2, 3, 5, 8), dtype=torch.float32, device=CPU) for name in KERNELS}
    assert [name for name, found in timed.items() if isinstance(found, float)] == ["flash", "math"]  # a CPU's
    assert isinstance(timed["cudnn"], str)
    assert str(timed["flex"]).startswith("FlexAttention does not support backward on CPU")


RELATIVE = ModelConfig(
    name="vit", image_size=32, patch=8, depth=1, width=24, mlp_width=8, num_heads=3, position="relative"
)
SHAPE = (2, 3, 17, 8)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"position": "learned_1d"}, ["flash", "math"], id="attention alone"),
        pytest.param({"position": "learned_1d", "qk_norm": True}, ["flash", "math"], id="norms"),
        pytest.param({"position": "rope2d"}, ["flash", "math"], id="rotations"),
        pytest.param({}, ["math"], id="a mask that learns, which flash cannot compute"),
    ],
)
def test_a_kernel_is_timed_with_what_the_model_calls(fields: dict[str, Any], expected: list[str]) -> None:
    """Forced upon a model, one that was timed without its mask would fall to plain products."""
    layer = partial(AttentionAlone, replace(RELATIVE, **fields))
    timed = {name: kernel_seconds(name, SHAPE, dtype=torch.float32, device=CPU, layer=layer) for name in KERNELS}
    assert [name for name, found in timed.items() if isinstance(found, float) and name != "flex"] == expected


@pytest.mark.parametrize("num_tokens", [17, 9])
def test_a_kernel_is_timed_for_the_tokens_that_stay(num_tokens: int) -> None:
    """With PatchDropout and rotary positions."""
    layer = partial(AttentionAlone, replace(RELATIVE, position="rope2d"))
    shape = (SHAPE[0], SHAPE[1], num_tokens, SHAPE[3])
    assert isinstance(kernel_seconds("math", shape, dtype=torch.float32, device=CPU, layer=layer), float)


@pytest.mark.parametrize("position", ["learned_1d", "relative"])
def test_what_is_timed_is_what_a_layer_computes(position: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From views of the packed product of q, k and v, as the layer has them."""
    config, strides = replace(RELATIVE, position=position), set()
    real = F.scaled_dot_product_attention

    def seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        strides.add(
            tuple((each.stride(), each.requires_grad) for each in (q, k, v, *options.values()) if each is not None)
        )
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    layer = partial(AttentionAlone, config)
    assert isinstance(kernel_seconds("math", SHAPE, dtype=torch.float32, device=CPU, layer=layer), float)
    Attention(config)(torch.randn(2, 17, 24))
    assert len(strides) == 1, strides


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each copy, by its operator and shape, and each gradient that is joined from parts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (name := func.overloadpacket.__name__) in ("clone", "stack", "cat", "copy_"):
            self.made.append((name, tuple(result.shape)))
        return result


@pytest.mark.parametrize(("position", "kernel"), [("learned_1d", "flash"), ("relative", "math")])
def test_the_copies_of_a_layers_gradients_are_timed(position: Any, kernel: str) -> None:
    """dq, dk and dv are joined, and brought into the order of the product, whose gradients need it."""
    config = replace(RELATIVE, position=position)
    layer, z = Attention(config), torch.randn(2, 17, 24, requires_grad=True)
    with Copies() as of_layer:
        torch.autograd.grad(layer(z), [z, *layer.parameters()], torch.ones(2, 17, 24))
    with Copies() as timed:
        part = partial(AttentionAlone, config)
        seconds = kernel_seconds(kernel, SHAPE, dtype=torch.float32, device=CPU, layer=part)
    assert isinstance(seconds, float)
    num_passes = (1 + attention._WARM_UP_ROUNDS + attention._ROUNDS) * attention._PASSES
    assert Counter(timed.made) == Counter({copy: num_passes * n for copy, n in Counter(of_layer.made).items()})


@pytest.mark.long
@pytest.mark.usefixtures("as_before")
def test_kernels_are_timed_compiled() -> None:
    """Each by its own code: dynamo would otherwise run what it has traced with the kernel before."""
    cases: tuple[tuple[Any, list[str]], ...] = (("learned_1d", ["flash", "math"]), ("relative", ["math"]))
    for position, expected in cases:
        layer = partial(AttentionAlone, replace(RELATIVE, position=position))
        with kernels_seen() as calls:
            timed = {
                name: kernel_seconds(name, SHAPE, dtype=torch.float32, device=CPU, layer=layer, is_compiled=True)
                for name in ("flash", "math", "cudnn")
            }
        assert [name for name, found in timed.items() if isinstance(found, float)] == expected
        assert bool(calls["flash"]) is ("flash" in expected)


@pytest.mark.parametrize(
    ("milliseconds", "recorded", "expected"),
    [
        pytest.param({"flash": 1.0, "cudnn": 0.7, "math": 9.0}, "", "cudnn", id="the fastest"),
        pytest.param({"flash": 1.0, "cudnn": 0.985, "math": 9.0}, "", "flash", id="equal to measurement: no flip"),
        pytest.param({"flash": 0.985, "cudnn": 1.0, "math": 9.0}, "", "flash", id="nor the other way round"),
        pytest.param({"flash": 1.0, "cudnn": 0.96}, "flash", "flash", id="the checkpoint's, less than 5 % slower"),
        pytest.param({"flash": 1.0, "cudnn": 0.9}, "flash", "cudnn", id="the checkpoint's is slow here"),
        pytest.param({"flash": 1.0, "efficient": 1.01}, "efficient", "efficient", id="the checkpoint's, as fast"),
        pytest.param({"flash": 1.0, "math": 9.0}, "cudnn", "flash", id="the checkpoint's is gone"),
        pytest.param({"math": 9.0}, "", "math", id="one"),
    ],
)
def test_the_choice_of_a_kernel(milliseconds: dict[str, float], recorded: str, expected: str) -> None:
    seconds = {name: each / 1000 for name, each in milliseconds.items()}
    assert best_kernel(seconds, recorded=recorded) == expected


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever kernel a test has this process use, others see none of it."""
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag="mine"), ExitStack() as held:
        monkeypatch.setattr(attention, "_held", held)
        monkeypatch.setattr(attention, "_used", [""])
        yield


class Attends(torch.nn.Module):
    """A block of nothing else."""

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        return attend(qkv)


def ran(*, num_layers: int = 1, num_calls: int = 1, block: torch.nn.Module | None = None) -> str:
    """The kernel of these calls, forward and backward, by the profiler."""
    compute = block or attend
    qkv = fused((2, 3, 17, 8), torch.float32)
    with kernels_seen() as calls:
        for _ in range(num_calls):
            gradient(qkv, compute(qkv))
    return kernel_that_ran(calls, num_layers=num_layers)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("name", ["flash", "math", "cudnn_packed"])
def test_what_ran_is_seen(name: str) -> None:
    use_kernel(name)
    assert ran() == name
    assert ran(num_calls=6, num_layers=2) == name


@pytest.mark.usefixtures("as_before")
def test_a_kernel_that_pools_is_not_that_of_the_layers() -> None:
    """Plain products in all layers leave no operator: the one call is that of attention pooling."""
    assert ran(num_calls=1, num_layers=2) == "math"


@pytest.mark.usefixtures("as_before")
def test_a_block_that_is_compiled_already_takes_another_kernel_too() -> None:
    """In a process that trains twice: dynamo would run the code that it has traced with the first kernel."""
    block = Attends()
    block.compile(backend="aot_eager", dynamic=False)
    for name in ("flash", "math", "flash"):
        use_kernel(name)
        block(fused((2, 3, 17, 8), torch.float32))  # traces, which calls kernels, too
        assert ran(block=block) == name


def key_of_caches() -> str:
    """The part of the compiler's key that any graph has, for numbers on a CPU."""
    from torch._inductor.codecache import FxGraphCachePickler, FxGraphHashDetails  # noqa: PLC0415 - it takes 2 s

    graph = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    key_caches_by_kernel(kernel_in_use())
    return FxGraphCachePickler(graph).get_hash(FxGraphHashDetails(None, [torch.ones(1)], {}, []))


@pytest.mark.usefixtures("as_before")
def test_what_is_decided_before_compiling_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that was compiled under one of these would compute something else under another."""
    cuda: Any = torch.backends.cuda
    products = cuda.matmul
    switches: dict[str, tuple[Callable[[bool], object], bool]] = {  # how to set it, and what it is
        "flash": (cuda.enable_flash_sdp, cuda.flash_sdp_enabled()),
        "cudnn": (cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled()),
        "efficient": (cuda.enable_mem_efficient_sdp, cuda.mem_efficient_sdp_enabled()),
        "math": (cuda.enable_math_sdp, cuda.math_sdp_enabled()),
        "reduced sums": (cuda.allow_fp16_bf16_reduction_math_sdp, cuda.fp16_bf16_reduction_math_sdp_allowed()),
        "deterministic": (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
        "bf16": (
            lambda is_on: setattr(products, "allow_bf16_reduced_precision_reduction", is_on),
            products.allow_bf16_reduced_precision_reduction,
        ),
        "fp16": (
            lambda is_on: setattr(products, "allow_fp16_reduced_precision_reduction", is_on),
            products.allow_fp16_reduced_precision_reduction,
        ),
        "TF32": (
            lambda is_on: setattr(products, "fp32_precision", "tf32" if is_on else "ieee"),
            products.fp32_precision == "tf32",
        ),
    }
    for name, (switch, is_on) in switches.items():
        keys = {}
        try:
            for state in (is_on, not is_on):
                switch(state)
                keys[state] = key_of_caches()
        finally:
            switch(is_on)
        assert keys[True] != keys[False], name
    before = key_of_caches()
    assert key_of_caches() == before
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert key_of_caches() != before, "vectors of another width"
    keys_of_kernels = set()
    for name in ("flash", "math", "cudnn", "efficient", "flash"):
        use_kernel(name)
        keys_of_kernels.add(key_of_caches())
    assert len(keys_of_kernels) == 4
    assert torch.compiler.config.cache_key_tag.startswith("mine; attention ('flash'")
    assert torch.compiler.config.cache_key_tag.count("attention") == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("as_before")
def test_flex_computes_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled and without gradients, as a CPU can."""
    qkv = fused((2, 3, 17, 80), torch.float32).detach()
    expected, of_device = attend(qkv), attention._compiled_flex
    with ExitStack() as held:
        for name, value in (("_held", held), ("_used", [""])):
            monkeypatch.setattr(attention, name, value)
        monkeypatch.setattr(attention, "_compiled_flex", lambda _: of_device(CPU))
        use_kernel("flex")
        assert kernel_in_use() == "flex"
        torch.testing.assert_close(attend(qkv), expected, atol=2e-6, rtol=0)
        use_kernel("math")
        assert attention._computes == [attention._by_pytorch]


def test_flex_is_compiled_for_all_numbers_of_tokens_that_steps_may_have() -> None:
    """By default, torch compiles 8 and runs the others uncompiled, with all scores in memory."""
    with torch._dynamo.config.patch(recompile_limit=8):
        attention._compiled_flex(torch.device("cuda"))
        assert torch._dynamo.config.recompile_limit >= 2 * 24


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("name", ["math", "flash"])
def test_a_named_kernel_computes_attention(name: str) -> None:
    qkv = fused((2, 3, 5, 8), torch.float32)
    expected = attend(qkv)
    use_kernel(name)
    assert kernel_in_use() == name
    with profile() as seen:
        found = attend(qkv)
    names = {event.key for event in seen.key_averages()}
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in names) is (name == "flash"), names
    torch.testing.assert_close(found, expected)

"""Attention with packed gradients: the operators on a CPU, and what they ask of libraries that only a GPU can run."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import current_flash_attention_impl
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.models import attention, packed_attention
from pipeline.models.attention import kernel_seconds, use_kernel
from pipeline.models.config import ModelConfig
from pipeline.models.packed_attention import by_operator, packed_fault
from pipeline.models.vit import Attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAMES = ["flash3", "cudnn_packed"]
SHAPE = (2, 17, 3, 3, 8)
TINY = ModelConfig(name="vit", image_size=32, patch=8, depth=1, width=24, mlp_width=8, num_heads=3)


def made(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """A product of q, k and v, [B, N, 3, h, d]."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def plain(qkv: torch.Tensor) -> torch.Tensor:
    """The same with plain PyTorch, [B, h, N, d]."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v)


def gradient(qkv: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Of the product, from a gradient of the result that is the same in every precision."""
    towards = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    return torch.autograd.grad(result, qkv, towards.to(result.dtype))[0]


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    config: Any = torch.compiler.config
    with config.patch(cache_key_tag="mine"), ExitStack() as held:
        monkeypatch.setattr(attention, "_held", held)
        monkeypatch.setattr(attention, "_used", [""])
        yield


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [SHAPE, (1, 257, 3, 2, 80), (1, 1, 3, 1, 8)], ids=str)
def test_operators_compute_what_pytorch_does(name: str, shape: tuple[int, ...]) -> None:
    qkv = made(shape=shape)
    found = by_operator(name)(qkv.permute(2, 0, 3, 1, 4))
    torch.testing.assert_close(found, plain(qkv), atol=2e-6, rtol=0)
    torch.testing.assert_close(gradient(qkv, found), gradient(qkv, plain(qkv)), atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_in_bf16_they_are_right_to_its_rounding(name: str) -> None:
    qkv = made(torch.bfloat16, (2, 197, 3, 2, 64))
    exact = qkv.detach().double().requires_grad_()
    found, expected = by_operator(name)(qkv.permute(2, 0, 3, 1, 4)), plain(exact)
    for one, other in ((found.detach(), expected.detach()), (gradient(qkv, found), gradient(exact, expected))):
        assert float((one.double() - other).norm()) <= 1.2 / 256 * float(other.norm())


@pytest.mark.parametrize("name", NAMES)
def test_torchs_own_check_of_the_operators(name: str) -> None:
    """Checks schema, autograd, and the shapes and strides that are promised to torch.compile."""
    qkv = made()
    by_operator(name)  # defines them
    forward, backward = (getattr(torch.ops.patchline, f"attend_by_{name}{end}").default for end in ("", "_backward"))
    torch.library.opcheck(forward, (qkv,))
    result, lse = forward(qkv.detach())
    assert result.shape == (2, 17, 3, 8)
    assert lse.shape == (2, 3, 17)
    torch.library.opcheck(backward, (torch.ones_like(result), qkv.detach(), result, lse))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the name of each operator that makes a tensor of the product's size."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.made = size, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(result, torch.Tensor) and result.numel() == self.size and not func.is_view:
            self.made.extend([name] if name != "_unsafe_view" else [])
        return result


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("flash", ["addmm", "stack", "clone"]),
        ("cudnn_packed", ["addmm", "attend_by_cudnn_packed_backward"]),
    ],
)
def test_a_layers_gradients_are_not_copied(kernel: str, expected: list[str]) -> None:
    """Of tensors as large as the product of q, k and v, only that and its gradient are made."""
    use_kernel(kernel)
    layer, z = Attention(TINY), torch.randn(2, 17, 24, requires_grad=True)
    with Operators(2 * 17 * 3 * 24) as seen:
        torch.autograd.grad(layer(z), [z, *layer.parameters()], torch.ones(2, 17, 24))
    assert seen.made == expected


@pytest.mark.usefixtures("_as_before")
def test_a_compiled_layer_is_one_graph() -> None:
    layer, z = Attention(TINY), torch.randn(2, 17, 24, requires_grad=True)
    expected = torch.autograd.grad(layer(z).square().sum(), [z, *layer.parameters()])
    use_kernel("cudnn_packed")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    found = torch.autograd.grad(compiled(z).square().sum(), [z, *layer.parameters()])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_one_compiled_layer_takes_sequences_of_changing_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run that draws its patch sizes. On a CPU, where only what is around the kernel is tried."""
    layer, lengths = Attention(TINY), (17, 5, 65, 17)
    inputs = [torch.randn(2, num_tokens, 24, requires_grad=True) for num_tokens in lengths]
    expected = [torch.autograd.grad(layer(z).square().sum(), [z, *layer.parameters()]) for z in inputs]
    monkeypatch.setattr(attention, "_computes", [by_operator(name)])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    for z, gradients in zip(inputs, expected, strict=True):
        found = torch.autograd.grad(compiled(z).square().sum(), [z, *layer.parameters()])
        for one, other in zip(found, gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "missing"), [("flash3", "flash_attn_interface"), ("cudnn_packed", "cudnn")])
def test_what_is_missing_is_said(name: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_seconds(name, (2, 3, 5, 8), dtype=torch.float32, device=CPU) == f"{name} is a kernel for GPUs"
    monkeypatch.setattr(packed_attention, "find_spec", lambda package: None if package == missing else package)
    assert packed_fault(name, CUDA).startswith(f"the package {missing} is not installed (")
    monkeypatch.setattr(packed_attention, "find_spec", lambda package: package)
    assert not packed_fault(name, CUDA)


@pytest.mark.usefixtures("_as_before")
@pytest.mark.skipif(find_spec("flash_attn_interface") is not None, reason="FlashAttention-3 is here")
def test_flash3_is_not_switched_on_without_its_package() -> None:
    with pytest.raises(RuntimeError, match="FlashAttention-3 cannot be loaded: No module named 'flash_attn_interface'"):
        use_kernel("flash3")
    assert current_flash_attention_impl() is None
    assert attention._computes == [attention._by_pytorch]


@pytest.fixture
def flash3_operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Stand-ins for FlashAttention-3's operators, with the arguments that its schema has, on a CPU. Collects the number
    of splits of each forward pass, and whether gradients were to be deterministic."""
    asked: list[int] = []
    gradients = "Tensor(a!)? dq=None, Tensor(b!)? dk=None, Tensor(c!)? dv=None"
    options = "float? softmax_scale=None, bool is_causal=False"
    with torch.library._scoped_library("flash_attn_3", "FRAGMENT") as library:
        library.define(
            f"fwd(Tensor q, Tensor k, Tensor v, {options}, int num_splits=0) -> (Tensor, Tensor, Tensor, Tensor)"
        )
        library.define(
            f"bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, {gradients}, {options}, "
            "bool deterministic=False) -> Tensor"
        )

        def fwd(q: Any, k: Any, v: Any, softmax_scale: Any = None, is_causal: bool = False, num_splits: int = 0) -> Any:
            asked.append(num_splits)
            result, lse = packed_attention._on_cpu(torch.stack([q, k, v], dim=2))
            assert softmax_scale == pytest.approx(q.shape[-1] ** -0.5)
            return result, lse, lse.new_empty(0), lse.new_empty(0)

        def bwd(*given: Any) -> Any:  # those after the last that is not the default are left out
            dout, q, k, v, out, lse, dq, dk, dv, *options = given
            _, _, is_deterministic = (*options, *(False, False))[:3]
            asked.append(is_deterministic)
            dqkv = packed_attention._on_cpu_backward(dout, torch.stack([q, k, v], dim=2), out, lse)
            for into, each in zip((dq, dk, dv), dqkv.unbind(2), strict=True):
                into.copy_(each)
            return lse.new_empty(0)

        library.impl("fwd", fwd, "CPU")
        library.impl("bwd", bwd, "CPU")
        monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
        yield asked


@pytest.mark.usefixtures("_as_before")
def test_flash3_is_called_as_its_library_asks(flash3_operators: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = made().detach()
    result, lse = packed_attention._flash3(qkv)
    towards = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    found = packed_attention._flash3_backward(towards, qkv, result, lse)
    expected = plain(exact := made())
    torch.testing.assert_close(result, expected.transpose(1, 2))
    (dqkv,) = torch.autograd.grad(expected, exact, towards.transpose(1, 2))
    torch.testing.assert_close(found, dqkv)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    packed_attention._flash3_backward(towards, qkv, *packed_attention._flash3(qkv))
    assert flash3_operators == [0, False, 1, True]
    use_kernel("flash3")  # PyTorch finds all that it needs
    assert current_flash_attention_impl() == "FA3"
    use_kernel("math")
    assert current_flash_attention_impl() is None


class Graph:
    """A stand-in for a graph of cuDNN: what is asked of it, computed on a CPU."""

    def __init__(self, **_: Any) -> None:
        self.tensors: dict[int, Any] = {}
        self.outputs: list[Any] = []
        self.options: dict[str, Any] = {}

    def tensor(self, *, uid: int, dim: Any, stride: Any, **_: Any) -> Any:
        return self.tensors.setdefault(uid, SimpleNamespace(uid=uid, dim=dim, stride=stride))

    def _declared(self, number: int, options: dict[str, Any]) -> list[Any]:
        self.options = options
        self.outputs = [Output() for _ in range(number)]
        return self.outputs

    def sdpa(self, **options: Any) -> list[Any]:
        return self._declared(2, options)

    def sdpa_backward(self, **options: Any) -> list[Any]:
        return self._declared(3, options)

    def build(self, modes: list[str]) -> None:
        assert modes == ["A", "FALLBACK"]

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, given: dict[int, torch.Tensor], _: torch.Tensor, *, handle: str) -> None:
        assert handle == "handle"
        for each in [*self.tensors.values(), *self.outputs]:  # a graph reads and writes where it was declared
            assert (tuple(given[each.uid].shape), given[each.uid].stride()) == (tuple(each.dim), tuple(each.stride))
        q, k, v, *others = (given[self.options[name].uid] for name in self.inputs())
        qkv = torch.stack([q, k, v], dim=2).transpose(1, 3)  # (B, h, 3, N, d) -> (B, N, 3, h, d)
        assert self.options["attn_scale"] == pytest.approx(q.shape[-1] ** -0.5)
        if others:
            result, dresult, lse = others
            gradients = packed_attention._on_cpu_backward(
                dresult.transpose(1, 2), qkv, result.transpose(1, 2), lse.squeeze(-1)
            )
            found = [each.transpose(1, 2) for each in gradients.unbind(2)]
        else:
            result, lse = packed_attention._on_cpu(qkv)
            found = [result.transpose(1, 2), lse.unsqueeze(-1)]
        for output, each in zip(self.outputs, found, strict=True):
            given[output.uid].copy_(each)

    def inputs(self) -> list[str]:
        return [name for name in ("q", "k", "v", "o", "dO", "stats") if name in self.options]


class Output(SimpleNamespace):
    """A tensor that a graph writes, described by one call after another."""

    def __getattr__(self, name: str) -> Any:
        def describe(value: Any) -> "Output":
            setattr(self, name.removeprefix("set_"), value)
            return self

        return describe


def test_cudnn_writes_into_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    types = SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32")
    modes = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    library: Any = ModuleType("cudnn")
    library.__dict__.update(data_type=types, heur_mode=modes, pygraph=Graph, cudnnGraphNotSupportedError=KeyError)
    library.set_stream = lambda **_: None
    monkeypatch.setitem(sys.modules, "cudnn", library)
    monkeypatch.setattr(packed_attention, "_cudnn_handle", lambda _: "handle")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    packed_attention._cudnn_graph.cache_clear()
    try:
        qkv = made(torch.bfloat16)
        result, lse = packed_attention._cudnn(qkv.detach())
        towards = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        found = packed_attention._cudnn_backward(towards, qkv.detach(), result, lse)
        with pytest.raises(RuntimeError, match=r"cuDNN has no attention in torch.float32"):
            packed_attention._cudnn(made().detach())
    finally:
        packed_attention._cudnn_graph.cache_clear()
    expected = by_operator("cudnn_packed")(qkv.permute(2, 0, 3, 1, 4))
    assert torch.equal(result, expected.transpose(1, 2))
    assert torch.equal(found, torch.autograd.grad(expected, qkv, towards.transpose(1, 2))[0])


@pytest.mark.long
@pytest.mark.skipif(find_spec("cudnn") is None, reason="needs cuDNN's frontend: pip install nvidia-cudnn-frontend")
@pytest.mark.parametrize("is_backward", [False, True])
def test_the_frontend_accepts_the_graphs(is_backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks shapes, strides and options with the real package, which needs no GPU for that."""
    import cudnn  # noqa: PLC0415

    checked = []
    monkeypatch.setattr(packed_attention, "_cudnn_handle", lambda _: None)
    monkeypatch.setattr(cudnn.pygraph, "build", lambda graph, _: checked.append(graph.validate()))
    packed_attention._cudnn_graph((4, 257, 3, 16, 80), torch.bfloat16, CPU, is_backward=is_backward)
    packed_attention._cudnn_graph.cache_clear()
    assert checked == [None]

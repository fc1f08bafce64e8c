"""Sums of biases' gradients in another order: the graphs that inductor would be given, run by PyTorch on a CPU."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch.fx import GraphModule, Node

from pipeline.models import ModelConfig, build_model
from pipeline.models.bias_sums import FuseBiasSums
from pipeline.models.build import blocks_of
from tests.pipeline.models.test_build import needs_compiler

SMALL: dict[str, Any] = {"depth": 1, "width": 24, "mlp_width": 40, "num_heads": 3, "image_size": 32, "num_classes": 5}
_aten = torch.ops.aten
Backend = Callable[[GraphModule, Sequence[Any]], Any]


def gradients_of(backend: Backend, more: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The gradients of a block's input and parameters, for 3 images of 4 or 5 tokens."""
    torch.compiler.reset()
    model = build_model(ModelConfig(name="vit_b16", **SMALL, **more)).to(dtype).train()
    block, *_ = blocks_of(model)
    shape = (3, 2, 2, 24) if "attention" in more else (3, 5, 24)
    z_BND, towards_BND = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    with inductor_config.patch(force_disable_caches=True):
        block.compile(backend=backend, dynamic=False)
        out_BND = block(z_BND.requires_grad_())
        names, tensors = zip(*block.named_parameters(), strict=True)
        found = torch.autograd.grad(out_BND, (z_BND, *tensors), towards_BND)
    return dict(zip(("z", *names), found, strict=True))


def by_pytorch(fuse: FuseBiasSums | None, graphs: list[GraphModule]) -> Backend:
    """A backend that runs each graph without a compiler, after the pass, and adds it to `graphs`."""

    def uncompiled(gm: GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        if fuse is not None:
            fuse(gm.graph)
            gm.graph.lint()
            gm.recompile()
        graphs.append(gm)

        def run(arguments: list[Any]) -> Any:
            return gm(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return lambda gm, inputs: compile_fx.compile_fx(gm, inputs, inner_compile=uncompiled)


@pytest.mark.parametrize(
    ("more", "dtype", "num_in_norms", "num_by_image"),
    [
        pytest.param({}, torch.bfloat16, 2, 2, id="two that residuals hand on, GELU's, and that of q, k and v"),
        pytest.param({"layer_scale": 0.1}, torch.float32, 0, 4, id="a scale between a residual and a product"),
        pytest.param(
            {"attention": "axial", "pooling": "average", "patch": 8},
            torch.float32,
            2,
            2,
            id="tokens in rows and columns",
        ),
    ],
)
def test_each_sum_of_a_bias_is_moved_and_has_the_same_value(
    more: dict[str, Any], dtype: torch.dtype, num_in_norms: int, num_by_image: int
) -> None:
    graphs: list[GraphModule] = []
    expected = gradients_of(by_pytorch(None, []), more, dtype)
    found = gradients_of(by_pytorch(FuseBiasSums(), graphs), more, dtype)
    for name, gradient in found.items():
        close = torch.finfo(dtype).eps * (1 if dtype is torch.bfloat16 else 8)
        torch.testing.assert_close(gradient, expected[name], rtol=close, atol=close * float(expected[name].abs().max()))
    nodes = [node for gm in graphs for node in gm.graph.nodes]
    assert len([node for node in nodes if node.target is _aten.mul.Tensor and node.args[1] == 0.0]) == num_in_norms
    assert len([node for node in nodes if is_sum(node, [0]) and is_sum(node.args[0])]) == num_by_image
    assert not [node for node in nodes if is_sum(node, [0]) and not is_sum(node.args[0])]


def is_sum(node: Node, dims: list[int] | None = None) -> bool:
    return node.target is _aten.sum.dim_IntList and dims in (None, node.args[1])


def test_a_pass_that_changes_is_another_key_of_the_cache() -> None:
    assert FuseBiasSums() == FuseBiasSums() != "another"
    assert FuseBiasSums().uuid() == FuseBiasSums().uuid()
    assert len(FuseBiasSums().uuid()) == 32


@pytest.mark.long
@needs_compiler
def test_inductor_takes_the_graph() -> None:
    expected = gradients_of(by_pytorch(None, []), {}, torch.float32)
    with inductor_config.patch(post_grad_custom_pre_pass=FuseBiasSums()):
        found = gradients_of(compile_fx.compile_fx, {}, torch.float32)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)

"""What a compiled block keeps on a GPU: the graphs that inductor would be given, run by PyTorch on a CPU."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch.fx import GraphModule, Node

from pipeline.models import ModelConfig, build_model, compile_blocks
from pipeline.models.build import blocks_of
from pipeline.models.residuals import KeepResiduals

SMALL: dict[str, Any] = {"depth": 1, "width": 24, "mlp_width": 40, "num_heads": 3, "image_size": 32, "num_classes": 5}
_aten = torch.ops.aten


def kept_and_gradients(
    keep: KeepResiduals | None, more: dict[str, Any], factors_B2: torch.Tensor | None
) -> tuple[list[Node], list[torch.Tensor]]:
    """What a block's forward pass keeps in bf16, but for weights and input; the gradients of its input and weights."""
    kept: list[Node] = []

    def uncompiled(gm: GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        if not how.get("is_backward"):
            made: Any = gm.graph.output_node().args[0]
            kept.extend(node for node in made[1:] if node.op != "placeholder")

        def run(arguments: list[Any]) -> Any:
            return gm(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx.compile_fx(gm, inputs, inner_compile=uncompiled)

    torch.compiler.reset()
    model = build_model(ModelConfig(name="vit_b16", **SMALL | more)).to(torch.bfloat16).train()
    (block,) = blocks_of(model)
    z_BND = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).requires_grad_()
    with inductor_config.patch(joint_custom_pre_pass=keep, force_disable_caches=True):
        block.compile(backend=backend, dynamic=False)
        torch.manual_seed(0)  # dropout
        out_BND = block(z_BND, factors_B2)
        towards_BND = torch.randn(out_BND.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        return kept, list(torch.autograd.grad(out_BND, (z_BND, *block.parameters()), towards_BND))


@pytest.mark.parametrize("has_factors", [False, True], ids=["", "stochastic depth"])
def test_the_sum_of_a_residual_is_kept_instead_of_the_branch(has_factors: bool) -> None:
    factors_B2 = torch.tensor([[1.0, 2.0], [0.0, 2.0], [2.0, 0.0]]) if has_factors else None
    without, gradients_without = kept_and_gradients(None, {}, factors_B2)
    kept, gradients = kept_and_gradients(KeepResiduals(), {}, factors_B2)
    assert not [node for node in without if node.target is _aten.add.Tensor]
    assert len([node for node in kept if node.target is _aten.add.Tensor]) == 1
    assert num_elements(kept) == num_elements(without)
    for gradient, expected in zip(gradients, gradients_without, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("more", [{"layer_scale": 0.1}, {"position_at": "layers"}], ids=str)
def test_no_block_keeps_more(more: dict[str, Any]) -> None:
    """The gradient of a LayerScale needs the branch, so the sum would be kept beside it."""
    without, _ = kept_and_gradients(None, more, None)
    kept, _ = kept_and_gradients(KeepResiduals(), more, None)
    assert num_elements(kept) <= num_elements(without)


def num_elements(nodes: list[Node]) -> int:
    return sum(node.meta["val"].numel() for node in nodes)


@pytest.mark.parametrize("keeps_sums", [False, True], ids=["on a CPU", "on a GPU"])
@pytest.mark.parametrize(
    ("more", "most"),
    [
        pytest.param({}, 9.2, id="ViT: q, k, v, attention, a sum or product, and the hidden layer's 4"),
        pytest.param({"layer_scale": 0.1, "qk_norm": True}, 10.3, id="LayerScale reads both branches' products"),
        pytest.param({"dropout": 0.1}, 15.3, id="dropout's masks"),
    ],
)
def test_recomputing_blocks_keep_products_and_change_no_bit(
    more: dict[str, Any], most: float, keeps_sums: bool
) -> None:
    """The same bits, although norms and the GELU are computed again; sizes are multiples of [B, N, D]."""
    more = more | {"mlp_width": 4 * 24}
    all_kept, expected = kept_and_gradients(KeepResiduals(keeps_sums=keeps_sums), more, None)
    kept, gradients = kept_and_gradients(KeepResiduals(keeps_sums=keeps_sums, recomputes=True), more, None)
    assert num_elements(kept) <= most * 3 * 5 * 24
    assert num_elements(all_kept) - num_elements(kept) >= 5.9 * 3 * 5 * 24
    for gradient, same in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, same)


def test_a_second_model_shares_the_code_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_fx, "compile_fx", lambda gm, _, **__: gm)
    z_BND = torch.randn(3, 5, 24).to(torch.bfloat16)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        model = build_model(ModelConfig(name="vit_b16", **SMALL)).to(torch.bfloat16).train()
        compile_blocks(model, on_gpu=True)
        (block,) = blocks_of(model)
        block(z_BND)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_pass_that_changes_is_another_key_of_the_cache() -> None:
    assert KeepResiduals() == KeepResiduals() != "another"
    assert KeepResiduals().uuid() == KeepResiduals().uuid() != KeepResiduals(recomputes=True).uuid()
    assert KeepResiduals() != KeepResiduals(recomputes=True) != KeepResiduals(keeps_sums=False, recomputes=True)
    assert len(KeepResiduals().uuid()) == 32

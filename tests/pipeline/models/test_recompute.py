"""Selective recomputation keeps products and attention alone, and changes no bit."""

from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from pipeline.models import Model, ModelConfig, shapes_of
from pipeline.models.build import blocks_of
from pipeline.models.recompute import recompute_selectively
from pipeline.models.vit import Block
from tests.pipeline.models.test_build import AXIAL, HYBRID, MODERN, VIT, images, loss_and_gradients, with_random_head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(VIT, id="ViT"),
        pytest.param(replace(VIT, gelu="exact"), id="the exact GELU"),
        pytest.param(replace(VIT, dropout=0.3), id="dropout"),
        pytest.param(HYBRID, id="hybrid"),
        pytest.param(AXIAL, id="axial"),
        pytest.param(MODERN, id="LayerScale, registers, norms of q and k, rotary positions, attention pooling"),
        pytest.param(replace(MODERN, norm="rmsnorm"), id="the same with RMSNorms"),
        pytest.param(replace(MODERN, position="learned_1d"), id="norms of q and k are what attention reads"),
    ],
)
def test_it_changes_no_bit_of_loss_and_gradients(config: ModelConfig, dtype: torch.dtype) -> None:
    plain, recomputed = (with_random_head(config).to(dtype) for _ in range(2))
    recompute_selectively(recomputed)
    expected, found = loss_and_gradients(plain), loss_and_gradients(recomputed)
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys() == set(shapes_of(config))
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


def blocks(model: Model) -> list[Block]:
    return [block for block in blocks_of(model) if isinstance(block, Block)]


def tensors_kept(model: Model) -> dict[int, torch.Tensor]:
    """All tensors that autograd saves in a forward pass, by their storage."""
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(images())
    assert logits.requires_grad
    return kept


def test_the_outputs_of_norms_and_gelus_are_not_kept() -> None:
    """These are 2 D + M of the 8 D + 2 M numbers that a block keeps for each token, beside its norms' statistics."""
    counts = {}
    for is_selective in (False, True):
        model, made = with_random_head(VIT), list[torch.Tensor]()
        if is_selective:
            recompute_selectively(model)
        for block in blocks(model):
            block.norm1.register_forward_hook(lambda *parts, made=made: made.append(parts[-1].detach()))
            block.norm2.register_forward_hook(lambda *parts, made=made: made.append(parts[-1].detach()))
            block.mlp.dense2.register_forward_pre_hook(lambda _, x, made=made: made.append(x[0].detach()))
        kept = tensors_kept(model)
        assert len(made) == 2 * 3
        counts[is_selective] = sum(tensor.untyped_storage()._cdata in kept for tensor in made)
    assert counts == {False: 2 * 3, True: 0}


def test_what_it_holds_for_a_moment_is_let_go() -> None:
    """A tensor that nothing saves, such as the GELU's output before dropout, is held until the block ends."""
    model = with_random_head(replace(VIT, dropout=0.3))
    recompute_selectively(model)
    model(images())
    assert [vars(block.recompute)["_made"] for block in blocks(model)] == [{}, {}]


def test_evaluations_recompute_nothing() -> None:
    model = with_random_head(VIT)
    recompute_selectively(model)
    for block in blocks(model):
        assert block.recompute is not None
        block.recompute = Refused()
    with torch.no_grad():
        assert torch.equal(model(images()), with_random_head(VIT)(images()))
    with pytest.raises(ZeroDivisionError):
        model(images())


class Refused(AbstractContextManager[None]):
    """A context that may not be entered."""

    def __enter__(self) -> None:
        raise ZeroDivisionError

    def __exit__(self, *_: object) -> None: ...

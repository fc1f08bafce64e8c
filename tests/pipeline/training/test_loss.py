"""Losses against plain NumPy: sigmoid cross-entropy summed over classes, softmax of the first label."""

import numpy as np
import pytest
import torch

from pipeline.training.loss import LossName, classification_loss, multi_hot

LABELS = torch.tensor([[1, 3], [0, -1], [-1, -1], [4, 4]])


def logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (4 * torch.randn(4, 5, generator=torch.Generator().manual_seed(0))).to(dtype)


def test_labels_become_targets_and_padding_none() -> None:
    assert multi_hot(LABELS, 5).tolist() == [[0, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]


def test_sigmoid_is_summed_over_classes_and_averaged_over_images() -> None:
    x, y = logits().double().numpy(), multi_hot(LABELS, 5).numpy()
    probability = 1 / (1 + np.exp(-x))
    expected = -(y * np.log(probability) + (1 - y) * np.log(1 - probability)).sum() / 4
    assert float(classification_loss(logits(), LABELS, name="sigmoid")) == pytest.approx(expected, rel=1e-6)


def test_sigmoid_at_the_papers_start() -> None:
    """Every logit -10 on 21,843 classes with one label: 10 for the label and 1 for all others together."""
    start = torch.full((2, 21_843), -10.0, requires_grad=True)
    labels = torch.tensor([[7], [9]])
    loss = classification_loss(start, labels, name="sigmoid")
    expected = 10 + 21_843 * np.log1p(np.exp(-10))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)  # PyTorch subtracts numbers near 10 in fp32
    (gradient,) = torch.autograd.grad(loss, start)
    share = 1 / (1 + np.exp(10))
    assert gradient[0, 7].item() == pytest.approx((share - 1) / 2, rel=1e-6)
    assert gradient[0, 8].item() == pytest.approx(share / 2, rel=1e-6)


def test_softmax_takes_the_first_label() -> None:
    labels = torch.tensor([[1, 3], [0, -1], [2, -1], [4, 4]])
    x = logits().double().numpy()
    shares = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    expected = -np.log(shares[np.arange(4), [1, 0, 2, 4]]).mean()
    assert float(classification_loss(logits(), labels, name="softmax")) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_losses_of_bf16_logits_are_computed_in_fp32(name: LossName) -> None:
    labels = torch.tensor([[1], [0], [2], [4]])
    coarse = logits(torch.bfloat16)
    loss = classification_loss(coarse, labels, name=name)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, classification_loss(coarse.float(), labels, name=name))


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_extreme_logits_stay_finite(name: LossName, extreme: float) -> None:
    loss = classification_loss(torch.full((1, 3), extreme), torch.tensor([[0]]), name=name)
    assert torch.isfinite(loss)

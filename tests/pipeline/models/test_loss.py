"""Losses against plain NumPy: sigmoid cross-entropy summed over classes, softmax of the first label; dense targets."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.utils.class_weight import compute_class_weight

from pipeline.models.loss import balanced_weights, classification_loss, multi_hot, targets_of, weighted_targets
from pipeline.shared_settings import LossName

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


def soft_targets(num_classes: int = 5) -> torch.Tensor:
    """Rows of 0.7 and 0.3, and one of a single class: what mixup makes of single labels."""
    targets = torch.zeros(4, num_classes)
    targets[range(4), [1, 0, 2, 4]] += 0.7
    targets[range(4), [3, 1, 0, 4]] += 0.3
    return targets


def test_soft_softmax_is_the_mean_of_the_labels_losses() -> None:
    one, other = (
        torch.nn.functional.cross_entropy(logits().double(), torch.tensor(labels), reduction="none")
        for labels in ([1, 0, 2, 4], [3, 1, 0, 4])
    )
    loss = classification_loss(logits(), soft_targets(), name="softmax")
    assert float(loss) == pytest.approx(float((0.7 * one + 0.3 * other).mean()), rel=1e-6)


def test_soft_sigmoid_is_summed_over_classes() -> None:
    x, y = logits().double().numpy(), soft_targets().double().numpy()
    probability = 1 / (1 + np.exp(-x))
    expected = -(y * np.log(probability) + (1 - y) * np.log(1 - probability)).sum() / 4
    assert float(classification_loss(logits(), soft_targets(), name="sigmoid")) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        pytest.param("softmax", torch.tensor([[1, 3], [0, -1], [2, -1], [4, 4]]), id="softmax: the first label"),
        pytest.param("sigmoid", LABELS, id="sigmoid: all labels, or none"),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_hard_targets_are_labels(name: LossName, labels: torch.Tensor, scale: float) -> None:
    """The same loss and gradient, whichever way the labels come."""
    x = (scale * logits()).requires_grad_()
    losses = [classification_loss(x, answers, name=name) for answers in (labels, targets_of(labels, 5, name=name))]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(loss, x)[0] for loss in losses]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-7)


def test_targets_of_labels() -> None:
    assert targets_of(LABELS, 5, name="sigmoid").tolist() == multi_hot(LABELS, 5).tolist()
    first = [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
    assert targets_of(LABELS, 5, name="softmax").tolist() == first
    assert targets_of(LABELS, 5, name="softmax").dtype == torch.float32


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_gradients_of_soft_targets(name: LossName) -> None:
    """(probability - target) / B in both, against numbers computed in fp64."""
    x = logits().requires_grad_()
    (gradient,) = torch.autograd.grad(classification_loss(x, soft_targets(), name=name), x)
    probability = torch.softmax(logits().double(), 1) if name == "softmax" else torch.sigmoid(logits().double())
    torch.testing.assert_close(gradient.double(), (probability - soft_targets().double()) / 4, rtol=1e-5, atol=1e-7)
    exact = logits().double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: classification_loss(z, soft_targets(), name=name), exact, atol=1e-2, eps=1e-2
    )


def test_soft_sigmoid_keeps_its_digits_far_out() -> None:
    """One sure class of 21,843 that is right: softplus(x) - x would be 1.9 % off."""
    x = torch.tensor([[12.0]])
    loss = classification_loss(x, torch.ones(1, 1), name="sigmoid")
    assert float(loss) == pytest.approx(np.log1p(np.exp(-12)), rel=1e-6)


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_soft_losses_of_bf16_are_computed_in_fp32(name: LossName) -> None:
    coarse, targets = logits(torch.bfloat16), soft_targets().bfloat16()
    loss = classification_loss(coarse, targets, name=name)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, classification_loss(coarse.float(), targets.float(), name=name))


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
@pytest.mark.parametrize("extreme", [1e4, -1e4])
def test_soft_losses_of_extreme_logits_stay_finite(name: LossName, extreme: float) -> None:
    loss = classification_loss(torch.full((1, 3), extreme), torch.tensor([[0.5, 0.5, 0.0]]), name=name)
    assert torch.isfinite(loss)


def test_an_image_without_a_label_teaches_nothing_whether_mixed_or_not() -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1], [-1], [3], [5]])
    loss = classification_loss(logits, labels, name="softmax")
    assert torch.equal(loss, classification_loss(logits[[0, 2, 3]], labels[[0, 2, 3]], name="softmax") * 3 / 4)
    soft = classification_loss(logits, targets_of(labels, 6, name="softmax"), name="softmax")
    torch.testing.assert_close(loss, soft)


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_smoothing_spreads_a_share_of_each_target_over_all_classes(smoothing: float) -> None:
    """Of labels, and of the soft targets of mixup: the loss of (1 - s) t + s / K."""
    labels = torch.tensor([[1], [0], [2], [4]])
    targets = targets_of(labels, 5, name="softmax")
    log_shares = torch.log_softmax(logits().double(), 1)
    for answers, hard in ((labels, targets), (targets, targets), (soft_targets(), soft_targets())):
        smooth = (1 - smoothing) * hard.double() + smoothing / 5
        expected = -(smooth * log_shares).sum(1).mean()
        loss = classification_loss(logits(), answers, name="softmax", smoothing=smoothing)
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("smoothing", [1e-4, 0.1])
def test_smoothing_of_sigmoid_moves_each_class_towards_the_other_answer(smoothing: float) -> None:
    """Against NumPy in float64: the loss of (1 - s) y + s (1 - y), of labels and of soft targets."""
    answers = targets_of(LABELS, 5, name="sigmoid")
    shares = 1 / (1 + np.exp(-logits().double().numpy()))
    for given, plain in ((LABELS, answers), (answers, answers), (soft_targets(), soft_targets())):
        y = plain.double().numpy()
        smooth = (1 - smoothing) * y + smoothing * (1 - y)
        expected = -(smooth * np.log(shares) + (1 - smooth) * np.log(1 - shares)).sum(axis=1).mean()
        loss = classification_loss(logits(), given, name="sigmoid", smoothing=smoothing)
        assert float(loss) == pytest.approx(expected, rel=1e-6)


def test_the_mean_over_classes_would_be_another_run() -> None:
    """The trap that the summed loss avoids: PyTorch's default is smaller by the number of classes."""
    x, labels = torch.zeros(3, 21_843), torch.tensor([[1], [2], [3]])
    mean = torch.nn.functional.binary_cross_entropy_with_logits(x, multi_hot(labels, 21_843))
    ratio = float(classification_loss(x, labels, name="sigmoid") / mean)
    assert ratio == pytest.approx(21_843, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_image_without_a_label_adds_nothing_whichever_way_it_comes(smoothing: float) -> None:
    """Smoothing spreads a share of what a target has: of none there is none. Mixed with another, the other's part."""
    labels = torch.tensor([[1], [-1], [3], [4]])
    targets = targets_of(labels, 5, name="softmax")
    loss = classification_loss(logits(), labels, name="softmax", smoothing=smoothing)
    dense = classification_loss(logits(), targets, name="softmax", smoothing=smoothing)
    torch.testing.assert_close(dense, loss)
    alone = classification_loss(logits()[:1], targets[:1], name="softmax", smoothing=smoothing)
    mixed = classification_loss(
        logits()[:1], 0.7 * targets[:1] + 0.3 * targets[1:2], name="softmax", smoothing=smoothing
    )
    torch.testing.assert_close(mixed, 0.7 * alone)


_WEIGHTED_LABELS = torch.tensor([[1, 3, -1], [0, 2, 4], [4, -1, -1], [2, 1, -1], [3, 0, 2], [1, 2, 1]])
_WEIGHTS = torch.tensor(
    [[0.5, 0.25, 0.0], [8.0, 2.0, 4.0], [0.0, 0.0, 0.0], [-1.0, -1.0, -1.0], [3e38, 3e38, 0.0], [0.125, 0.5, 0.25]]
)


def weighted_by_numpy(name: LossName) -> np.ndarray:
    """Targets in float64, image by image. Weights below 0: the image has none."""
    targets = np.zeros((len(_WEIGHTED_LABELS), 5))
    for row, labels, weights in zip(targets, _WEIGHTED_LABELS.tolist(), _WEIGHTS.double().numpy(), strict=True):
        given = [label for label in labels if label >= 0]
        if weights[0] < 0:
            row[given[:1] if name == "softmax" else given] = 1
            continue
        for label, weight in zip(labels, weights, strict=True):
            if label >= 0:
                row[label] = max(row[label], weight)
        scale = row.sum() if name == "softmax" else max(1.0, weights.max())
        row[:] = row / (scale or 1.0)
    return targets


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_weights_of_labels_are_their_targets(name: LossName) -> None:
    found = weighted_targets(_WEIGHTED_LABELS, _WEIGHTS, 5, name=name)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), weighted_by_numpy(name), rtol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_the_loss_of_weighted_labels(name: LossName) -> None:
    """Against NumPy in float64: cross-entropies with these targets, and their gradient."""
    x = (4 * torch.randn(6, 5, generator=torch.Generator().manual_seed(0))).requires_grad_()
    targets, logits_BK = weighted_by_numpy(name), x.detach().double().numpy()
    shares = np.exp(logits_BK) / np.exp(logits_BK).sum(1, keepdims=True)
    chances = 1 / (1 + np.exp(-logits_BK))
    each = targets * np.log(chances) + (1 - targets) * np.log(1 - chances)
    expected = -(targets * np.log(shares) if name == "softmax" else each).sum() / 6
    slope = (targets.sum(1, keepdims=True) * shares if name == "softmax" else chances) - targets
    loss = classification_loss(x, weighted_targets(_WEIGHTED_LABELS, _WEIGHTS, 5, name=name), name=name)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, x)
    np.testing.assert_allclose(gradient.numpy(), slope / 6, atol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_weights_of_one_are_no_weights(name: LossName) -> None:
    labels = torch.tensor([[1], [0], [-1], [4]])
    found = weighted_targets(labels, torch.tensor([[1.0], [1.0], [0.0], [-1.0]]), 5, name=name)
    assert torch.equal(found, targets_of(labels, 5, name=name))


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    """`compute_class_weight("balanced")`, whose mean over all images is 1; classes without images keep 1."""
    labels = np.repeat([0, 2, 3], [90, 6, 4])
    expected = compute_class_weight("balanced", classes=np.array([0, 2, 3]), y=labels)
    found = balanced_weights(np.array([0.9, 0.0, 0.06, 0.04]), 5)
    assert found.tolist() == pytest.approx([expected[0], 1.0, *expected[1:], 1.0])
    assert found[torch.from_numpy(labels)].mean().item() == pytest.approx(1.0)


def test_weighted_classes_multiply_the_loss_of_their_images() -> None:
    """As torch's own cross-entropy with weights, whose mean divides by the weights instead of the images."""
    labels, weights = torch.tensor([0, 2, 2, 4]), torch.tensor([0.5, 1.0, 3.0, 1.0, 2.0])
    scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    targets = targets_of(labels[:, None], 5, name="softmax") * weights
    expected = F.cross_entropy(scores, labels, weight=weights, reduction="sum") / 4
    assert classification_loss(scores, targets, name="softmax").item() == pytest.approx(expected.item(), rel=1e-6)

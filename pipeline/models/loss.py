"""Losses in fp32. Targets are lists of labels padded with -1, int64[B, most labels of one image], or dense, float32[B,
K] between 0 and 1, as mixup and label weights make them."""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray

from pipeline.shared_settings import LossName


def classification_loss(
    logits_BK: torch.Tensor, targets: torch.Tensor, *, name: LossName, smoothing: float = 0.0
) -> torch.Tensor:
    """Returns the mean loss over the batch. `targets`: labels, int64[B, L], padded with -1, or probabilities,
    float32[B, K].

    `softmax`: the cross-entropy with the first label; an image without labels adds 0. `sigmoid`: the cross-entropy
    summed over classes (as in big_vision's sigmoid_xent for JFT and ImageNet-21k; averaging would change what a
    learning rate means). `smoothing` s: with softmax, this share of each target is spread evenly over all classes
    (Szegedy et al., 2016); with sigmoid, a target y of a class becomes (1 - s) y + s (1 - y) (vision_transformer, issue
    89).
    """
    logits_BK = logits_BK.float()
    if targets.is_floating_point():
        return _soft_loss(logits_BK, targets.float(), name=name, smoothing=smoothing)
    if name == "softmax":
        loss = F.cross_entropy(logits_BK, targets[:, 0], ignore_index=-1, reduction="sum", label_smoothing=smoothing)
        return loss / logits_BK.shape[0]
    if smoothing:
        return _soft_loss(logits_BK, multi_hot(targets, logits_BK.shape[1]), name=name, smoothing=smoothing)
    # softplus(-x) for a label that the image has, and softplus(x) for all others. PyTorch's own binary cross-entropy
    # rounds 1 + exp(x) and is 0.08 % off at logits of -10, where 20,000 classes start.
    signs_BK = 1.0 - 2.0 * multi_hot(targets, logits_BK.shape[1])
    return F.softplus(signs_BK * logits_BK).sum() / logits_BK.shape[0]


def targets_of(labels_BL: torch.Tensor, num_classes: int, *, name: LossName) -> torch.Tensor:
    """Returns float32[B, K] targets that give the same loss as the labels. With `softmax` they are 1 at the first
    label, with `sigmoid` 1 at each label. An image without a label has a row of zeros, from which softmax learns
    nothing."""
    return multi_hot(labels_BL[:, :1] if name == "softmax" else labels_BL, num_classes)


def weighted_targets(
    labels_BL: torch.Tensor, weights_BL: torch.Tensor, num_classes: int, *, name: LossName
) -> torch.Tensor:
    """Returns float32[B, K] targets for labels with weights of 0 or more, float32[B, L]. An image whose weights are
    negative has no weights, and gets the targets of `targets_of`.

    `sigmoid`: a label's target is its weight; weights above 1 are divided by the largest of their image. `softmax`: a
    label's target is its share of the image's weights. If all weights are 0, the image counts as unlabeled. If an image
    has a label twice, the larger weight counts.
    """
    is_label_BL = labels_BL >= 0
    plain_BL = is_label_BL.float()
    if name == "softmax":
        plain_BL[:, 1:] = 0.0
    given_BL = torch.where(is_label_BL, weights_BL, 0.0)
    most_B1 = given_BL.amax(dim=1, keepdim=True)
    if name == "softmax":  # divided twice, since a sum of large weights may not be finite
        given_BL = given_BL / torch.where(most_B1 > 0, most_B1, 1.0)
    else:
        given_BL = given_BL / most_B1.clamp(min=1.0)
    shares_BL = torch.where(weights_BL[:, :1] < 0, plain_BL, given_BL)
    targets_BK = torch.zeros(labels_BL.shape[0], num_classes + 1, device=labels_BL.device)
    columns_BL = torch.where(is_label_BL, labels_BL, num_classes)
    targets_BK = targets_BK.scatter_reduce_(1, columns_BL, shares_BL, "amax")[:, :num_classes]
    if name == "softmax":
        sums_B1 = targets_BK.sum(dim=1, keepdim=True)
        targets_BK = targets_BK / torch.where(sums_B1 > 0, sums_B1, 1.0)
    return targets_BK


def balanced_weights(shares_K: NDArray[np.float64], num_classes: int) -> torch.Tensor:
    """Returns the weight of each class, float32[num_classes]: 1 / (K share), where K is the number of classes with
    images. `shares_K`: the share of images that each class has. The mean weight over all images is 1. Classes without
    images have the weight 1."""
    weights = np.ones(num_classes)
    has_images = shares_K > 0
    weights[: shares_K.size][has_images] = 1.0 / (has_images.sum() * shares_K[has_images])
    return torch.from_numpy(weights).float()


def multi_hot(labels_BL: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Returns float32[B, K] with 1 at each label; -1 means no label."""
    targets_BK = torch.zeros(labels_BL.shape[0], num_classes + 1, device=labels_BL.device)
    columns_BL = torch.where(labels_BL < 0, num_classes, labels_BL)  # padding goes to a column that is cut off
    return targets_BK.scatter_(1, columns_BL, 1.0)[:, :num_classes]


def _soft_loss(logits_BK: torch.Tensor, targets_BK: torch.Tensor, *, name: LossName, smoothing: float) -> torch.Tensor:
    if name == "softmax":
        if smoothing:  # relative to the row's sum: PyTorch's smoothing would give a row of zeros a target
            spread_B1 = targets_BK.sum(dim=1, keepdim=True) / targets_BK.shape[1]
            targets_BK = (1.0 - smoothing) * targets_BK + smoothing * spread_B1
        return F.cross_entropy(logits_BK, targets_BK)
    if smoothing:
        targets_BK = (1.0 - smoothing) * targets_BK + smoothing * (1.0 - targets_BK)
    # Two terms, although softplus(x) - t * x is equal in exact arithmetic: it would lose digits where t = 1 and x > 0.
    losses_BK = targets_BK * F.softplus(-logits_BK) + (1.0 - targets_BK) * F.softplus(logits_BK)
    return losses_BK.sum() / logits_BK.shape[0]

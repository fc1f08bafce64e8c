"""Counts against NumPy, image by image."""

import numpy as np
import pytest
import torch

from pipeline.evaluation import counts as module
from pipeline.evaluation.counts import Counts

IMAGES, CLASSES, LABELS = 400, 12, 9


def counted(*, batch: int) -> tuple[Counts, dict[str, float], np.ndarray]:
    """Random answers in batches, and what NumPy makes of the same."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(IMAGES, CLASSES)).astype(np.float32)
    groups = np.where(rng.random((IMAGES, 2)) < 0.7, rng.integers(0, LABELS, (IMAGES, 2)), -1)
    targets = np.where(rng.random((IMAGES, 3)) < 0.4, rng.integers(0, CLASSES, (IMAGES, 3)), -1)
    odds = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = Counts(num_groups=LABELS, num_classes=CLASSES)
    for first in range(0, IMAGES, batch):
        rows = slice(first, first + batch)
        confidence = torch.from_numpy(odds[rows].max(axis=1))
        found.add(*(torch.from_numpy(x[rows]) for x in (logits, targets, groups)), confidence_B=confidence)
    return found, *by_numpy(logits, targets, groups, odds.max(axis=1))


def by_numpy(
    logits: np.ndarray, targets: np.ndarray, groups: np.ndarray, confidence: np.ndarray
) -> tuple[dict[str, float], np.ndarray]:
    matrix, of_group, bins = np.zeros((2, LABELS, CLASSES)), np.zeros((2, LABELS)), np.zeros((3, 15))
    num = right = in_five = 0
    for row in range(IMAGES):
        allowed = set(targets[row][targets[row] >= 0].tolist())
        if not allowed:
            continue
        said = int(logits[row].argmax())
        is_right = said in allowed
        num, right = num + 1, right + is_right
        in_five += bool(allowed & set(np.argsort(-logits[row])[:5].tolist()))
        bins[:, min(14, int(confidence[row] * 15))] += (1, confidence[row], is_right)
        for group in groups[row][groups[row] >= 0]:
            of_group[:, group] += (1, is_right)
            matrix[:, group, said] += (1, is_right)
    error = np.abs(bins[1] - bins[2]).sum() / num
    expected = {"scored": num, "right": right, "right_in_five": in_five, "error": error}
    return expected | {"mean": float((of_group[1] / of_group[0]).mean())}, matrix


@pytest.mark.parametrize("batch", [1, 7, 400])
def test_counts_are_those_of_numpy(batch: int) -> None:
    found, expected, matrix = counted(batch=batch)
    assert int(found.images) == IMAGES
    assert [int(getattr(found, name)) for name in ("scored", "right", "right_in_five")] == [
        expected[name] for name in ("scored", "right", "right_in_five")
    ]
    assert 0 < expected["right"] < expected["right_in_five"] < expected["scored"] < IMAGES
    assert found.mean_per_class() == pytest.approx(expected["mean"], rel=1e-12)
    assert found.calibration_error() == pytest.approx(expected["error"], rel=1e-6)
    assert torch.equal(found.confusion.reshape(LABELS, CLASSES), torch.from_numpy(matrix[0]))
    assert torch.equal(found.confusion_right.reshape(LABELS, CLASSES), torch.from_numpy(matrix[1]))
    shown = found.of_classes("abcdefghi", "abcdefghijkl")
    for name, sums in zip(("confusion", "confusion_right"), matrix, strict=True):
        assert shown[name] == [[*map(int, place), int(sums[tuple(place)])] for place in np.argwhere(sums)]


def test_few_classes_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three classes, all are among the five highest; beyond the limit there is no matrix."""
    monkeypatch.setattr(module, "_MOST_CELLS", 8)
    found = Counts(num_groups=3, num_classes=3)
    logits, labels = torch.eye(3), torch.tensor([[1], [1], [-1]])
    found.add(logits, labels, labels, confidence_B=torch.tensor([0.2, 1.0, 0.5]))
    assert [int(found.scored), int(found.right), int(found.right_in_five)] == [2, 1, 2]
    assert found.confusion.numel() == 0
    assert found.of_group.tolist() == [[0, 2, 0], [0, 1, 0]]
    assert found.mean_per_class() == 0.5
    assert found.of_bin[0].tolist() == [0, 0, 0, 1, *[0] * 10, 1], "confidence 1 is in the last bin"


def test_equal_logits_count_as_the_first_of_them() -> None:
    found = Counts(num_groups=9, num_classes=9)
    labels = torch.arange(9)[:, None]
    found.add(torch.zeros(9, 9), labels, labels, confidence_B=torch.full((9,), 1 / 9))
    assert int(found.right) == 1

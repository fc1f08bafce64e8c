"""The labels of a batch, and their weights, as matrices with a row per sample."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shards.sample_rows import NO_WEIGHT

Labels = tuple[NDArray[np.int64], tuple[float, ...]]  # of a sample, and their weights: one per label, or none


def label_matrix(found: Sequence[Labels]) -> torch.Tensor:
    """int64[n, most labels of one sample, at least 1], padded with -1."""
    matrix = np.full(_shape(found), -1, dtype=np.int64)
    for entry, (own, _) in enumerate(found):
        matrix[entry, : own.size] = own
    return torch.from_numpy(matrix)


def weight_matrix(found: Sequence[Labels]) -> torch.Tensor:
    """float32[n, most labels of one sample, at least 1]: NO_WEIGHT in rows without weights; 0 pads the others."""
    matrix = np.full(_shape(found), NO_WEIGHT, dtype=np.float32)
    for entry, (_, weights) in enumerate(found):
        if weights:
            matrix[entry] = 0.0
            matrix[entry, : len(weights)] = weights
    return torch.from_numpy(matrix)


def _shape(found: Sequence[Labels]) -> tuple[int, int]:
    return len(found), max([1, *(own.size for own, _ in found)])

"""The labels of a batch, and their weights, as matrices with a row per sample.

Nearly all samples have one label or none: these are arrays. Only samples with several labels, or with weights, are
looked at one by one.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from shards.sample_rows import NO_WEIGHT

Labels = tuple[NDArray[np.int64], tuple[float, ...]]  # of a sample, and their weights: one per label, or none


def label_matrix(single: NDArray[np.int64], others: Mapping[int, Labels]) -> torch.Tensor:
    """int64[n, most labels of one sample, at least 1], padded with -1. `single` int64[n]: each sample's label, -1
    without one; `others`: by row, all labels of those to which this does not apply."""
    matrix = np.full(_shape(single, others), -1, dtype=np.int64)
    matrix[:, 0] = single
    for row, (own, _) in others.items():
        matrix[row] = -1
        matrix[row, : own.size] = own
    return torch.from_numpy(matrix)


def weight_matrix(single: NDArray[np.int64], others: Mapping[int, Labels]) -> torch.Tensor:
    """float32, shaped as the labels: NO_WEIGHT in rows without weights; 0 pads the others."""
    matrix = np.full(_shape(single, others), NO_WEIGHT, dtype=np.float32)
    for row, (_, weights) in others.items():
        if weights:
            matrix[row] = 0.0
            matrix[row, : len(weights)] = weights
    return torch.from_numpy(matrix)


def _shape(single: NDArray[np.int64], others: Mapping[int, Labels]) -> tuple[int, int]:
    return single.size, max([1, *(own.size for own, _ in others.values())])

"""Labels and weights of a batch as matrices."""

import numpy as np

from pipeline.data.label_matrices import Labels, label_matrix, weight_matrix
from shards.sample_rows import NO_WEIGHT


def labels(*own: int) -> Labels:
    return np.array(own, dtype=np.int64), ()


def test_labels_are_padded_with_minus_one() -> None:
    found = [labels(4), labels(1, 2, 3), labels()]
    assert label_matrix(found).tolist() == [[4, -1, -1], [1, 2, 3], [-1, -1, -1]]
    assert label_matrix(found[2:]).tolist() == [[-1]]


def test_rows_without_weights_are_marked_and_others_padded_with_zero() -> None:
    found = [(labels(4, 5)[0], (0.5, 0.25)), labels(1, 2, 3), labels()]
    none = [NO_WEIGHT] * 3
    assert weight_matrix(found).tolist() == [[0.5, 0.25, 0.0], none, none]
    assert weight_matrix([labels()]).tolist() == [[NO_WEIGHT]]

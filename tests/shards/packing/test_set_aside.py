"""The test split that packing sets aside: how many images of each class, and which."""

import numpy as np
import pyarrow as pa
import pytest

from shards.packing.left_out import is_set_aside


def set_aside(labels: list[list[str]], *, share: float, seed: int = 0) -> list[bool]:
    prefixes = np.random.default_rng(1).integers(0, 1 << 63, len(labels)).astype(np.uint64)
    column = pa.chunked_array([pa.array(labels[:3], pa.list_(pa.string())), labels[3:]], pa.list_(pa.string()))
    return [bool(one) for one in is_set_aside(prefixes, column, share=share, seed=seed)]


@pytest.mark.parametrize(
    ("num_images", "share", "num_test"),
    [
        pytest.param(10, 0.2, 2, id="as asked for"),
        pytest.param(12, 0.125, 2, id="half is rounded up"),
        pytest.param(3, 0.1, 1, id="at least one"),
        pytest.param(3, 0.9, 2, id="not all"),
        pytest.param(1, 0.9, 0, id="a single image is trained on"),
    ],
)
def test_each_class_has_its_share(num_images: int, share: float, num_test: int) -> None:
    found = set_aside([["a"]] * num_images + [["b", "a"]] * 10 + [[]] * 5, share=share)
    assert sum(found[:num_images]) == num_test
    assert sum(found[num_images : num_images + 10]) == round(10 * share + 1e-9)
    assert 0 < sum(found[num_images + 10 :]) < 5, "images without a label are a class"


def test_the_seed_and_the_bytes_alone_decide() -> None:
    labels = [["a"], ["b"]] * 50
    assert set_aside(labels, share=0.5) == set_aside(labels, share=0.5) != set_aside(labels, share=0.5, seed=1)
    prefixes = np.arange(100, dtype=np.uint64) // 2 * 7919  # each image twice, as --dedup.duplicates keep has them
    found = is_set_aside(prefixes, pa.chunked_array([[["a"], ["b"]] * 50]), share=0.3, seed=3)
    assert sum(found) == 30
    assert (found[::2] == found[1::2]).all(), "even with different labels"

"""Copies: the first stays, and labels are kept or merged. The test split: how many images of each class, and which."""

import hashlib
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.packing.left_out import Labels, candidates, find_duplicates, is_set_aside, merged_labels


def prefixes(images: list[bytes]) -> np.ndarray:
    """The first 8 bytes of each image's sha256."""
    return np.array([int.from_bytes(hashlib.sha256(data).digest()[:8], "little") for data in images], np.uint64)


def table(images: list[bytes], labels: list[list[str]], weights: list[list[float]]) -> pa.Table:
    """The images' rows of a scan file."""
    columns = {
        "sha256": pa.array([hashlib.sha256(data).digest() for data in images], pa.binary(32)),
        "source": [f"image {number}" for number in range(len(images))],
        "labels": pa.array(labels, pa.list_(pa.string())),
        "weights": pa.array(weights, pa.list_(pa.float32())),
    }
    return pa.table(columns)


@given(images=st.lists(st.integers(0, 8), min_size=1, max_size=60), seed=st.integers(0, 1000))
def test_the_first_of_equal_images_stays(images: list[int], seed: int) -> None:
    data = [bytes([number]) for number in images]
    is_fit = np.random.default_rng(seed).random(len(data)) < 0.8
    rows = candidates(prefixes(data), is_fit)
    everything = table(data, [["x"]] * len(data), [[]] * len(data))
    found = find_duplicates(rows, lambda some: everything.take(pa.array(some)), policy="first")
    first: dict[int, int] = {}
    expected = []
    for row in np.flatnonzero(is_fit).tolist():
        if images[row] in first:
            expected.append((row, first[images[row]]))
        first.setdefault(images[row], row)
    assert found.rows.tolist() == [row for row, _ in expected]
    assert found.kept_sources.to_pylist() == [f"image {kept}" for _, kept in expected]
    assert (found.num_relabelled, found.labels) == (0, {})


def test_equal_prefixes_of_different_images_are_no_duplicates() -> None:
    shas = [b"same8byt" + bytes([tail]) * 24 for tail in (1, 2, 1)]
    everything = table([b"a", b"b", b"c"], [["x"]] * 3, [[]] * 3)
    everything = everything.set_column(0, "sha256", pa.array(shas, pa.binary(32)))
    rows = candidates(np.zeros(3, np.uint64), np.ones(3, np.bool_))
    assert rows.tolist() == [0, 1, 2]
    found = find_duplicates(rows, lambda some: everything.take(pa.array(some)), policy="first")
    assert (found.rows.tolist(), found.kept_sources.to_pylist()) == ([2], ["image 0"])


@pytest.mark.parametrize(
    ("labels", "num_relabelled", "merged"),
    [
        ([["a"], ["a"], ["a"]], 0, {}),
        ([["a"], ["b"], ["a"]], 1, {0: (("a", "b"), ())}),
        ([["a"], ["c"], ["b"]], 2, {0: (("a", "c", "b"), ())}),
        ([["a", "b"], ["b", "a"], ["b"]], 1, {0: (("a", "b"), ())}),
    ],
)
def test_other_labels_are_counted_and_merged_where_asked(
    labels: list[list[str]], num_relabelled: int, merged: dict[int, Labels]
) -> None:
    everything = table([b"same"] * 3, labels, [[]] * 3)
    for policy, expected in (("first", {}), ("merge", merged)):
        found = find_duplicates(np.arange(3), lambda some: everything.take(pa.array(some)), policy=policy)  # type: ignore[arg-type]
        assert (found.num_relabelled, found.labels) == (num_relabelled, expected)


@pytest.mark.parametrize(
    ("labels", "weights", "num_relabelled", "merged"),
    [
        ([["a"], ["a"], ["a"]], [[0.125], [0.875], [0.5]], 0, {0: (("a",), (0.875,))}),
        ([["a"], ["a"], ["a"]], [[0.5], [0.5], [0.125]], 0, {}),
        ([["a", "b"], ["b", "a"], ["b"]], [[0.5, 0.125], [0.25, 0.5], [0.75]], 1, {0: (("a", "b"), (0.5, 0.75))}),
        ([["a"], ["b"], ["a"]], [[0.25], [0.5], [0.75]], 1, {0: (("a", "b"), (0.75, 0.5))}),
        ([["a"], ["a"], ["a"]], [[0.5], [], [0.25]], 0, {0: (("a",), ())}),
    ],
)
def test_weights_are_merged_where_the_labels_are_the_same(
    labels: list[list[str]], weights: list[list[float]], num_relabelled: int, merged: dict[int, Labels]
) -> None:
    everything = table([b"same"] * 3, labels, weights)
    for policy, expected in (("first", {}), ("merge", merged)):
        found = find_duplicates(np.arange(3), lambda some: everything.take(pa.array(some)), policy=policy)  # type: ignore[arg-type]
        assert (found.num_relabelled, found.labels) == (num_relabelled, expected)


@pytest.mark.parametrize("policy", ["first", "merge"])
def test_an_image_that_is_listed_again_has_all_labels(policy: Literal["first", "merge"]) -> None:
    everything = table([b"same"] * 4, [["a"], ["b"], ["c"], ["a"]], [[]] * 4)
    sources = pa.array(["x.jpg", "./x.jpg", "copy.jpg", "x.jpg"])
    everything = everything.set_column(1, "source", sources)
    found = find_duplicates(np.arange(4), lambda some: everything.take(pa.array(some)), policy=policy)
    assert (found.num_relisted, found.num_relabelled) == (1, 1)
    assert found.labels == {0: (("a", "b") if policy == "first" else ("a", "b", "c"), ())}


@pytest.mark.parametrize(
    ("held", "more", "expected"),
    [
        ((("a",), ()), (("b",), ()), (("a", "b"), ())),
        ((("a",), (0.5,)), (("b",), (0.25,)), (("a", "b"), (0.5, 0.25))),
        ((("a", "b"), (0.5, 0.1)), (("b",), (0.25,)), (("a", "b"), (0.5, 0.25))),
        ((("a",), (0.5,)), (("b",), ()), (("a", "b"), ())),  # a label without a weight: none has one
    ],
)
def test_labels_are_merged_with_their_weights(held: Labels, more: Labels, expected: Labels) -> None:
    assert merged_labels(held, more) == expected


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

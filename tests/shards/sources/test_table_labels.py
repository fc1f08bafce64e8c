"""Table cells as labels and weights."""

import math
from typing import Any

import numpy as np
import pytest

from shards.errors import ImageRefusedError
from shards.sources.table_labels import label_names, weighted


@pytest.mark.parametrize(
    ("value", "labels"),
    [
        (b"cat", ("cat",)),
        (b" cat | dog ||", ("cat", "dog")),
        (b"", ()),
        ("猫".encode(), ("猫",)),
        ("cafe\u0301".encode(), ("caf\u00e9",)),  # macOS' form of the same name
        ("a|b", ("a|b",)),  # text in a Parquet file is one label
        (["a", "b"], ("a", "b")),
        ([1, 7], ("one", "7")),
        (0, ("zero",)),
        (-1, ()),
        ([-1, 1], ("one",)),
        (-7, ()),
        (-1.0, ()),
        (b"-1", ()),
        (b"-1.0", ()),
        ("-2", ()),
        (b"0.0|0", ("0", "0")),
        ("3.00", ("3",)),
        (b"007|1.5|-x|v1.0", ("007", "1.5", "-x", "v1.0")),
        (b"NaN|nan|None|null|NULL|<NA>|NA|N/A|\\N", ()),
        ("None", ()),
        (b"none|Null|nano", ("none", "Null", "nano")),
        (1.0, ("one",)),
        (float("nan"), ()),
        (None, ()),
        ([None, "a"], ("a",)),
    ],
)
def test_labels(value: Any, labels: tuple[str, ...]) -> None:
    assert label_names(value, separator="|", names=("zero", "one")) == labels


def test_a_number_beyond_the_names_is_not_taken_for_one_of_them() -> None:
    """Labels from 1 with the names 1, 2, 3: class 3 would have the images of 2 and of 3."""
    names = ("1", "2", "3")
    assert label_names([0, 2], names=names) == ("1", "3")
    with pytest.raises(ImageRefusedError, match="its label 3 has no name: 3 are known, from class 0 on"):
        label_names(3, names=names)


def test_without_a_separator_all_is_one_label() -> None:
    assert label_names(b"a|b") == ("a|b",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"id": 1}, "a label is a dict; allowed: text, whole numbers and lists of them"),
        (2.5, "a label is a float; allowed"),  # it became the class "2.5" without a word
        (True, "a label is a bool; allowed"),
        ([["a"], ["b"]], "a label is a list; allowed"),
        (math.inf, "a label is a float; allowed"),
        ("a" * 1025, "its label is too long: 1025 characters, allowed: 1024"),
        (b"a|" + b"b" * 1025, "its label is too long: 1025 characters, allowed: 1024"),
        (b"caf\xe9", r"its label 'caf\\\\xe9' is not UTF-8; save the list as UTF-8"),
        ("cat\ndog", r"its label 'cat\\ndog' has a line break; allowed: text on one line"),
        ("cat\u2028dog", "has a line break"),
        ("cat\x0bdog", "has a line break"),
        (b"|" * 10_000, "too many labels: 10001, allowed: 10000"),
        ([1] * 10_001, "too many labels: 10001, allowed: 10000"),
    ],
)
def test_what_is_no_label(value: Any, message: str) -> None:
    with pytest.raises(ImageRefusedError, match=message):
        label_names(value, separator="|")


@pytest.mark.parametrize(
    ("value", "weights"),
    [
        (b"0.5|1", (0.5, 1.0)),
        (b"", ()),
        (None, ()),
        ([], ()),
        ([0.1, 1], (float(np.float32(0.1)), 1.0)),
    ],
)
def test_weights(value: Any, weights: tuple[float, ...]) -> None:
    assert weighted(("a", "b"), value, separator="|") == (("a", "b"), weights)


@pytest.mark.parametrize(
    ("labels", "value", "message"),
    [
        (("a", "b"), b"0.5", "1 weights for 2 labels"),
        (("a",), [0.5, 0.5], "2 weights for 1 labels"),
        ((), 0.5, "1 weights for 0 labels"),
        (("a",), b"much", "the weight 'much'"),
        (("a",), [float("nan")], "the weight 'nan'"),
        (("a",), b"1e60", "the weight '1e60'"),
        (("a",), b"-1", "the weight '-1'"),
        (("a",), [None], "the weight 'None'"),
        (("a", "a"), b"1|2", "appears twice"),
    ],
)
def test_weights_that_do_not_belong_to_the_labels(labels: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(ImageRefusedError) as caught:
        weighted(labels, value, separator="|")
    assert message in str(caught.value)

"""Table cells as labels and weights."""

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from shards.errors import ImageRefusedError
from shards.sources.table_labels import weighted, written_labels


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
        ([1, 7, 7], ("1", "7", "7")),
        (-1, ("-1",)),
        (-1.0, ("-1",)),
        (3.0, ("3",)),
        (2.5, ("2.5",)),
        (1e300, (str(int(1e300)),)),
        (b"0.0|0|-1", ("0.0", "0", "-1")),
        (b"NaN|None", ("NaN", "None")),  # a labels file may list them
        (float("nan"), ()),
        (None, ()),
        ([None, "a"], ("a",)),
        ([1, None, 0], ("1", "", "0")),  # of a vector, each value keeps its place
        ([True, False], ("1", "0")),
        ([Decimal("1.0"), Decimal(2)], ("1.0", "2")),
        (str([0, 1] * 300), ("0", "1") * 300),  # too long for a name
        ("0 1 " * 300, ("0", "1") * 300),
    ],
)
def test_labels_are_kept_as_they_are_written(value: Any, labels: tuple[str, ...]) -> None:
    assert written_labels(value, separator="|") == labels


def test_without_a_separator_all_is_one_label() -> None:
    assert written_labels(b"a|b") == ("a|b",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"id": 1}, "its label {'id': 1} is a dict; allowed: text, whole numbers and lists of them"),
        (True, "its label True is a bool; allowed"),
        ([["a"], ["b"]], r"its label \['a'\] is a list; allowed"),
        (math.inf, "its label inf is a float; allowed"),
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
        written_labels(value, separator="|")


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
    ],
)
def test_weights_that_do_not_belong_to_the_labels(labels: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(ImageRefusedError) as caught:
        weighted(labels, value, separator="|")
    assert message in str(caught.value)

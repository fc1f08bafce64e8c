"""Reasons without the details of one image."""

import pyarrow as pa
import pytest

from shards.packing.reasons import general_reasons


@pytest.mark.parametrize(
    ("reason", "general"),
    [
        (None, ""),
        ("empty file", "empty file"),
        ("too large: 7 bytes, allowed: 5", "too large"),
        ("unknown label 'a: b'", "unknown label …"),
        ('unknown label "it\'s"', "unknown label …"),
        (r"unknown label 'it\'s \"'", "unknown label …"),
        ("'../x' is not a path below the source's root: no '..'", "… is not a path below the source's root"),
        ("some list.csv row 12: a label with a weight appears twice", "a label with a weight appears twice"),
        ("x.parquet row 3: the weight '1: 2': allowed: numbers", "the weight …"),
        ("bob's list.tsv.gz row 3: no label", "no label"),
        ("a quote 'that never ends: so", "a quote 'that never ends"),
        ("damaged\nfile: a\nb", "damaged\nfile"),
    ],
)
def test_the_general_part(reason: str | None, general: str) -> None:
    assert general_reasons(pa.chunked_array([[reason]], pa.string())).to_pylist() == [general]

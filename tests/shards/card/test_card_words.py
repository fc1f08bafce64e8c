"""The card's words: printable names, numbers with their nouns, shares that are never rounded to nothing."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from shards.card.card_tally import Tally
from shards.card.card_words import byte_text, counted, image_words, paragraphs, share_text, shown, title_of
from shards.index import INDEX_SCHEMA


def tally_of(*orientations: int, ext: str = "jpg") -> Tally:
    rows = [
        {"size": 9, "ext": ext, "height": 2, "width": 3, "labels": [0], "orientation": turn} for turn in orientations
    ]
    tally = Tally(top_classes=np.array([0]), num_classes=1)
    tally.add(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
    return tally


@pytest.mark.parametrize(
    ("orientations", "modes", "expected"),
    [
        ((1, 1), {"RGB": 2}, "2 JPEG; all RGB"),
        ((1,) * 500, {"RGB": 486, "L": 14}, "500 JPEG; 486 RGB, 14 greyscale"),
        ((1, 6), {"RGB": 1, "L": 1}, "2 JPEG; 1 RGB, 1 greyscale; 1 with EXIF rotation (by 90° clockwise)"),
        (
            (6, 6, 3, 8),
            {},
            "4 JPEG; 4 with EXIF rotation (1 by 180°, 2 by 90° clockwise, 1 by 90° anticlockwise)",
        ),
        ((2, 1), {}, "2 JPEG; 1 mirrored by EXIF"),
        (
            (2, 5),
            {"": 2},
            "2 JPEG; all of unknown mode; 1 mirrored by EXIF, 1 with EXIF rotation (by 90° anticlockwise and mirrored)",
        ),
    ],
)
def test_image_words(orientations: tuple[int, ...], modes: dict[str, int], expected: str) -> None:
    assert image_words(tally_of(*orientations), Counter(modes)) == expected


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 classes"), (1, "1 class"), (2, "2 classes"), (18_291, "18,291 classes")]
)
def test_counted(count: int, expected: str) -> None:
    assert counted(count, "class", "classes") == expected


def test_paragraphs_keep_urls_and_joined_characters() -> None:
    assert paragraphs("a\n\n https://h/x?id=3 \n👩\u200d🔬\x00\u202e") == [
        "a",
        " https://h/x?id=3 ",
        "👩\u200d🔬\\x00\\u202e",
    ]


@pytest.mark.parametrize(
    ("url", "title"),
    [
        ("s3://bucket/a/in21k", "in21k"),
        ("s3://bucket", "bucket"),
        ("/data/sets/digits/", "digits"),
        ("s3://key:secret@bucket", "bucket"),
        ("https://host/x/set?sig=secret", "set"),
    ],
)
def test_title(url: str, title: str) -> None:
    assert title_of(url) == title


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain <b>", "plain <b>"),
        ("a\tb", "a\\tb"),
        ("a\u202eb", "a\\u202eb"),
        ("0123456789", "01…89"),
        ("https://u:p@h/x?y=1 and s3://k@b/c", "https://h/x and s3://b/c"),
    ],
)
def test_shown(text: str, expected: str) -> None:
    assert shown(text, 4 if text.isdecimal() else 90) == expected


def test_a_long_name_takes_no_longer_than_its_length() -> None:
    assert shown("x" * 2_000_000, 4) == "xx…xx"


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_999, "1.00 MB"), (56.5e6, "56.5 MB"), (1.3e12, "1.30 TB")],
)
def test_byte_text(count: float, expected: str) -> None:
    assert byte_text(count) == expected


@pytest.mark.parametrize(
    ("count", "total", "expected"),
    [
        (0, 9, "0 %"),
        (9, 9, "100 %"),
        (1, 3, "33.3 %"),
        (1, 10**6, "<1 %"),
        (9, 1000, "<1 %"),
        (10, 1000, "1.0 %"),
        (10**6 - 1, 10**6, ">99.9 %"),
        (0, 0, "0 %"),
    ],
)
def test_share_text(count: int, total: int, expected: str) -> None:
    assert share_text(count, total) == expected

"""Names on a page are only text: printable, without passwords, and not endless."""

import pytest

from shards.pages.page import paragraphs, shown


def test_paragraphs_keep_urls_and_joined_characters() -> None:
    assert paragraphs("a\n\n https://h/x?id=3 \n👩\u200d🔬\x00\u202e") == [
        "a",
        " https://h/x?id=3 ",
        "👩\u200d🔬\\x00\\u202e",
    ]


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

"""Many records, paths and hashes at once: the first wrong one is named."""

from dataclasses import dataclass
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.files.typed_json import is_unicode, not_plain, not_sha256, records_from
from shards.schema.config_values import Range
from shards.storage.objects import checked_path


@dataclass(frozen=True, kw_only=True)
class Item:
    path: str
    count: Annotated[int, Range(0, 9)]


GOOD = {"path": "a", "count": 3}


def test_records_come_as_dataclasses() -> None:
    assert records_from(Item, [GOOD, GOOD | {"count": 9}], name="items") == (
        Item(path="a", count=3),
        Item(path="a", count=9),
    )
    assert records_from(Item, [], name="items") == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"path": "a"}, "items.1 is {'path': 'a'}; allowed: an object with"),
        (GOOD | {"more": 1}, "items.1 is"),
        ([], "items.1 is []"),
        (GOOD | {"count": 10}, "items.1.count is 10; allowed: 0 to 9"),
        (GOOD | {"count": -1}, "items.1.count is -1"),
        (GOOD | {"count": True}, "items.1.count is True; allowed: a whole number"),
        (GOOD | {"count": "3"}, "items.1.count is '3'"),
        (GOOD | {"count": None}, "items.1.count is None"),
        (GOOD | {"path": 3}, "items.1.path is 3; allowed: a text"),
    ],
)
def test_the_first_wrong_value_is_named(value: object, message: str) -> None:
    with pytest.raises(ValueError, match="items") as caught:
        records_from(Item, [GOOD, value, value], name="items")
    assert message in str(caught.value)


PLAIN = ("a", "a/b", "a.tar", "..a/b..", "a/...", "x y/ü.tar", "a\nb", ".a/.b", "a\n..", "a" * 1024)
NOT_PLAIN = ("", "/a", "a//b", "a/", "a/..", "../a", "..", ".", "a/./b", "./a", "a\0", "a/\ud800", "a" * 1025)


@pytest.mark.parametrize("path", PLAIN)
def test_plain_paths(path: str) -> None:
    assert not_plain([*PLAIN, path]) is None
    assert checked_path(path)


@pytest.mark.parametrize("path", NOT_PLAIN)
def test_other_paths(path: str) -> None:
    assert not_plain(["a", path, "b"]) == path
    assert not_plain(["a\nb", path, "b"]) == path, "by the slow way, too"


@given(st.lists(st.text("a./\n", max_size=5), max_size=4))
def test_paths_are_plain_where_a_store_takes_them(paths: list[str]) -> None:
    def is_taken(path: str) -> bool:
        try:
            return checked_path(path) == path
        except ValueError:
            return False

    assert not_plain(paths) == next((path for path in paths if not is_taken(path)), None)


@pytest.mark.parametrize("text", ["", "a" * 63, "A" * 64, "g" * 64, " " * 64, "a " * 32, "ab" * 33])
def test_hashes(text: str) -> None:
    assert not_sha256(["ab" * 32, "00" * 32]) is None
    assert not_sha256(["ab" * 32, text]) == text


def test_half_a_pair_is_no_unicode() -> None:
    assert is_unicode("ü😀")
    assert not is_unicode("\ud83d")

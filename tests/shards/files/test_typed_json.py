"""JSON of strangers: wrong values are refused by name, in single records and in lists of many."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.config_values import Range
from shards.files.typed_json import MOST_DEPTH, is_unicode, not_plain, not_sha256, parse_json, read_record, records_from
from shards.storage.objects import checked_path

GOOD = {"path": "a", "count": 3}
PLAIN = ("a", "a/b", "a.tar", "..a/b..", "a/...", "x y/ü.tar", "a\nb", ".a/.b", "a\n..", "a" * 1024)
NOT_PLAIN = ("", "/a", "a//b", "a/", "a/..", "../a", "..", ".", "a/./b", "./a", "a\0", "a/\ud800", "a" * 1025)


@dataclass(frozen=True, kw_only=True)
class Inner:
    path: str
    num_bytes: Annotated[int, Range(0, most=1 << 40)] = 0


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    share: float
    inners: tuple[Inner, ...] = ()
    files: dict[str, str] | None = None
    pair: tuple[int, int] = (0, 0)
    free: Any = None


def test_a_record_comes_back_typed() -> None:
    found = read_record(
        Outer,
        b'{"name": "a", "share": 1, "inners": [{"path": "p", "num_bytes": 3}], "files": {"x": "y"}, "pair": [1, 2]}',
    )
    assert found == Outer(name="a", share=1.0, inners=(Inner(path="p", num_bytes=3),), files={"x": "y"}, pair=(1, 2))
    assert type(found.share) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "the JSON is []; allowed: an object"),
        ('{"share": 1}', "name is missing"),
        ('{"name": "a", "share": 1, "nmae": 2}', "'nmae' is not a field; allowed: name, share"),
        ('{"name": 1, "share": 1}', "name is 1; allowed: a text"),
        ('{"name": null, "share": 1}', "name is None; allowed: a text"),
        ('{"name": "a", "share": 1, "pair": null}', "pair is None; allowed: a list"),
        (
            '{"name": "a", "share": 1, "inners": [{"path": "p", "num_bytes": null}]}',
            "inners.0.num_bytes is None; allowed: a whole number",
        ),
        ('{"name": "a", "share": true}', "share is True; allowed: a finite number"),
        ('{"name": "a", "share": 1e999}', "share is inf; allowed: a finite number"),
        ('{"name": "a", "share": NaN}', "NaN is not a JSON number"),
        (f'{{"name": "a", "share": 1{"0" * 4000}}}', "allowed: a finite number"),
        (f'{{"name": "a", "share": 1{"0" * 5000}}}', "digits"),
        ('{"name": "a", "share": 1, "inners": {}}', "inners is {}; allowed: a list"),
        ('{"name": "a", "share": 1, "inners": [7]}', "inners.0 is 7; allowed: an object"),
        ('{"name": "a", "share": 1, "inners": [{"path": "p", "num_bytes": -1}]}', "inners.0.num_bytes is -1; allowed"),
        (
            '{"name": "a", "share": 1, "inners": [{"path": "p", "num_bytes": 2.0}]}',
            "num_bytes is 2.0; allowed: a whole",
        ),
        ('{"name": "a", "share": 1, "files": {"x": 1}}', "files.'x' is 1; allowed: a text"),
        ('{"name": "a", "share": 1, "pair": [1]}', "pair has 1 entries; allowed: 2"),
        ('{"name": "a", "name": "b", "share": 1}', "'name' is named twice"),
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "nested more than"),
        ("[" * 200_000, "nested more than"),
        ('{"a":' * 200_000, "nested more than"),
        ("{", "Expecting"),
    ],
)
def test_anything_else_is_one_message(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".+") as caught:
        read_record(Outer, text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


def test_bytes_that_are_not_utf_8_are_refused() -> None:
    with pytest.raises(ValueError, match="utf-8"):
        parse_json(b'"\xff"')


@dataclass(frozen=True, kw_only=True)
class Item:
    path: str
    count: Annotated[int, Range(0, 9)]


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

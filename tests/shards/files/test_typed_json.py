"""JSON of strangers as typed values."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from shards.files.typed_json import MOST_DEPTH, parse_json, read_record
from shards.schema.config_values import Range


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
        ('{"name": "a", "share": 1, "nmae": 2}', "'nmae' is no field; allowed: name, share"),
        ('{"name": 1, "share": 1}', "name is 1; allowed: a text"),
        ('{"name": null, "share": 1}', "name is None; allowed: a text"),
        ('{"name": "a", "share": true}', "share is True; allowed: a finite number"),
        ('{"name": "a", "share": 1e999}', "share is inf; allowed: a finite number"),
        ('{"name": "a", "share": NaN}', "NaN is no number of JSON"),
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

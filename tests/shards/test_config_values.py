"""Fields of configurations hold what their types say, or the message says what is allowed; so do those of reading."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from shards.config_values import (
    Difference,
    Range,
    as_lines,
    differences,
    flattened,
    refuse_wrong_values,
    shown,
    shown_value,
    whole_number,
)


@dataclass(frozen=True)
class Inner:
    pass


@dataclass(frozen=True)
class Other:
    pass


@dataclass(frozen=True, kw_only=True)
class Example:
    count: int = 1
    most: Annotated[int, Range(1)] | None = None
    share: float = 0.5
    word: Literal["a", "b"] = "a"
    step: Literal[1, 2] = 1
    flag: bool = False
    name: str = ""
    names: tuple[str, ...] = ()
    units: tuple[Annotated[int, Range(1, 9)], ...] | None = None
    pairs: tuple[tuple[str, float], ...] = ()
    inner: Inner = Inner()
    either: Inner | Other = Inner()


@pytest.mark.parametrize(
    "fields",
    [
        {"count": -3, "share": 1, "word": "b", "flag": True, "name": "x"},
        {"most": 3, "units": (1, 2)},
        {"most": None, "units": None, "share": -1e300},
        {"inner": Inner(), "either": Other()},
    ],
)
def test_values_of_their_type_pass(fields: dict[str, Any]) -> None:
    refuse_wrong_values(Example(**fields), where="x.")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param((165,), "165", id="one number"),
        pytest.param((4, 8.5, -1), "4 8.5 -1", id="numbers"),
        pytest.param((), "none", id="empty"),
        pytest.param(("a", "b.tar"), "a b.tar", id="texts"),
        pytest.param(("a b", "", "c\x1b[0m", "d\n"), r"'a b' '' 'c\x1b[0m' 'd\n'", id="quoted and escaped"),
        pytest.param(tuple(range(200)), " ".join(map(str, range(200)))[:200] + "...", id="cut"),
        pytest.param((True,), "(True,)", id="what is no list of a command line"),
        pytest.param([1, 2], "[1, 2]", id="a wrong type"),
        pytest.param("adamw", "'adamw'", id="a text"),
    ],
)
def test_a_list_is_shown_as_it_is_typed(value: object, text: str) -> None:
    assert shown_value(value) == text


def test_values_that_cannot_be_spelt_are_shown() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert shown_value(nested) == "deeply nested"
    assert shown_value([10**5000]) == "a number of thousands of digits"
    assert shown_value((10**5000,)) == "a number of thousands of digits"


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("0012", 12), ("9" * 19, 10**19 - 1), ("9" * 20, None), ("9" * 5000, None), ("²", None), ("٣", None)],
)
def test_whole_numbers_in_digits(text: str, number: int | None) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize(
    ("bounds", "said", "held", "refused"),
    [
        (Range(1), "1 or more", (1, 2.5), (0, 0.9)),
        (Range(0, zero="off"), "0 (off) or more", (0, 1), (-1e-9,)),
        (Range(above=0), "above 0", (1e-9,), (0, -1)),
        (Range(0, 1), "0 to 1", (0, 1), (-0.1, 1.1)),
        (Range(0, below=1), "0 to below 1", (0, 0.999), (1,)),
        (Range(above=0, most=1), "above 0 to 1", (0.1, 1), (0, 1.1)),
        (Range(0.5, 1_000_000), "0.5 to 1,000,000", (0.5,), (0.4, 1e7)),
    ],
)
def test_ranges(bounds: Range, said: str, held: tuple[float, ...], refused: tuple[float, ...]) -> None:
    assert str(bounds) == said
    assert [bounds.holds(value) for value in held + refused] == [True] * len(held) + [False] * len(refused)


def test_nested_values_are_compared_by_dotted_names() -> None:
    before = {"steps": 3, "data": {"augment": {"flip": True, "crop": "none"}, "lanes": 8}, "gone": 1}
    now = {"steps": 3, "data": {"augment": {"flip": False, "crop": "none"}, "lanes": 4}, "new": {"a": "x"}}
    found = differences(before, now)
    assert as_lines(found) == (
        "  data.augment.flip: before true, now false\n"
        "  data.lanes: before 8, now 4\n"
        "  gone: before 1, now none\n"
        "  new.a: before none, now x"
    )
    assert differences(now, now) == []


def test_what_json_makes_of_a_tuple_is_equal_to_it() -> None:
    assert differences({"units": (3, 4), "mix": (("a", 1.0),)}, {"units": [3, 4], "mix": [["a", 1.0]]}) == []
    assert flattened({"units": (3, 4)}) == {"units": [3, 4]}


def test_a_value_that_is_a_group_on_one_side_only() -> None:
    assert differences({"a": 1}, {"a": {"b": 2}}) == [
        Difference(field="a", before=1, now=None),
        Difference(field="a.b", before=None, now=2),
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        pytest.param(None, "none", id="nothing"),
        pytest.param(True, "true", id="as YAML has it"),
        pytest.param(0.0003, "0.0003", id="a number"),
        pytest.param("softmax", "softmax", id="a word needs no quotes"),
        pytest.param("s3://bucket/a-b", "s3://bucket/a-b", id="nor does a URL"),
        pytest.param("", "''", id="an empty string would not be seen"),
        pytest.param("my data", "'my data'", id="a text with a space"),
        pytest.param("a\nb", "'a\\nb'", id="stays one line"),
        pytest.param([1, "x", (2.5,)], "[1, x, [2.5]]", id="a list"),
        pytest.param("ab" * 32, "abababababab...", id="a sha256"),
    ],
)
def test_values_as_people_write_them(value: object, words: str) -> None:
    assert shown(value) == words

"""Two settings are compared field by field, however deep, and a difference is one line."""

import pytest

from shards.schema.differences import Difference, as_lines, differences, flattened, shown


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
        pytest.param("", "''", id="an empty text would not be seen"),
        pytest.param("my data", "'my data'", id="a text with a space"),
        pytest.param("a\nb", "'a\\nb'", id="stays one line"),
        pytest.param([1, "x", (2.5,)], "[1, x, [2.5]]", id="a list"),
        pytest.param("ab" * 32, "abababababab...", id="a sha256"),
    ],
)
def test_values_as_people_write_them(value: object, words: str) -> None:
    assert shown(value) == words

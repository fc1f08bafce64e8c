"""Pages and their plots: names are only text, axes have few round ticks, and a matrix has room for its names."""

import re
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markupsafe import Markup

from shards.pages.page import log_ticks, matrix, paragraphs, shown, text_width, ticks, whole_flags


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


def test_flags_stay_whole_outside_tags_and_pictures() -> None:
    flag = '<span class="flag">--data.url</span>'
    assert whole_flags('<i title="--a">x --data.url=y --</i>') == f'<i title="--a">x {flag}=y --</i>'
    assert whole_flags("<svg><text>--data.url</text></svg>\n--data.url.") == (
        f"<svg><text>--data.url</text></svg>\n{flag}."
    )


def test_a_long_name_takes_no_longer_than_its_length() -> None:
    assert shown("x" * 2_000_000, 4) == "xx…xx"


def confusion(
    shares: Sequence[Sequence[float]],
    labels: Sequence[str],
    classes: Sequence[str],
    *,
    is_right: Sequence[Sequence[bool]],
) -> Markup:
    return matrix(
        shares,
        labels,
        classes,
        style=lambda row, column: "part-1" if is_right[row][column] else "cell",
        about=f"{len(labels)} labels and {len(classes)} classes",
    )


def heat_map(shares: Sequence[Sequence[float]], names: Sequence[str]) -> Markup:
    return matrix(shares, names, names, style=lambda row, column: "none" if row == column else "cell", about="together")


def texts(markup: Markup) -> list[str]:
    return [item.text or "" for item in ElementTree.fromstring(str(markup)).iter("text")]  # noqa: S314


@example(low=5e-324, span=6.0)
@given(low=st.floats(-1e9, 1e9), span=st.floats(1e-6, 1e9))
def test_an_axis_has_two_to_five_round_numbers(low: float, span: float) -> None:
    high = low + max(span, abs(low) * 1e-9)
    found, rounding = ticks(low, high), 1e-6 * (high - low)  # a product of floats may lie beside the end
    assert 2 <= len(found) <= 5
    assert all(low - rounding <= tick <= high + rounding for tick in found)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (8_800, [2_000, 4_000, 6_000, 8_000]),
        (4_075, [1_000, 2_000, 3_000, 4_000]),
        (300_000, [100_000, 200_000, 300_000]),
        (3, [1, 2, 3]),
    ],
)
def test_steps_of_an_axis(last: int, expected: list[float]) -> None:
    assert ticks(1, last, is_whole=True) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (144, 1438, [200, 500, 1000]),
        (1, 1000, [1, 10, 100, 1000]),
        (3, 4, [3, 4]),
        (7, 7, [7]),
        (1e-8, 2e-7, [1e-8, 2e-8, 5e-8, 1e-7, 2e-7]),
    ],
)
def test_ticks_are_round_and_few(low: float, high: float, expected: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(expected)


def test_an_axis_of_many_powers_has_some_of_them() -> None:
    assert 3 <= len(log_ticks(1e-9, 1e20)) <= 7


def test_a_cell_for_each_pair() -> None:
    right = [[True, False, False], [False, True, True]]
    plot = str(confusion([[0.9, 0.1, 0.0], [0.0, 0.5, 0.5]], ["a<b", "c"], ["a<b", "c", "d"], is_right=right))
    assert re.findall(r'<rect class="([^"]+)"', plot) == ["part-1", "cell", "cell", "cell", "part-1", "part-1"]
    found = re.findall(r">([^<]+)</text>", plot)
    assert found == ["a&lt;b", "c", "d", "a&lt;b", "90", "10", "c", "50", "50"]
    assert "2 labels and 3 classes" in plot


def test_long_names_have_room() -> None:
    short, long = (
        re.search(r'viewBox="0 0 ([0-9]+) ([0-9]+)"', str(confusion([[1.0]], [name], [name], is_right=[[True]])))
        for name in ("a", "great white sharks")
    )
    assert short is not None
    assert long is not None
    assert int(long[1]) > int(short[1]) + 100
    assert int(long[2]) > int(short[2]) + 50
    assert text_width("great white sharks") < text_width("WWWWWWWWWWWWWWWWWW") == text_width("鮫" * 18)


def test_many_classes_have_small_cells_without_numbers() -> None:
    names = [str(number) for number in range(25)]
    shares = [[float(row == column) for column in range(25)] for row in range(25)]
    plot = str(confusion(shares, names, names, is_right=[[False] * 25] * 25))
    assert plot.count("<rect") == 625
    assert ">100<" not in plot


def test_heat_map_escapes_names_and_leaves_the_diagonal_empty() -> None:
    shares = [[1.0, 0.5], [0.25, 1.0]]
    markup = heat_map(shares, ["<script>", "&"])
    assert "<script>" not in markup
    assert [text for text in texts(markup) if text.isdecimal()] == ["50", "25"]


def test_small_shares_are_not_shown_as_nothing() -> None:
    shares = [[1.0, 0.001, 0.0], [0.999, 1.0, 0.012], [0.0, 1.0, 1.0]]
    shown = texts(heat_map(shares, list("abc")))
    assert [text for text in shown if text not in "abc"] == ["<1", ">99", "1", "100"]

"""Every plot is well-formed, describes itself in words, and handles extreme numbers."""

import math
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest
from markupsafe import Markup

from shards.card import plots
from shards.pages.page import Axis

COUNTS = {
    "long tail": np.sort(10_000 / np.arange(1, 21_001)).astype(np.int64),
    "even": np.full(1000, 1300),
    "narrow": np.arange(732, 1301),
    "one class": np.array([7]),
    "with empty classes": np.array([0, 0, 500, 3, 0]),
    "very large": np.array([1, 10**9]),
}


def parsed(markup: Markup) -> ElementTree.Element:
    root = ElementTree.fromstring(str(markup))  # noqa: S314
    assert root.get("role") == "img"
    assert root.get("aria-label")
    assert "nan" not in markup
    assert "inf" not in markup
    return root


def texts(markup: Markup) -> list[str]:
    return [item.text or "" for item in parsed(markup).iter("text")]


@pytest.mark.parametrize("plot", [plots.rank_curve, plots.coverage])
@pytest.mark.parametrize("name", COUNTS)
def test_curves_over_classes(plot: Callable[[object], Markup], name: str) -> None:
    markup = plot(COUNTS[name])
    parsed(markup)
    assert len(markup) < 20_000  # whatever the number of classes


def test_a_long_tail_is_on_a_log_axis() -> None:
    assert "samples per class (log scale)" in texts(plots.rank_curve(COUNTS["long tail"]))
    assert "samples per class" in texts(plots.rank_curve(COUNTS["narrow"]))


def test_where_half_of_the_labels_are() -> None:
    assert "half in 2" in texts(plots.coverage(np.array([30, 30, 20, 20])))


@pytest.mark.parametrize("counts", [[1], [0, 0, 5], [1, 10**9]])
def test_histogram(counts: list[int]) -> None:
    markup = plots.histogram(
        np.array(counts), Axis(name="x", low=0.0, high=3.0, ticks=[(1.0, "one")]), about="all", marks=[(2.0, "<here>")]
    )
    assert {"one", "x", "<here>"} <= set(texts(markup))


@pytest.mark.parametrize("places", [[(72, 72)], [(0, 0), (159, 159)], [(64, 80), (65, 80), (90, 60)]])
def test_density(places: list[tuple[int, int]]) -> None:
    sides = np.zeros((160, 160), np.int64)
    for row, column in places:
        sides[row, column] += 3
    parsed(plots.density(sides, about="sizes"))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 34, ["1 B", "10 B", "1 kB"]), (9, 11, ["800 B", "1 kB", "1.2 kB"]), (13, 20, ["10 kB", "200 kB"])],
)
def test_byte_ticks(low: float, high: float, expected: list[str]) -> None:
    ticks = plots.byte_ticks(low, high)
    assert set(expected) <= {label for _, label in ticks}
    assert all(low <= at <= high for at, _ in ticks)
    assert len(ticks) <= 16


def test_aspect_ticks_are_symmetric() -> None:
    ticks = plots.aspect_ticks(-1.2, 1.2)
    assert [label for _, label in ticks] == ["1:2", "2:3", "1:1", "3:2", "2:1"]
    assert math.isclose(sum(at for at, _ in ticks), 0, abs_tol=1e-9)

"""The pictures of a report, curves and confusion matrices: named, escaped, described, and of any values."""

import re
from array import array

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobs.reports.pages import kind_of
from jobs.reports.plots import confusion_plot, curve_plot, share_text, text_width, ticks, time_bar
from pipeline.runs.curves import Curve


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [1e-9, 1e9], [-5.0, 0.0, 3.0], [0.0, 0.0], [1e299, -1e299]])
def test_any_values_have_a_picture(values: list[float]) -> None:
    steps = array("q", range(1, len(values) + 1))
    curve = Curve(name="time/<b>", steps=steps, values=array("d", values), num_not_finite=0)
    plot = curve_plot(curve, marks=(1, 2))
    assert "time/&lt;b&gt; over steps" in plot
    assert "<b>" not in plot
    assert "nan" not in plot


def test_a_schedule_keeps_its_shape() -> None:
    curve = Curve(name="rate", steps=array("q", [1, 2, 3]), values=array("d", [1e-6, 1.0, 0.5]), num_not_finite=0)
    assert "log scale" in curve_plot(curve)
    assert "log scale" not in curve_plot(curve, may_be_log=False)


def test_the_bar_is_described() -> None:
    assert 'aria-label="Where the time went: a 25.0%, b 75.0%."' in time_bar({"x": 1, "y": 3}, {"x": "a", "y": "b"})


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
    ("name", "title"),
    [
        ("test_accuracy", "Accuracy on the held-out dataset"),
        ("eval/digits-test/accuracy", "Accuracy on digits-test"),
        ("eval/digits-test/ema_accuracy", "Accuracy on digits-test of the averaged weights"),
        ("fewshot/5_shots", "5-shot accuracy"),
    ],
)
def test_scores_are_shown_in_percent_beside_the_loss(name: str, title: str) -> None:
    kind = kind_of(name)
    assert (kind.title, kind.text, kind.is_cost) == (title, share_text, False)


def test_a_cell_for_each_pair() -> None:
    right = [[True, False, False], [False, True, True]]
    plot = str(confusion_plot([[0.9, 0.1, 0.0], [0.0, 0.5, 0.5]], ["a<b", "c"], ["a<b", "c", "d"], is_right=right))
    assert re.findall(r'<rect class="([^"]+)"', plot) == ["part-1", "cell", "cell", "cell", "part-1", "part-1"]
    texts = re.findall(r">([^<]+)</text>", plot)
    assert texts == ["a&lt;b", "c", "d", "a&lt;b", "90", "10", "c", "50", "50"]
    assert "2 labels and 3 classes" in plot


def test_long_names_have_room() -> None:
    short, long = (
        re.search(r'viewBox="0 0 ([0-9]+) ([0-9]+)"', str(confusion_plot([[1.0]], [name], [name], is_right=[[True]])))
        for name in ("a", "great white sharks")
    )
    assert short is not None
    assert long is not None
    assert int(long[1]) > int(short[1]) + 100
    assert int(long[2]) > int(short[2]) + 50
    assert text_width("great white sharks") < text_width("WWWWWWWWWWWWWWWWWW") == text_width("鮫" * 18)


def test_many_classes_have_small_cells_without_numbers() -> None:
    names = [str(number) for number in range(20)]
    shares = [[float(row == column) for column in range(20)] for row in range(20)]
    plot = str(confusion_plot(shares, names, names, is_right=[[False] * 20] * 20))
    assert plot.count("<rect") == 400
    assert ">100<" not in plot

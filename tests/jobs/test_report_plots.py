"""The pictures of a report: escaped, described, and of any values."""

from array import array

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobs.report_plots import curve_plot, ticks, time_bar
from pipeline.training.curves import Curve


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

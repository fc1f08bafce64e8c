"""The pictures of a report, curves and times: named, escaped, described, and of any values."""

from array import array
from dataclasses import replace

import pytest

from jobs.reports.report import Kind, curve_plot, kind_of, time_bar
from pipeline.runs.curves import Curve
from shards.output.quantities import percent

KIND = Kind(title="A curve", unit="<i>")


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [1e-9, 1e9], [-5.0, 0.0, 3.0], [0.0, 0.0], [1e299, -1e299]])
def test_any_values_have_a_picture(values: list[float]) -> None:
    steps = array("q", range(1, len(values) + 1))
    curve = Curve(name="time/<b>", steps=steps, values=array("d", values), num_not_finite=0)
    plot = curve_plot(curve, KIND, marks=(1, 2))
    assert "time/&lt;b&gt; over steps" in plot
    assert "<b>" not in plot
    assert "&lt;i&gt;" in plot
    assert "<i>" not in plot
    assert "nan" not in plot


def test_a_schedule_keeps_its_shape() -> None:
    curve = Curve(name="rate", steps=array("q", [1, 2, 3]), values=array("d", [1e-6, 1.0, 0.5]), num_not_finite=0)
    assert "log scale" in curve_plot(curve, KIND)
    assert "log scale" not in curve_plot(curve, replace(KIND, may_be_log=False))


def test_the_bar_is_described() -> None:
    assert 'aria-label="Where the time went: a 25.0 %, b 75.0 %."' in time_bar({"x": 1, "y": 3}, {"x": "a", "y": "b"})


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
    assert (kind.title, kind.text, kind.is_cost) == (title, percent, False)

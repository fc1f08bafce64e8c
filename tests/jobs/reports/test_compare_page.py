"""Marks on a log axis: joined by line, described, and never markup of a name."""

import pytest

from jobs.reports.compare import NUM_COLOURS, PlotPoint, scatter


def mark(x: float, y: float, *, line: str = "vit", name: str = "a", deviation: float = 0.0) -> PlotPoint:
    return PlotPoint(x=x, y=y, line=line, name=name, row="row-0", deviation=deviation)


def test_marks_of_a_line_are_joined_in_order_of_x() -> None:
    drawn = scatter(
        [mark(100, 50), mark(1, 20), mark(10, 30), mark(10, 70, line="bit")],
        x_name="images",
        y_name="Accuracy (%)",
        lines=["vit", "bit"],
    )
    assert drawn.count("<polyline") == 1
    points = drawn.partition('points="')[2].partition('"')[0].split()
    places = [float(one.partition(",")[0]) for one in points]
    assert places == sorted(places)
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2), "equal ratios are equally far apart"
    assert drawn.count("<circle") == 4
    assert 'class="part-1"' in drawn


def test_marks_at_one_place_are_not_joined() -> None:
    assert "<polyline" not in scatter([mark(5, 20), mark(5, 30)], x_name="x", y_name="y", lines=["vit"])


def test_a_line_goes_through_the_mean_of_marks_at_one_place() -> None:
    drawn = scatter([mark(1, 0), mark(5, 20), mark(5, 40), mark(25, 60)], x_name="x", y_name="y", lines=["vit"])
    points = [tuple(map(float, one.split(","))) for one in drawn.partition('points="')[2].partition('"')[0].split()]
    assert len(points) == 3
    assert points[1][1] == pytest.approx((points[0][1] + points[2][1]) / 2, abs=0.2)


def test_lines_beyond_the_colours_are_rings_and_dashes() -> None:
    lines = [str(number) for number in range(NUM_COLOURS + 1)]
    drawn = scatter([mark(1, 5, line=lines[-1]), mark(9, 6, line=lines[-1])], x_name="x", y_name="y", lines=lines)
    assert drawn.count('class="ring line-0"') == 2
    assert drawn.count('class="joined dashed line-0"') == 1


def test_deviations_are_bars_around_the_mean() -> None:
    drawn = scatter([mark(1, 50, deviation=10), mark(9, 50)], x_name="x", y_name="y", lines=["vit"])
    top, bottom = drawn.partition("V")[0].rpartition(" ")[2], drawn.partition("V")[2].partition('"')[0]
    middle = drawn.partition('cy="')[2].partition('"')[0]
    assert float(top) - float(middle) == pytest.approx(float(middle) - float(bottom), abs=0.2)


def test_names_are_only_text() -> None:
    drawn = scatter(
        [mark(1, 50, name="<script>alert(1)</script>", line='"><b>')], x_name="x", y_name="y", lines=['"><b>']
    )
    assert "<script" not in drawn
    assert "<b>" not in drawn

"""The plots of `patchline compare` as inline SVG: accuracy over compute or data, a line for each model. Pure.

Colours are the page's, by CSS class: part-0, part-1 and so on in the order of the models. Those after the last colour
take the colours again, as rings and dashes.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from jobs.reports.plots import HEIGHT, WIDTH, axis, number, svg, ticks

NUM_COLOURS = 8
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 26, 40
_RADIUS = 5
_ALIKE = 1.01  # points this close on the x axis are not joined, for the line would go straight up: it takes their mean
_MOST_TICKS = 7


@dataclass(frozen=True, kw_only=True)
class PlotPoint:
    """A point of a plot: `x` above 0; `y` and its `deviation` in percent; `row`: the id of its row in the table."""

    x: float
    y: float
    line: str
    name: str
    row: str
    deviation: float = 0.0


def plot(marks: Sequence[PlotPoint], *, x_name: str, y_name: str, lines: Sequence[str]) -> Markup:
    """The marks, those of one line joined. `lines`: all of the page, whose place gives the colour."""
    x_low, x_high = min(one.x for one in marks), max(one.x for one in marks)
    y_low = min(one.y - one.deviation for one in marks)
    y_high = max(one.y + one.deviation for one in marks)
    margin = (y_high - y_low) * 0.08 or 1.0
    wide = math.log10(x_high / x_low) * 0.06 or 0.5
    x = axis(math.log10(x_low) - wide, math.log10(x_high) + wide, _LEFT, WIDTH - _RIGHT)
    y = axis(y_low - margin, y_high + margin, HEIGHT - _BOTTOM, _TOP)
    base = HEIGHT - _BOTTOM
    body = [
        f'<path class="grid" d="M{_LEFT} {y(at):.1f}H{WIDTH - _RIGHT}"/>'
        f'<text x="{_LEFT - 8}" y="{y(at) + 4:.1f}" text-anchor="end">{escape(number(at))}</text>'
        for at in ticks(y_low, y_high)
    ]
    body.append(f'<path class="axis" d="M{_LEFT} {base}H{WIDTH - _RIGHT}"/>')
    for at in log_ticks(x_low, x_high):
        place = x(math.log10(at))
        body.append(f'<text x="{place:.1f}" y="{base + 18}" text-anchor="middle">{escape(number(at))}</text>')
    body.append(f'<text x="4" y="13">{escape(y_name)}</text>')
    body.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_name)} (log scale)</text>')
    for line in dict.fromkeys(one.line for one in marks):
        body += _line([one for one in marks if one.line == line], lines.index(line), x=x, y=y)
    about = f"{y_name} over {x_name}: " + "; ".join(f"{one.name} {one.y:.1f} at {number(one.x)}" for one in marks)
    return svg(about, WIDTH, HEIGHT, body)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`: powers of ten with 2 and 5 times them, or, of many, some of the powers; the
    two ends if fewer than two are round."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1,)):
        found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        found = [at for at in found if low <= at <= high]
        if len(found) <= _MOST_TICKS:
            break
    else:
        found = found[:: -(-len(found) // _MOST_TICKS)]
    return found if len(found) > 1 else list(dict.fromkeys((low, high)))


def dot_class(place: int) -> str:
    """The CSS class of a line's marks, by the line's place among all."""
    colour = place % NUM_COLOURS
    return f"part-{colour}" if place < NUM_COLOURS else f"ring line-{colour}"


def _line(
    marks: Sequence[PlotPoint], place: int, *, x: Callable[[float], float], y: Callable[[float], float]
) -> list[str]:
    body, at, colour = [], [(x(math.log10(one_x)), y(one_y)) for one_x, one_y in _joined(marks)], place % NUM_COLOURS
    dashed = "" if place < NUM_COLOURS else " dashed"
    if len(at) > 1:
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in at)
        body.append(f'<polyline class="joined{dashed} line-{colour}" points="{path}"/>')
    for one in sorted(marks, key=lambda one: one.x):
        across = x(math.log10(one.x))
        if one.deviation:
            span = f"M{across:.1f} {y(one.y - one.deviation):.1f}V{y(one.y + one.deviation):.1f}"
            body.append(f'<path class="joined line-{colour}" d="{span}"/>')
        told = f"{one.name} ({one.line}): {one.y:.2f} at {number(one.x)}"
        circle = f'<circle class="{dot_class(place)}" cx="{across:.1f}" cy="{y(one.y):.1f}" r="{_RADIUS}"/>'
        body.append(f'<a href="#{escape(one.row)}"><title>{escape(told)}</title>{circle}</a>')
    return body


def _joined(marks: Sequence[PlotPoint]) -> list[tuple[float, float]]:
    """The points of the line of these marks: through each, and through the mean of those that are alike in x."""
    groups: list[list[PlotPoint]] = []
    for one in sorted(marks, key=lambda one: one.x):
        if groups and one.x <= _ALIKE * groups[-1][0].x:
            groups[-1].append(one)
        else:
            groups.append([one])
    return [(statistics.fmean(one.x for one in found), statistics.fmean(one.y for one in found)) for found in groups]

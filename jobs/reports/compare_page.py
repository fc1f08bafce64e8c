"""The comparison of runs as one HTML page: accuracy over compute or data, a line for each model, and a table that its
script sorts."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup, escape

from jobs.reports.compare_losses import NUM_COLOURS, loss_plots
from jobs.reports.points import Point
from shards.output.quantities import number
from shards.pages.page import page
from shards.pages.plots import Axis, Frame, labelled, log_ticks, ticks

_COLUMNS = (
    *(
        ("run", "text"),
        ("what differs", "text"),
        ("scored on", "text"),
        ("accuracy", "number"),
        ("best", "number"),
        ("few-shot", "number"),
    ),
    ("also scored", "text"),
    *(("exaFLOPs", "number"), ("images", "number"), ("model", "text"), ("parameters", "number"), ("px", "number")),
)
_MOST_SHOTS = 4  # plots of few-shot accuracy
_MOST_DIFFERING = 24  # settings
_ALIKE = 1.01  # points this close on the x axis are not joined, for the line would go straight up: it takes their mean


def render(points: Sequence[Point], notes: Sequence[str]) -> bytes:
    """The page, UTF-8. Equal points give equal bytes."""
    lines = list(dict.fromkeys(one.line for one in points))
    values = {
        "points": points,
        "notes": notes,
        "lines": lines,
        "columns": _COLUMNS,
        "dots": [dot_class(place) for place in range(len(lines))],
        "plots": _plots(points, lines),
        "losses": loss_plots(points),
        "most_differing": _MOST_DIFFERING,
    }
    return page("jobs.reports", "compare.html.j2", values, script="compare.js")


@dataclass(frozen=True, kw_only=True)
class _Plot:
    """What a plot shows: `y_of` gives a score and its deviation. Only points scored on one dataset share a plot."""

    title: str
    x_name: str
    x_of: Callable[[Point], float | None]
    y_name: str
    y_of: Callable[[Point], tuple[float | None, float | None]]


def _plots(points: Sequence[Point], lines: Sequence[str]) -> list[tuple[str, Markup]]:
    """Each with its title; those without a point are left out."""
    made = []
    for wanted in _wanted(points):
        marks = [
            PlotPoint(
                x=float(x), y=100 * y, line=one.line, name=one.name, row=f"row-{place}", deviation=100 * (spread or 0)
            )
            for place, one in enumerate(points)
            for x, (y, spread) in [(wanted.x_of(one), wanted.y_of(one))]
            if x and y is not None
        ]
        if marks:
            y_name = f"{wanted.y_name} (%)"
            made.append((wanted.title, scatter(marks, x_name=wanted.x_name, y_name=y_name, lines=lines)))
    return made


def _wanted(points: Sequence[Point]) -> Iterator[_Plot]:
    """The plots: for each dataset, accuracy over compute and over data; then few-shot accuracy over data."""
    axes: dict[str, tuple[str, Callable[[Point], float | None]]] = {
        "compute": ("exaFLOPs", lambda one: one.exaflops),
        "data": ("images of pre-training", lambda one: one.num_images),
    }
    also = [more for one in points for more in one.also]
    for dataset in dict.fromkeys([*(one.dataset for one in points), *(one.dataset for one in also if not one.shots)]):
        for axis, (x_name, x_of) in axes.items():
            title = _title("Accuracy", dataset, axis)
            y_of = partial(_accuracy_on, dataset)
            yield _Plot(title=title, x_name=x_name, x_of=x_of, y_name="Accuracy", y_of=y_of)
    x_name, x_of = axes["data"]
    measured = [(shots, one.fewshot_dataset) for one in points for shots in one.fewshot]
    measured += [(one.shots, one.dataset) for one in also if one.shots]
    for shots in sorted({shots for shots, _ in measured})[:_MOST_SHOTS]:
        for dataset in dict.fromkeys(dataset for few, dataset in measured if few == shots):
            name = f"{shots}-shot accuracy"
            y_of = partial(_few_shot_on, dataset, shots)
            yield _Plot(title=_title(name, dataset, "data"), x_name=x_name, x_of=x_of, y_name=name, y_of=y_of)


def _title(name: str, dataset: str, axis: str) -> str:
    return f"{name} on {dataset} over {axis}" if dataset else f"{name} over {axis}"


def _accuracy_on(dataset: str, one: Point) -> tuple[float | None, float | None]:
    return one.drawn if one.dataset == dataset else _also_on(dataset, 0, one)


def _few_shot_on(dataset: str, shots: int, one: Point) -> tuple[float | None, float | None]:
    """Measured in RUN/fewshot, of the best weights say, else in the run itself."""
    found = _also_on(dataset, shots, one)
    is_on = found[0] is None and one.fewshot_dataset == dataset
    return (one.fewshot.get(shots), one.fewshot_deviation.get(shots)) if is_on else found


def _also_on(dataset: str, shots: int, one: Point) -> tuple[float | None, float | None]:
    found = [(more.score, more.deviation) for more in one.also if (more.dataset, more.shots) == (dataset, shots)]
    return found[0] if found else (None, None)


@dataclass(frozen=True, kw_only=True)
class PlotPoint:
    """A point of a plot: `x` above 0; `y` and its `deviation` in percent; `row`: the id of its row in the table."""

    x: float
    y: float
    line: str
    name: str
    row: str
    deviation: float = 0.0


def scatter(marks: Sequence[PlotPoint], *, x_name: str, y_name: str, lines: Sequence[str]) -> Markup:
    """The marks, those of one line joined. `lines`: all of the page, whose place gives the colour."""
    x_low, x_high = min(one.x for one in marks), max(one.x for one in marks)
    y_low = min(one.y - one.deviation for one in marks)
    y_high = max(one.y + one.deviation for one in marks)
    x_ticks, y_ticks = labelled(log_ticks(x_low, x_high)), labelled(ticks(y_low, y_high))
    frame = Frame(
        x=Axis(name=x_name, low=x_low, high=x_high, ticks=x_ticks, is_log=True, margin=0.06),
        y=Axis(name=y_name, low=y_low, high=y_high, ticks=y_ticks, margin=0.08),
    )
    drawn: list[str] = []
    for line in dict.fromkeys(one.line for one in marks):
        drawn += _line([one for one in marks if one.line == line], lines.index(line), frame)
    about = f"{y_name} over {x_name}: " + "; ".join(f"{one.name} {one.y:.1f} at {number(one.x)}" for one in marks)
    return frame.svg(about, drawn)


def dot_class(place: int) -> str:
    """The CSS class of a line's marks, by the line's place among all."""
    colour = place % NUM_COLOURS
    return f"part-{colour}" if place < NUM_COLOURS else f"ring line-{colour}"


def _line(marks: Sequence[PlotPoint], place: int, frame: Frame) -> list[str]:
    colour, points = place % NUM_COLOURS, _joined(marks)
    dashed = "" if place < NUM_COLOURS else " dashed"
    body = [frame.line(points, f"joined{dashed} line-{colour}")] if len(points) > 1 else []
    for one in sorted(marks, key=lambda one: one.x):
        if one.deviation:
            ends = frame.down(one.y - one.deviation), frame.down(one.y + one.deviation)
            span = f"M{frame.across(one.x):.1f} {ends[0]:.1f}V{ends[1]:.1f}"
            body.append(f'<path class="joined line-{colour}" d="{span}"/>')
        told = f"{one.name} ({one.line}): {one.y:.2f} at {number(one.x)}"
        dot = frame.dot(one.x, one.y, dot_class(place), radius=5)
        body.append(f'<a href="#{escape(one.row)}"><title>{escape(told)}</title>{dot}</a>')
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

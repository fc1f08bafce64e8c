"""The comparison of runs as one HTML page: nothing is loaded from elsewhere, and names are only ever text. Its one
script sorts the table, and is allowed by its hash alone."""

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources

import jinja2
from markupsafe import Markup

from jobs.reports.compare_facts import Point
from jobs.reports.compare_plots import NUM_COLOURS, PlotPoint, dot_class, plot
from jobs.reports.plots import number
from shards.card.card_page import page_style
from shards.card.card_words import shown

TEMPLATE, SCRIPT = "compare.html.j2", "compare.js"
_COLUMNS = (
    *(("run", "text"), ("scored on", "text"), ("accuracy", "number"), ("best", "number"), ("few-shot", "number")),
    ("also scored", "text"),
    *(("exaFLOPs", "number"), ("images", "number"), ("model", "text"), ("parameters", "number"), ("px", "number")),
)
_MOST_SHOTS = 4  # plots of few-shot accuracy


def render(points: Sequence[Point], notes: Sequence[str]) -> bytes:
    """The page, UTF-8. Equal points give equal bytes."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"shown": shown, "number": number}
    template = environment.from_string(_text(TEMPLATE))
    script, lines = _text(SCRIPT), list(dict.fromkeys(one.line for one in points))
    page = template.render(
        points=points,
        notes=notes,
        lines=lines,
        columns=_COLUMNS,
        num_colours=NUM_COLOURS,
        dots=[dot_class(place) for place in range(len(lines))],
        plots=_plots(points, lines),
        style=page_style(),
        script=Markup(script),  # noqa: S704 - ours
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return page.encode("utf-8", "backslashreplace")


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
            made.append((wanted.title, plot(marks, x_name=wanted.x_name, y_name=y_name, lines=lines)))
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


def _text(name: str) -> str:
    return resources.files("jobs.reports").joinpath(name).read_text("utf-8")

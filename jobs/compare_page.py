"""The comparison of runs as one HTML page: nothing is loaded from elsewhere, and names are only ever text. Its one
script sorts the table, and is allowed by its hash alone."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from importlib import resources

import jinja2
from markupsafe import Markup

from jobs.compare_facts import Point
from jobs.compare_plots import NUM_COLOURS, Mark, plot
from jobs.report_plots import number
from shards.card.card_page import page_style
from shards.card.card_words import shown

TEMPLATE, SCRIPT = "compare.html.j2", "compare.js"
_COLUMNS = (
    *(("run", "text"), ("accuracy", "number"), ("best", "number"), ("few-shot", "number"), ("exaFLOPs", "number")),
    *(("images", "number"), ("model", "text"), ("parameters", "number"), ("px", "number")),
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
        plots=_plots(points, lines),
        style=page_style(),
        script=Markup(script),  # noqa: S704 - ours
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return page.encode("utf-8", "backslashreplace")


def _plots(points: Sequence[Point], lines: Sequence[str]) -> list[tuple[str, Markup]]:
    """Each with its title; those without a point are left out."""
    shots = sorted({number for one in points for number in one.fewshot})[:_MOST_SHOTS]
    wanted: list[tuple[str, str, Callable[[Point], float | None], Callable[[Point], float | None]]] = [
        ("Accuracy over compute", "exaFLOPs", lambda one: one.exaflops, lambda one: one.accuracy),
        ("Accuracy over data", "images of pre-training", lambda one: one.num_images, lambda one: one.accuracy),
    ]
    for few in shots:
        name = f"{few}-shot accuracy"
        wanted.append(
            (f"{name} over data", "images of pre-training", lambda one: one.num_images, _few_shot_of(few)),
        )
    made = []
    for title, x_name, x_of, y_of in wanted:
        marks = [
            Mark(
                x=float(x),
                y=100 * y,
                line=one.line,
                name=one.name,
                row=f"row-{place}",
                deviation=100 * (one.deviation or 0.0) if y == one.accuracy else 0.0,
            )
            for place, one in enumerate(points)
            if (x := x_of(one)) and (y := y_of(one)) is not None
        ]
        if marks:
            made.append((title, plot(marks, x_name=x_name, y_name=f"{title.partition(' over')[0]} (%)", lines=lines)))
    return made


def _few_shot_of(shots: int) -> Callable[[Point], float | None]:
    return lambda one: one.fewshot.get(shots)


def _text(name: str) -> str:
    return resources.files("jobs").joinpath(name).read_text("utf-8")

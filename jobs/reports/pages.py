"""The report of a run as one HTML page: no script, no request, and names are only ever text.

It has the style of a dataset's card. The table of curves says each one's title, its unit, how its values are written,
and with which others it is drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

import jinja2
from markupsafe import Markup

from jobs.reports.facts import ReportFacts
from jobs.reports.plots import bytes_text, curve_plot, number, seconds_text, share_text, time_bar
from jobs.reports.scores import ScoreSheet
from jobs.reports.worth import COLUMNS, CORE_DAYS, TABLE_2, Worth
from pipeline.runs.curves import Curve
from pipeline.runs.time import WORDS
from shards.card.card_page import page_style
from shards.card.card_words import shown
from shards.files.json_lines import is_finite
from shards.output.quantities import duration


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`unit`: beside the axis. `text`: a value in words. `is_cost`: it says what a step costs, not how the model
    does. `may_be_log`: on a log scale if it spans much; a schedule is known by its shape on a linear one."""

    title: str
    unit: str
    text: Callable[[float], str] = number
    is_cost: bool = False
    may_be_log: bool = True


@dataclass(frozen=True, kw_only=True)
class ShownCurve:
    """A curve on the page: its picture, and the words below it."""

    title: str
    plot: Markup
    words: str
    samples: tuple[tuple[int, str], ...]


_KINDS = {
    "loss": Kind(title="Training loss", unit="loss"),
    "test_accuracy": Kind(title="Accuracy on the held-out dataset", unit="accuracy", text=share_text),
    "test_loss": Kind(title="Loss on the held-out dataset", unit="loss"),
    "learning_rate": Kind(title="Learning rate", unit="learning rate", may_be_log=False),
    "grad_norm": Kind(title="Gradient norm", unit="norm"),
    "images_per_second": Kind(title="Throughput", unit="images/s"),
    "data_wait_share": Kind(title="Waiting for data", unit="share of the step", text=share_text, is_cost=True),
    "perf/mfu": Kind(title="Model FLOP utilisation", unit="share of the data sheet's peak", text=share_text),
    "perf/mfu_of_measured_peak": Kind(
        title="Model FLOP utilisation, measured", unit="share of the measured peak", text=share_text
    ),
}
_STEP_TITLES = {
    "time/data_wait": "Step: waiting for data",
    "time/to_device": "Step: copy to the device",
    "time/forward_backward": "Step: forward and backward",
    "time/optimizer": "Step: optimiser",
    "time/checkpoint": "Step: checkpoint stall",
    "time/evaluation": "Step: evaluation",
    "time/other": "Step: other",
    "time/step": "Step: all of it",
    "memory/resident_bytes": "Resident memory",
    "memory/allocated_peak_bytes": "Memory of tensors, at most",
    "memory/reserved_peak_bytes": "Memory held by the allocator, at most",
}


def kind_of(name: str) -> Kind:
    """How a curve of this name is shown."""
    if name in _KINDS:
        return _KINDS[name]
    group, _, rest = name.partition("/")
    if group == "eval":
        dataset, _, score = rest.rpartition("/")
        averaged = " of the averaged weights" if score.startswith("ema_") else ""
        return Kind(title=f"Accuracy on {dataset}{averaged}", unit="accuracy", text=share_text)
    if group == "fewshot":
        return Kind(title=f"{rest.removesuffix('_shots')}-shot accuracy", unit="accuracy", text=share_text)
    title = _STEP_TITLES.get(name, name)
    if name.startswith("time/"):
        return Kind(title=title, unit="time per step", text=seconds_text, is_cost=True)
    if name.startswith("memory/") and name.endswith("bytes"):
        return Kind(title=title, unit="bytes", text=bytes_text, is_cost=True)
    return Kind(title=title, unit=name, is_cost=True)


def shown_curves(curves: Sequence[Curve], *, marks: Sequence[int], is_cost: bool) -> list[ShownCurve]:
    """The curves of one section, in order. What took no time at all is left out."""
    found = [(one, kind_of(one.name)) for one in curves]
    return [
        _shown(one, kind, marks=marks)
        for one, kind in found
        if kind.is_cost == is_cost and not (is_cost and not any(one.values))
    ]


def _shown(curve: Curve, kind: Kind, *, marks: Sequence[int]) -> ShownCurve:
    (least_at, least), (most_at, most) = curve.extreme(most=False), curve.extreme(most=True)
    words = f"Least {kind.text(least)} at step {least_at:,}, most {kind.text(most)} at step {most_at:,}"
    not_finite = f"; {curve.num_not_finite:,} not finite" if curve.num_not_finite else ""
    return ShownCurve(
        title=kind.title,
        plot=curve_plot(curve, marks=marks, unit=kind.unit, text=kind.text, may_be_log=kind.may_be_log),
        words=f"{words}{not_finite}.",
        samples=tuple((step, kind.text(value)) for step, value in curve.samples()),
    )


TEMPLATE = "report.html.j2"


def render(facts: ReportFacts, worth: Worth, scores: ScoreSheet) -> bytes:
    """The page, UTF-8. Equal facts give equal bytes."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"shown": shown, "duration": duration, "number": number, "value": value_words}
    template = environment.from_string(resources.files("jobs.reports").joinpath(TEMPLATE).read_text("utf-8"))
    marks = sorted({one.step for one in facts.time.restarts if one.step})
    page = template.render(
        facts=facts,
        worth=worth,
        scores=scores,
        columns=COLUMNS,
        table_2=TABLE_2,
        core_days=CORE_DAYS,
        style=page_style(),
        bar=time_bar(facts.time.parts, WORDS),
        words=WORDS,
        curves=shown_curves(facts.curves.curves, marks=marks, is_cost=False),
        costs=shown_curves(facts.curves.curves, marks=marks, is_cost=True),
        num_marks=len(marks),
    )
    return page.encode("utf-8", "backslashreplace")


def value_words(value: object) -> str:
    """A value of a file that should be a number."""
    return number(value) if is_finite(value) else shown(str(value)[:40], 16)  # type: ignore[arg-type]

"""The report of a run as one HTML page: no script, no request, and names are only ever text. It has the style of a
dataset's card."""

from importlib import resources

import jinja2

from jobs.reports.facts import ReportFacts
from jobs.reports.plots import number, time_bar
from jobs.reports.report_curves import shown_curves
from jobs.reports.scores import ScoreSheet
from jobs.reports.worth import COLUMNS, CORE_DAYS, TABLE_2, Worth
from pipeline.runs.time import WORDS
from shards.card.card_page import page_style
from shards.card.card_words import shown
from shards.files.json_lines import is_finite
from shards.output.quantities import duration

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

"""`patchline compare RUN...`: shows the accuracy of several runs over compute and over data, on one page and in a
table.

The page has a plot of the training losses for each loss function, and one of the accuracies during training for each
dataset. Losses are drawn as means over many steps, so that runs can be told apart even if they differ by less than the
noise of a step. Further plots are like figures 3, 4 and 5 of "An Image is Worth 16x16 Words", with a line for each
model. A script sorts the page's table. The command only reads the runs' files.
"""

import json
import logging
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from markupsafe import Markup, escape

from jobs import exit_codes
from jobs.arguments import take_own_flags
from jobs.output import PAGES, put, refuse_no_page, write_page
from jobs.reports.ls import folders_below
from jobs.reports.points import Point, gather, point_json, told_apart
from jobs.stages import usage_of
from shards.config_values import shown_value
from shards.errors import UserError
from shards.output.quantities import flops_unit, number, plural
from shards.output.terminal import printable_name
from shards.pages.page import Axis, Frame, labelled, log_ticks, page, ticks

NUM_COLOURS = 8  # the number of colours in page.css; further lines use the same colours, dashed
_MOST_RUNS = 2 * NUM_COLOURS
_LOG_RATIO = 10  # losses that span more than this are drawn on a log scale
_COLUMNS = (
    *(("run", "text"), ("accuracy", "number"), ("best", "number"), ("scored on", "text"), ("what differs", "text")),
    *(("few-shot", "number"), ("also scored", "text"), ("compute", "number"), ("images", "number"), ("model", "text")),
    *(("parameters", "number"), ("px", "number")),
)
_LOSS = "loss"  # its axis may be logarithmic
_MOST_SHOTS = 4  # at most this many plots of few-shot accuracy
_MOST_DIFFERING = 24  # at most this many settings are listed
_DASH = 10  # pixels of a line that each of several equal curves has in turn
_ALIKE = 1.01  # a line goes through the mean of points whose x differ by at most this factor
log = logging.getLogger(__name__)
_NAME, _MOST_POINTS, _MOST_NOTES, _MOST_SAID = "compare.html", 2000, 3, 6
_NUMBERS = (3, 4)  # columns of the table that are aligned to the right


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """The flags of the command. `out` is the path of the page. With `json`, no page is written."""

    out: str | None = None
    json: bool = False


def run(words: list[str]) -> int:
    """Writes the page and prints the table. With --json, prints one object for each point instead. Raises UserError if
    there is no run in the folders, or the page cannot be written."""
    flags, folders = take_own_flags(CompareFlags, words)
    if unknown := next((word for word in folders if word.startswith("-")), ""):
        raise UserError(f"unknown flag {shown_value(unknown)}; usage: {usage_of('compare')}")
    if not folders:
        raise UserError(f"no run is given; usage: {usage_of('compare')}")
    if flags.out is not None:
        _refuse_no_page(flags.out)
    out = Path(flags.out or _NAME)
    points, notes = _points(folders)
    if not points:
        raise _nothing(folders, notes)
    for note in notes:
        log.warning("left out: %s", printable_name(note))
    if flags.json:
        put("".join(f"{json.dumps(point_json(one), allow_nan=False)}\n" for one in points))
        return exit_codes.DONE
    page = render(points, notes)
    write_page(out, page)
    put(point_table(points))
    log.info("%s: %s, opens in any browser", printable_name(str(out)), plural(len(points), "point"))
    return exit_codes.DONE


def _refuse_no_page(out: str) -> None:
    """Raises UserError if the page cannot have this path, or would replace a file that is not a page."""
    if Path(out).suffix.lower() not in PAGES:
        raise UserError(f"--out is {shown_value(out)}; allowed: the name of an .html file")
    refuse_no_page(Path(out), name=_NAME)


def _points(folders: Sequence[str]) -> tuple[list[Point], list[str]]:
    """Returns the points of all runs in these folders, without duplicates, and notes on folders that cannot be used."""
    points, notes, seen = list[Point](), list[str](), set[Path]()
    for given in folders:
        root = Path(given)
        new = [folder for folder in folders_below(root) if folder.resolve() not in seen]
        seen |= {folder.resolve() for folder in new}
        found, told = gather(new, root=root)
        points, notes = [*points, *found], [*notes, *told]
    if len(points) > _MOST_POINTS:
        raise UserError(f"{len(points):,} runs; allowed: at most {_MOST_POINTS:,} in one comparison")
    return told_apart(points), notes


def _nothing(folders: Sequence[str], notes: Sequence[str]) -> UserError:
    """Returns the error for folders without a usable run. `notes` says why the runs found cannot be used."""
    listed, give = ", ".join(map(repr, folders)), "give run directories or folders of them"
    if not notes:
        return UserError(f"no training run in {listed}, down to 3 levels; {give}")
    shown = "; ".join(map(printable_name, notes[:_MOST_NOTES]))
    more = f"; and {len(notes) - _MOST_NOTES} more" if len(notes) > _MOST_NOTES else ""
    return UserError(f"nothing to compare in {listed}: {shown}{more}; {give}, of a sweep its own folder")


def point_table(points: Sequence[Point]) -> str:
    """Returns a text table with a line for each point."""
    in_exaflop, unit = _unit(points)
    rows = [
        (
            "run",
            "model",
            "scored on",
            "images",
            unit,
            "accuracy",
            "best",
            "few-shot",
            "also scored",
            "what differs",
        )
    ]
    rows += [
        (
            printable_name(one.name),
            printable_name(one.line),
            printable_name(one.dataset) or "-",
            "-" if one.num_images is None else f"{one.num_images:,}",
            f"{_compute(one) * in_exaflop:.3g}{' own' if one.exaflops is None else ''}",
            _score(one.accuracy, one.deviation),
            _score(one.best_accuracy, one.best_deviation),
            ", ".join(f"{shots}: {value:.3f}" for shots, value in one.fewshot.items()) or "-",
            "; ".join(printable_name(more.words()) for more in one.also) or "-",
            _differs(one.differs),
        )
        for one in points
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        sized = zip(row, widths, strict=True)
        cells = [cell.rjust(width) if at in _NUMBERS else cell.ljust(width) for at, (cell, width) in enumerate(sized)]
        lines.append(f"{'  '.join(cells).rstrip()}\n")
    return "".join(lines)


def _unit(points: Sequence[Point]) -> tuple[float, str]:
    """Returns the unit of compute for all points: how many of it are an exaFLOP, and its name."""
    return flops_unit(max(_compute(one) for one in points))


def _compute(one: Point) -> float:
    """Returns the exaFLOPs of a point in a plot: those of its own steps if those of its pre-training are not known."""
    return one.own_exaflops if one.exaflops is None else one.exaflops


def _score(value: float | None, deviation: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")


def _differs(settings: Sequence[str]) -> str:
    """Returns the first six settings in which the run differs, as text. The page lists more."""
    more = len(settings) - _MOST_SAID
    shown = [printable_name(one) for one in settings[:_MOST_SAID]] + ([f"and {more} more"] if more > 0 else [])
    return ", ".join(shown) or "-"


def render(points: Sequence[Point], notes: Sequence[str]) -> bytes:
    """Returns the page in UTF-8. Equal points give equal bytes."""
    lines = list(dict.fromkeys(one.line for one in points))
    in_exaflop, unit = _unit(points)
    empty = [] if any(one.fewshot for one in points) else ["few-shot"]
    empty += [] if any(one.also for one in points) else ["also scored"]
    values = {
        "points": points,
        "notes": notes,
        "lines": lines,
        "columns": [(unit if name == "compute" else name, kind) for name, kind in _COLUMNS],
        "empty": empty,
        "in_exaflop": in_exaflop,
        "dots": [dot_class(place) for place in range(len(lines))],
        "plots": _plots(points, lines),
        "curves": [*loss_plots(points), *accuracy_plots(points)],
        "is_scored": any(one.drawn[0] is not None for one in points),
        "most_differing": _MOST_DIFFERING,
    }
    return page("jobs.reports", "compare.html.j2", values, script="compare.js")


@dataclass(frozen=True, kw_only=True)
class PlotPoint:
    """A point of a plot. `x` is above 0, `y` and its `deviation` are in percent, and `row` is the id of the point's row
    in the page's table."""

    x: float
    y: float
    line: str
    name: str
    row: str
    deviation: float = 0.0


def _plots(points: Sequence[Point], lines: Sequence[str]) -> list[tuple[str, Markup]]:
    """Returns the plots, each with its title: for each dataset, accuracy over compute and over data; then few-shot
    accuracy over data. Points share a plot only if they are scored on the same dataset. Left out are plots of one
    point, and accuracy over data that is the same for all."""
    also = [more for one in points for more in one.also]
    measured = [(shots, one.fewshot_dataset) for one in points for shots in one.fewshot]
    measured += [(one.shots, one.dataset) for one in also if one.shots]
    few = sorted({shots for shots, _ in measured})[:_MOST_SHOTS]
    datasets = dict.fromkeys([*(one.dataset for one in points), *(one.dataset for one in also if not one.shots)])
    wanted = [(0, dataset, axis) for dataset in datasets for axis in ("compute", "data")]
    wanted += [(shots, name, "data") for shots in few for name in dict.fromkeys(on for n, on in measured if n == shots)]
    made = []
    in_exaflop, unit = _unit(points)
    for shots, dataset, axis in wanted:
        marks = list(_marks(points, shots, dataset, axis, in_exaflop=in_exaflop))
        is_repeated = axis == "data" and not shots and len({mark.x for mark in marks}) == 1
        if len(marks) > 1 and not is_repeated:  # a single point says no more than the table
            what = f"{shots}-shot accuracy" if shots else "Accuracy"
            on = f" on {dataset}" if dataset else ""
            x_name = unit if axis == "compute" else "images of pre-training"
            made.append((f"{what}{on} over {axis}", scatter(marks, x_name=x_name, y_name=f"{what} (%)", lines=lines)))
    return made


def _marks(points: Sequence[Point], shots: int, dataset: str, axis: str, *, in_exaflop: float) -> Iterator[PlotPoint]:
    """Yields the points that have a score on a dataset. `shots` is the number of shots of a few-shot accuracy, or 0 for
    the usual accuracy. `in_exaflop`: how many of the unit of compute are an exaFLOP."""
    for place, one in enumerate(points):
        x = _compute(one) * in_exaflop if axis == "compute" else one.num_images
        y, spread = _score_on(one, shots, dataset)
        if x and y is not None:
            deviation = 100 * (spread or 0)
            yield PlotPoint(
                x=float(x), y=100 * y, line=one.line, name=one.name, row=f"row-{place}", deviation=deviation
            )


def _score_on(one: Point, shots: int, dataset: str) -> tuple[float | None, float | None]:
    """Returns a score and its deviation. For few-shot accuracy, a score from RUN/fewshot is preferred to the one
    measured during training. For any other accuracy, the run's own score is preferred."""
    also = [(more.score, more.deviation) for more in one.also if (more.dataset, more.shots) == (dataset, shots)]
    if shots:
        own = (one.fewshot.get(shots), one.fewshot_deviation.get(shots)) if one.fewshot_dataset == dataset else None
        return also[0] if also else own or (None, None)
    return one.drawn if one.dataset == dataset else also[0] if also else (None, None)


def scatter(marks: Sequence[PlotPoint], *, x_name: str, y_name: str, lines: Sequence[str]) -> Markup:
    """Draws the marks, and joins those of the same line. `lines` has all lines of the page; a line's index in it gives
    the colour."""
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
    """Returns the CSS class of a line's marks. `place` is the line's index among all lines."""
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
    """Returns the points that a line goes through: each mark, or the mean of marks with nearly the same x. Without the
    mean, the line would be vertical there."""
    groups: list[list[PlotPoint]] = []
    for one in sorted(marks, key=lambda one: one.x):
        if groups and one.x <= _ALIKE * groups[-1][0].x:
            groups[-1].append(one)
        else:
            groups.append([one])
    return [(statistics.fmean(one.x for one in found), statistics.fmean(one.y for one in found)) for found in groups]


@dataclass(frozen=True, kw_only=True)
class CurvePlot:
    """The losses or the accuracies of several runs in one picture. `keys` has the CSS class of each line and the name
    of its run. `words` says how many runs are not drawn."""

    title: str
    picture: Markup
    keys: tuple[tuple[str, str], ...]
    words: str


def loss_plots(points: Sequence[Point]) -> list[CurvePlot]:
    """Draws the training losses in a picture for each loss function. Runs with fewer than two means are left out."""
    drawn = sorted((one for one in points if len(one.losses) > 1), key=lambda one: one.loss_name)
    groups = [list(group) for _, group in groupby(drawn, key=lambda one: one.loss_name)]
    titles = ["Training loss" if len(groups) == 1 else f"Training loss, {group[0].loss_name}" for group in groups]
    return [
        _plot([(one, one.losses) for one in group], title=title, what=_LOSS)
        for title, group in zip(titles, groups, strict=True)
    ]


def accuracy_plots(points: Sequence[Point]) -> list[CurvePlot]:
    """Draws the accuracies during training in a picture for each dataset. Runs with fewer than two scores are left
    out."""
    drawn = sorted((one for one in points if len(one.accuracies) > 1), key=lambda one: one.dataset)
    groups = [list(group) for _, group in groupby(drawn, key=lambda one: one.dataset)]
    return [
        _plot(
            [(one, [(step, 100 * value) for step, value in one.accuracies]) for one in group],
            title=f"Accuracy on {group[0].dataset}",
            what="accuracy (%)",
        )
        for group in groups
    ]


def _plot(drawn: Sequence[tuple[Point, Sequence[tuple[int, float]]]], *, title: str, what: str) -> CurvePlot:
    """Draws curves over steps or, if batch sizes differ, over images. Equal curves take turns along their line, so that
    all can be seen: the first is whole, and each later one lies on it with dashes of its own."""
    shown, num_left = drawn[:_MOST_RUNS], max(0, len(drawn) - _MOST_RUNS)
    of_images = len({one.global_batch for one, _ in shown}) > 1
    lines = [[(step * (one.global_batch if of_images else 1), y) for step, y in curve] for one, curve in shown]
    xs, ys = [x for line in lines for x, _ in line], [y for line in lines for _, y in line]
    is_log = what == _LOSS and min(ys) > 0 and max(ys) / min(ys) > _LOG_RATIO
    x_name = "images trained on" if of_images else "step"
    frame = Frame(
        x=Axis(name=x_name, low=min(xs), high=max(xs), ticks=labelled(ticks(min(xs), max(xs), is_whole=True))),
        y=Axis(
            name=what,
            low=min(ys),
            high=max(ys),
            ticks=labelled(log_ticks(min(ys), max(ys)) if is_log else ticks(min(ys), max(ys))),
            is_log=is_log,
            margin=0.05,
        ),
    )
    styles, names, curves = [], [], []
    for at, ((one, _), line) in enumerate(zip(shown, lines, strict=True)):
        equal = lines.index(line)
        colour, dashed = f"line-{at % NUM_COLOURS}", f"line-{at % NUM_COLOURS} dashed"
        styles.append(dashed if at >= NUM_COLOURS or equal < at else colour)
        if equal < at:
            turn, num_turns = lines[:at].count(line), lines.count(line)
            dashes = f"stroke-dasharray:{_DASH} {_DASH * (num_turns - 1)};stroke-dashoffset:-{_DASH * turn}"
            curves.append(f'<g style="{dashes}">{frame.line(line, f"joined {colour}")}</g>')
        else:
            curves.append(frame.line(line, f"joined {styles[-1]}"))
        seeds = " (its first seed)" if one.num_runs > 1 else ""
        names.append(f"{one.name}{seeds}" + (f", equal to {shown[equal][0].name}" if equal < at else ""))
    ends = "; ".join(f"{name} ends at {number(line[-1][1])}" for name, line in zip(names, lines, strict=True))
    return CurvePlot(
        title=title,
        picture=frame.svg(
            f"{title} over {x_name}: {ends}.",
            curves,
        ),
        keys=tuple(zip(styles, names, strict=True)),
        words=f"{plural(num_left, 'more run')} not drawn: compare fewer to see them." if num_left else "",
    )

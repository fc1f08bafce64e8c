"""Draws what `patchline plan --nodes` found over the number of nodes: goodput, days, GPU-hours and cost.

An SVG, or an HTML page with it. Both follow the reader's choice of light or dark.
"""

import io
from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.planning.nodes import Row, summary
from jobs.settings.models import PlanJob
from shards.errors import UserError
from shards.output.quantities import number
from shards.output.terminal import printable_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, PAPER = "#101820", "#94a3b8", "#ffffff"
DARK = {INK: "#e6edf3", FAINT: "#5b6675", PAPER: "#0d1117", "#0072b2": "#58a6ff"}
BLUE = "#0072b2"
# Colours that the usual kinds of colour blindness tell apart: Okabe and Ito, "Color Universal Design", 2008.
_RATES = ("#009e73", "#56b4e9", "#e69f00", "#cc79a7", "#d55e00")
_MOST_TICKS = 8


def write_plot(job: PlanJob, rows: Sequence[Row]) -> None:
    """Writes `job.out`. UserError if it cannot be written."""
    path = Path(job.out)
    text = svg(job, rows)
    if path.suffix.lower() == ".html":
        text = page(job, rows, text)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--out is {job.out!r}, which cannot be written: {error.strerror}; give a file in a folder that exists"
        ) from error


def svg(job: PlanJob, rows: Sequence[Row]) -> str:
    """The picture; the same text for the same plan and version of matplotlib."""
    import matplotlib as mpl  # noqa: PLC0415 - slow, and most plans draw nothing
    from matplotlib.figure import Figure  # noqa: PLC0415

    settings = {
        "svg.hashsalt": "plan",
        "svg.fonttype": "none",
        "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(11, 3.7), facecolor=PAPER)
        goodput, days, hours = figure.subplots(1, 3)
        _draw_goodput(goodput, rows)
        _draw_days(days, rows)
        _draw_hours(hours, rows, price=job.price)
        for axes in (goodput, days, hours):
            _finish(axes, [plan.num_nodes for plan, _ in rows])
        figure.subplots_adjust(left=0.05, right=0.96, top=0.88, bottom=0.14, wspace=0.24)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Title": printable_name(summary(job, rows))})
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark} !important}}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    head, end, body = drawn.getvalue().partition("<defs>")
    return f"{head}{style}{end}{body}"


def page(job: PlanJob, rows: Sequence[Row], picture: str) -> str:
    """The picture in an HTML page, with the sentence that sums it up; nothing in it is loaded from elsewhere."""
    title = escape(printable_name(f"patchline plan {job.recipe}".rstrip()))
    style = (
        ":root{color-scheme:light dark}body{font:16px sans-serif;margin:2em auto;max-width:1100px;padding:0 1em;"
        f"background:{PAPER};color:{INK}}}svg{{width:100%;height:auto}}"
        f"@media (prefers-color-scheme: dark){{body{{background:{DARK[PAPER]};color:{DARK[INK]}}}}}"
    )
    said = escape(printable_name(summary(job, rows)))
    drawn = picture[picture.index("<svg") :]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{style}</style></head>\n<body><h1>{title}</h1><p>{said}</p>\n{drawn}</body></html>\n"
    )


def _draw_goodput(axes: "Axes", rows: Sequence[Row]) -> None:
    nodes = [plan.num_nodes for plan, _ in rows]
    for name, colour in zip(rows[0][0].goodputs, _RATES, strict=True):
        shares = [100 * plan.goodputs[name] for plan, _ in rows]
        axes.plot(nodes, shares, color=colour, linewidth=1.4, marker="o", markersize=3, label=name)
    chosen = [100 * plan.outcome.goodput for plan, _ in rows]
    axes.plot(nodes, chosen, color=INK, linewidth=2, linestyle=(0, (1, 1.5)), marker=".", label="this plan")
    found = [(plan.num_nodes, one) for plan, one in rows if one]
    if found:
        axes.errorbar(
            [at for at, _ in found],
            [100 * one.goodput for _, one in found],
            yerr=[100 * one.spread for _, one in found],
            color=INK,
            fmt="x",
            capsize=3,
            linewidth=1,
            label="simulated",
        )
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower left")
    axes.set_title("Goodput, % of the wall time", fontsize=11, color=INK, loc="left")
    axes.ticklabel_format(axis="y", useOffset=False)
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, min(low, high - 1)), min(100.0, max(high, low + 1)))


def _draw_days(axes: "Axes", rows: Sequence[Row]) -> None:
    nodes = [plan.num_nodes for plan, _ in rows]
    ideal = [plan.ideal_days for plan, _ in rows]
    axes.plot(nodes, ideal, color=INK, linewidth=1, linestyle=(0, (4, 3)), label="without interruptions")
    axes.plot(nodes, [plan.days for plan, _ in rows], color=BLUE, linewidth=2, marker="o", markersize=4, label="days")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    axes.set_title("Days (log scale)", fontsize=11, color=INK, loc="left")
    axes.yaxis.set_major_formatter(lambda at, _: f"{at:g}")
    axes.yaxis.set_minor_formatter(lambda at, _: f"{at:g}" if str(f"{at:e}")[0] in "25" else "")


def _draw_hours(axes: "Axes", rows: Sequence[Row], *, price: float) -> None:
    nodes = [plan.num_nodes for plan, _ in rows]
    hours = [plan.gpu_hours for plan, _ in rows]
    axes.plot(nodes, hours, color=BLUE, linewidth=2, marker="o", markersize=4)
    axes.set_ylim(0, 1.25 * max(hours))
    axes.yaxis.set_major_formatter(lambda at, _: number(at))
    told = "GPU-hours"
    if price:
        told = f"GPU-hours; right: cost at {price:g} each"
        right = axes.secondary_yaxis("right", functions=(partial(np.multiply, price), partial(np.multiply, 1 / price)))
        right.yaxis.set_major_formatter(lambda at, _: number(at))
        right.tick_params(colors=INK, labelsize=8)
        right.spines["right"].set_color(INK)
    axes.set_title(told, fontsize=11, color=INK, loc="left")


def _finish(axes: Any, nodes: Sequence[int]) -> None:
    """Nodes on a log scale, with ticks at those that were asked for."""
    axes.set_facecolor(PAPER)
    axes.set_xscale("log", base=2)
    every = -(-len(nodes) // _MOST_TICKS)
    axes.set_xticks(nodes[::every], [f"{one:,}" for one in nodes[::every]])
    axes.minorticks_off() if axes.get_yscale() == "linear" else axes.xaxis.minorticks_off()
    axes.set_xlabel("nodes", fontsize=9, color=INK)
    axes.tick_params(which="both", colors=INK, labelsize=8)
    axes.grid(visible=True, axis="y", color=FAINT, linewidth=0.5, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)

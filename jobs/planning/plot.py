"""Draws the results of `patchline plan`: goodput, days, GPU-hours and cost over the number of nodes, or operations and
memory over the image size.

The result is an SVG or an HTML page. It follows the reader's choice of light or dark mode.
"""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import escape

from jobs.planning.scaling import AtSize, summary
from jobs.settings.runs import PlanJob
from pipeline.planning.cluster_plan import NodesPlan
from shards.errors import UserError
from shards.output.quantities import number
from shards.output.terminal import printable_name
from shards.pages.page import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Frame,
    labelled,
    log_ticks,
    page,
    style_sheet,
    svg,
    ticks,
)

_MOST_TICKS = 8
_PANEL_HEIGHT = HEIGHT + 16
_TEXT_SIZE, _LINE_HEIGHT = 15, 19
# CSS classes of lines: a colour in page.css, or the colour of the text.
_PLAN, _IDEAL, _DAYS, _LEAST = "ink dotted", "ink dashed", "joined line-0", "joined line-5"
_RATES = ("joined line-1", "joined line-6", "joined line-2", "joined line-3", "joined line-5")


def write_plot(job: PlanJob, rows: Sequence[NodesPlan], sizes: Sequence[AtSize] = ()) -> None:
    """Draws the plots over the number of nodes and over the image size, and writes them to `job.out`. Raises UserError
    if the file cannot be written."""
    path, panels, told = Path(job.out), [], f"{job.recipe or 'A run'} over the image size."
    if rows:
        panels, told = [_goodput(rows), _days(rows), _hours(rows, job.price)], summary(job, rows)
    for frame, lines, names in _size_panels(sizes) if sizes else ():
        panels.append((frame, [*lines, *_legend(names, first=TOP + 6)]))
    if path.suffix.lower() == ".html":
        title = f"patchline plan {job.recipe}".rstrip()
        plots = [frame.svg(f"{frame.y.name}, over {frame.x.name}", drawn) for frame, drawn in panels]
        data = page("jobs.planning", "plan.html.j2", {"title": title, "told": told, "plots": plots})
    else:
        data = _one_below_the_other(panels, printable_name(told)).encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UserError(
            f"--out is {job.out!r}, which cannot be written: {error.strerror}",
            todo="give a file in a folder that exists",
        ) from error


def _one_below_the_other(panels: Sequence[tuple[Frame, list[str]]], about: str) -> str:
    """Returns one SVG with all panels, whose text is large enough for a telephone. It contains the style sheet of our
    pages."""
    groups = [
        f'<g transform="translate(0 {place * _PANEL_HEIGHT})">{"".join(frame.elements(drawn))}</g>'
        for place, (frame, drawn) in enumerate(panels)
    ]
    height = len(panels) * _PANEL_HEIGHT
    own = (
        f"<title>{escape(about)}</title><style>{style_sheet()} svg {{ font-size: {_TEXT_SIZE}px; }}</style>"
        '<rect class="paper" width="100%" height="100%"/>'
    )
    drawn = svg(about, WIDTH, height, [own, *groups])
    size = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
    return str(drawn).replace("<svg ", size, 1) + "\n"


def _nodes(rows: Sequence[NodesPlan]) -> Axis:
    """Returns the axis of the number of nodes: a log scale, with ticks at no more than `_MOST_TICKS` of the requested
    numbers."""
    nodes = [plan.num_nodes for plan in rows]
    shown = nodes[:: -(-len(nodes) // _MOST_TICKS)]
    return Axis(name="nodes", low=nodes[0], high=nodes[-1], ticks=labelled(shown), is_log=True, margin=0.03)


def _goodput(rows: Sequence[NodesPlan]) -> tuple[Frame, list[str]]:
    lines = {
        name: (style, [100 * plan.goodputs[name] for plan in rows])
        for name, style in zip(rows[0].goodputs, _RATES, strict=True)
    }
    lines["this plan"] = (_PLAN, [100 * plan.outcome.goodput for plan in rows])
    values = [value for _, own in lines.values() for value in own]
    low, high = min(values), max(values)
    low, high = max(0.0, min(low, high - 1)), min(100.0, max(high, low + 1))
    # Room for the legend below the lines.
    share = _LINE_HEIGHT * (len(lines) + 1) / HEIGHT
    low = max(0.0, low - (high - low) * share / (1 - share))
    y = Axis(name="Goodput, % of the wall time", low=low, high=high, ticks=labelled(ticks(low, high)), margin=0.05)
    frame = Frame(x=_nodes(rows), y=y)
    drawn = [_line(frame, rows, own, style) for style, own in lines.values()]
    return frame, [*drawn, *_legend([(name, style) for name, (style, _) in lines.items()])]


def _days(rows: Sequence[NodesPlan]) -> tuple[Frame, list[str]]:
    slow = [plan.days * plan.images_per_second / plan.least_images_per_second for plan in rows]
    low, high = min(plan.ideal_days for plan in rows), max(slow)
    y = Axis(name="Days", low=low, high=high, ticks=labelled(log_ticks(low, high)), is_log=True, margin=0.05)
    frame = Frame(x=_nodes(rows), y=y)
    ideal = _line(frame, rows, [plan.ideal_days for plan in rows], _IDEAL)
    days = _line(frame, rows, [plan.days for plan in rows], _DAYS)
    slowest = _line(frame, rows, slow, _LEAST)
    names = [("without interruptions", _IDEAL), ("days", _DAYS), ("days at the least rate", _LEAST)]
    return frame, [slowest, days, ideal, *_legend(names)]


def _hours(rows: Sequence[NodesPlan], price: float) -> tuple[Frame, list[str]]:
    high = 1.25 * max(plan.gpu_hours for plan in rows)
    steps = ticks(0, high)
    name = f"GPU-hours; right: cost at {price:g} each" if price else "GPU-hours"
    frame = Frame(x=_nodes(rows), y=Axis(name=name, low=0, high=high, ticks=labelled(steps)))
    drawn = [_line(frame, rows, [plan.gpu_hours for plan in rows], _DAYS)]
    for at in steps if price else ():
        place = f'x="{WIDTH - RIGHT}" y="{frame.down(at) - 4:.1f}" text-anchor="end"'
        drawn.append(f"<text {place}>{escape(number(at * price))}</text>")
    return frame, drawn


def _size_panels(found: Sequence[AtSize]) -> list[tuple[Frame, list[str], list[tuple[str, str]]]]:
    """Returns the panels of operations and of memory over the image size: the axes, the lines, and the name and style
    of each line for the legend."""
    sizes = [at.image_size for at in found]
    shown = labelled(sizes[:: -(-len(sizes) // _MOST_TICKS)])
    x = Axis(name="image size, px", low=sizes[0], high=sizes[-1], ticks=shown, margin=0.03)
    lines = {
        "GFLOP, forward": {
            "all": (_DAYS, [at.forward_flops / 1e9 for at in found]),
            "attention's products": (_RATES[0], [at.attention_flops / 1e9 for at in found]),
        },
        "Memory of an image, MB": {"training": (_DAYS, [at.activation_bytes / 1e6 for at in found])},
    }
    panels = []
    for name, drawn in lines.items():
        high = 1.05 * max(value for _, values in drawn.values() for value in values)
        frame = Frame(x=x, y=Axis(name=name, low=0, high=high, ticks=labelled(ticks(0, high))))
        paths = [frame.line(zip(sizes, values, strict=True), style) for style, values in drawn.values()]
        panels.append((frame, paths, [(what, style) for what, (style, _) in drawn.items()]))
    return panels


def _line(frame: Frame, rows: Sequence[NodesPlan], values: Sequence[float], style: str) -> str:
    return frame.line(zip((plan.num_nodes for plan in rows), values, strict=True), style)


def _legend(lines: Sequence[tuple[str, str]], *, first: int | None = None) -> list[str]:
    """Draws the legend, `first` pixels below the top. By default it is in the bottom left corner, which falling lines
    leave free."""
    first = HEIGHT - BOTTOM - _LINE_HEIGHT * len(lines) if first is None else first
    return [
        f'<path class="{style}" d="M{LEFT + 10} {first + _LINE_HEIGHT * place + 4}h20"/>'
        f'<text x="{LEFT + 36}" y="{first + _LINE_HEIGHT * place + 9}">{escape(name)}</text>'
        for place, (name, style) in enumerate(lines)
    ]

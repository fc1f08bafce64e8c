"""The training losses of a comparison in one picture for each loss: a line for each run, of means, so that runs that
differ by less than the noise of a step can be told apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from jobs.reports.points import Point
from shards.output.quantities import number, plural
from shards.pages.plots import Axis, Frame, labelled, log_ticks, ticks

NUM_COLOURS = 8  # those of page.css; after the last one they come again, dashed
_MOST_RUNS = 2 * NUM_COLOURS
_LOG_RATIO = 10  # losses that span more than this are drawn on a log scale


@dataclass(frozen=True, kw_only=True)
class LossPlot:
    """`keys`: the class of each line and the name of its run. `words`: what is not drawn."""

    title: str
    picture: Markup
    keys: tuple[tuple[str, str], ...]
    words: str


def loss_plots(points: Sequence[Point]) -> list[LossPlot]:
    """A picture for each loss that the runs train with; runs with fewer than two means are left out."""
    drawn = sorted((one for one in points if len(one.losses) > 1), key=lambda one: one.loss_name)
    groups = [list(group) for _, group in groupby(drawn, key=lambda one: one.loss_name)]
    return [_plot(group, is_only=len(groups) == 1) for group in groups]


def _plot(points: list[Point], *, is_only: bool) -> LossPlot:
    shown, num_left = points[:_MOST_RUNS], max(0, len(points) - _MOST_RUNS)
    of_images = len({one.global_batch for one in shown}) > 1  # steps of other batches are no measure of progress
    lines = [[(step * (one.global_batch if of_images else 1), loss) for step, loss in one.losses] for one in shown]
    xs, ys = [x for line in lines for x, _ in line], [y for line in lines for _, y in line]
    is_log = min(ys) > 0 and max(ys) / min(ys) > _LOG_RATIO
    x_name = "images trained on" if of_images else "step"
    frame = Frame(
        x=Axis(name=x_name, low=min(xs), high=max(xs), ticks=labelled(ticks(min(xs), max(xs), is_whole=True))),
        y=Axis(
            name="loss",
            low=min(ys),
            high=max(ys),
            ticks=labelled(log_ticks(min(ys), max(ys)) if is_log else ticks(min(ys), max(ys))),
            is_log=is_log,
            margin=0.05,
        ),
    )
    styles = [f"line-{at % NUM_COLOURS}{' dashed' if at >= NUM_COLOURS else ''}" for at in range(len(shown))]
    names = [one.name + (" (its first seed)" if one.num_runs > 1 else "") for one in shown]
    ends = "; ".join(f"{name} ends at {number(one.losses[-1][1])}" for name, one in zip(names, shown, strict=True))
    title = "Training loss" if is_only else f"Training loss, {shown[0].loss_name}"
    return LossPlot(
        title=title,
        picture=frame.svg(
            f"{title} over {x_name}: {ends}.",
            [frame.line(line, f"joined {style}") for line, style in zip(lines, styles, strict=True)],
        ),
        keys=tuple(zip(styles, names, strict=True)),
        words=f"{plural(num_left, 'more run')} not drawn: compare fewer to see them." if num_left else "",
    )

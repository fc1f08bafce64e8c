"""The pictures of a run's report as inline SVG, the confusion matrix among them: numbers in, markup out.

Colours are the page's, by CSS class.
"""

import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup, escape

from pipeline.runs.curves import Curve
from shards.card.card_words import byte_text
from shards.output.quantities import short_count

WIDTH, HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 12, 26, 40
_LOG_RATIO = 50  # curves that span more than this are drawn on a log scale
_MOST_TICKS = 5
_BAR_WIDTH, _BAR_HEIGHT = 1100, 46
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def number(value: float) -> str:
    """A number in at most four digits: `0.0123`, `1,622`, `2.03e-05`."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 99_999.5 else f"{value:.3g}" if abs(value) >= 1e12 else _thousands(value)
    return f"{value:.4g}" if abs(value) >= 0.001 else f"{value:.3g}"


def _three(value: float) -> str:
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1000 else number(value)


def _thousands(value: float) -> str:
    return ("-" if value < 0 else "") + short_count(abs(value))


def seconds_text(value: float) -> str:
    """A time as short as it is: `26 µs`, `1.5 ms`, `2 s`."""
    unit, name = next(((unit, name) for unit, name in _TIMES if abs(value) >= unit), _TIMES[-1])
    return f"{_three(value / unit)} {name}" if value else "0 s"


def bytes_text(value: float) -> str:
    """A number of bytes: `418 MB`."""
    return byte_text(value) if value >= 0 else number(value)


def share_text(value: float) -> str:
    """A share in percent."""
    return f"{_three(100 * value)} %"


def curve_plot(
    curve: Curve,
    *,
    marks: Sequence[int] = (),
    unit: str = "",
    text: Callable[[float], str] = number,
    may_be_log: bool = True,
) -> Markup:
    """The curve over the steps, with a dashed line at each step of `marks`. `unit`: of the values, which `text` writes
    beside their axis."""
    points = curve.envelope()
    low, high = curve.extreme(most=False)[1], curve.extreme(most=True)[1]
    is_log = may_be_log and low > 0 and high / low > _LOG_RATIO
    scale: Callable[[float], float] = math.log10 if is_log else float
    bottom, top = scale(low), scale(high)
    margin = (top - bottom) * 0.05 or abs(top) * 0.05 or 1.0
    first, last = curve.steps[0], curve.steps[-1]
    x = axis(first, last if last > first else first + 1, _LEFT, WIDTH - _RIGHT)
    y = axis(bottom - margin, top + margin, HEIGHT - _BOTTOM, _TOP)
    body = [
        f'<path class="grid" d="M{_LEFT} {y(scale(at)):.1f}H{WIDTH - _RIGHT}"/>'
        f'<text x="{_LEFT - 8}" y="{y(scale(at)) + 4:.1f}" text-anchor="end">{escape(text(at))}</text>'
        for at in (_decades(low, high) if is_log else ticks(low, high))
    ]
    body += [f'<path class="mark" d="M{x(at):.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>' for at in marks if first < at < last]
    if len(points) == 1:
        body.append(f'<circle class="bar" cx="{x(points[0][0]):.1f}" cy="{y(scale(points[0][1])):.1f}" r="3"/>')
    else:
        path = " ".join(f"{x(step):.1f},{y(scale(value)):.1f}" for step, value in points)
        body.append(f'<polyline class="curve thin" points="{path}"/>')
    body += _axis_of_steps(first, last, x)
    body.append(f'<text x="4" y="13">{escape(unit or curve.name)}{" (log scale)" if is_log else ""}</text>')
    about = (
        f"{curve.name} over steps {first:,} to {last:,}: from {text(curve.values[0])} to {text(curve.values[-1])}, "
        f"least {text(low)}, most {text(high)}."
    )
    return svg(about, WIDTH, HEIGHT, body)


def _axis_of_steps(first: int, last: int, x: Callable[[float], float]) -> list[str]:
    base = HEIGHT - _BOTTOM
    body = [f'<path class="axis" d="M{_LEFT} {base}H{WIDTH - _RIGHT}"/>']
    for at in ticks(first, last, is_whole=True):
        anchor = "end" if x(at) > WIDTH - _RIGHT - 20 else "middle"
        body.append(f'<text x="{x(at):.1f}" y="{base + 18}" text-anchor="{anchor}">{escape(_step(at))}</text>')
    return [*body, f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 6}" text-anchor="end">step</text>']


def time_bar(parts: Mapping[str, float], words: Mapping[str, str]) -> Markup:
    """One bar, a part per cause; its colours are the classes part-0, part-1 ... in the order of `parts`."""
    total = sum(parts.values()) or 1.0
    body, at = [], 0.0
    for place, seconds in enumerate(parts.values()):
        width = seconds / total * _BAR_WIDTH
        if width:
            body.append(f'<rect class="part-{place}" x="{at:.2f}" y="0" width="{width:.2f}" height="{_BAR_HEIGHT}"/>')
        at += width
    told = ", ".join(f"{words[name]} {seconds / total:.1%}" for name, seconds in parts.items() if seconds)
    return svg(f"Where the time went: {told}.", _BAR_WIDTH, _BAR_HEIGHT, body, is_flat=True)


def _step(at: float) -> str:
    return f"{at:,.0f}" if at < 1e6 else short_count(at)


def axis(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """The place between `first` and `last` of a value from `low` to `high`."""
    ratio = (last - first) / (high - low)
    return lambda value: first + (value - low) * ratio


def ticks(low: float, high: float, *, is_whole: bool = False) -> list[float]:
    """Two to five round numbers from `low` to `high`, or fewer if only whole ones count."""
    if high <= low:
        return [low]
    size = 10.0 ** math.floor(math.log10((high - low) / 5))
    for factor in (1, 2, 5, 10, 20):
        step = max(size * factor, 1.0) if is_whole else size * factor
        ticks = [at * step for at in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if len(ticks) <= _MOST_TICKS:
            break
    return ticks


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 5)
    values = [10.0**power for power in range(first, last + 1, every)]
    return [value for value in values if low * 0.8 <= value <= high * 1.25]


def svg(about: str, width: int, height: int, body: Sequence[str], *, is_flat: bool = False) -> Markup:
    """The picture of these elements; `about`: what it shows, for those who do not see it."""
    # every text in `body` is either made here or was escaped when it was put in
    flat = ' preserveAspectRatio="none" class="flat"' if is_flat else ""
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(about)}"{flat}>'
    return Markup(f"{head}{''.join(body)}</svg>")  # noqa: S704


MOST_CLASSES = 30
_LEAST_LEFT, _LEAST_TOP, _LEAST_RIGHT = 60, 60, 8
_TURN = 55  # degrees of the names of classes
_TEXT_SIZE = 12.5  # pixels, of page.css
_WIDE, _NARROW = 34, 17  # pixels of a cell, of few and of many classes
_MOST_WIDE = 14


def confusion_plot(
    shares: Sequence[Sequence[float]],
    labels: Sequence[str],
    classes: Sequence[str],
    *,
    is_right: Sequence[Sequence[bool]],
) -> Markup:
    """A row for each label, a column for each class of the model; `shares`: of the label's images that the model took
    for the class, 0 to 1. Cells of right answers (`is_right`) have another colour."""
    cell = _WIDE if max(len(labels), len(classes)) <= _MOST_WIDE else _NARROW
    left, top, right = _margins(labels, classes, cell=cell)
    body: list[str] = []
    for column, name in enumerate(classes):
        at = f"translate({left + (column + 0.5) * cell + 4:.1f} {top - 7}) rotate(-{_TURN})"
        body.append(f'<text class="name" transform="{at}">{escape(name)}</text>')
    for row, name in enumerate(labels):
        y = top + row * cell
        body.append(
            f'<text class="name" x="{left - 8}" y="{y + cell / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>'
        )
        for column, share in enumerate(shares[row]):
            x = left + column * cell
            box = (
                f'x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}" fill-opacity="{0.05 + 0.95 * share**0.5:.2f}"'
            )
            body.append(f'<rect class="{"part-1" if is_right[row][column] else "cell"}" {box}/>')
            if share >= 0.005 and cell == _WIDE:
                place = f'x="{x + cell / 2 - 0.5:.1f}" y="{y + cell / 2 + 4:.1f}" text-anchor="middle"'
                body.append(f'<text class="value{" strong" if share > 0.4 else ""}" {place}>{100 * share:.0f}</text>')
    about = f"Confusion matrix of {len(labels)} labels and {len(classes)} classes, in percent of each label's images."
    return svg(about, left + len(classes) * cell + right, top + len(labels) * cell + 4, body)


def _margins(labels: Sequence[str], classes: Sequence[str], *, cell: int) -> tuple[int, int, int]:
    """Room for the whole names left of the cells, above and right of them, where those of classes lean over."""
    left = max([_LEAST_LEFT, *(12 + text_width(name) for name in labels)])
    top = max([_LEAST_TOP, *(24 + math.sin(math.radians(_TURN)) * text_width(name) for name in classes)])
    lean = math.cos(math.radians(_TURN))
    ends = [lean * text_width(name) + 8 - (len(classes) - at - 0.5) * cell for at, name in enumerate(classes)]
    return math.ceil(left), math.ceil(top), math.ceil(max([_LEAST_RIGHT, *(end + 8 for end in ends)]))


def text_width(text: str) -> float:
    """Pixels of a name at most, in the fonts that pages are shown in."""
    return _TEXT_SIZE * sum(_width(one) for one in text)


def _width(character: str) -> float:
    """The text's width in em."""
    if unicodedata.combining(character):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF" or character in "MW@%mw…—":
        return 1.0
    return 0.78 if character.isupper() else 0.62

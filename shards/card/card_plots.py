"""The plots of a dataset's card as inline SVG: numbers in, markup out. Colours are the page's, by CSS class."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

WIDTH = 560
LEFT, RIGHT, BOTTOM, TOP = 58, 14, 46, 34
HEIGHT = 270
CURVE_POINTS = 400
SHADES = 8

# (value, label) pairs along an axis.
Ticks = Sequence[tuple[float, str]]


def rank_curve(counts: NDArray[np.int64]) -> Markup:
    """Samples per class, the largest class first: the long tail. `counts` is int64[num_classes]."""
    falling = np.sort(counts)[::-1]
    most, least = int(falling[0]), max(int(falling[falling > 0][-1]), 1)
    is_log = most >= 10 * least
    scale: Callable[[float], float] = (lambda n: math.log10(max(n, 0.7))) if is_log else float
    floor = scale(least / 1.3) if is_log else 0.0
    x = _axis(1, len(falling), LEFT, WIDTH - RIGHT)
    y = _axis(floor, scale(most) + (0.08 if is_log else 0.08 * most), HEIGHT - BOTTOM, TOP)
    ranks = np.unique(np.linspace(0, len(falling) - 1, CURVE_POINTS).round().astype(int)).tolist()
    ticks = _decades(least / 1.3, most) if is_log else _round_ticks(0, most)
    body = [
        *_grid_y(y, [(scale(value), label) for value, label in ticks]),
        _curve([(x(rank + 1), y(max(scale(int(falling[rank])), floor))) for rank in ranks]),
        *_ticks_x(x, _round_ticks(1, len(falling))),
        _axis_names("classes, largest first", "samples per class" + (" (log)" if is_log else "")),
    ]
    about = f"Samples per class, sorted: from {most:,} down to {int(falling[-1]):,} over {len(falling):,} classes."
    return _svg(about, HEIGHT, body)


def coverage(counts: NDArray[np.int64]) -> Markup:
    """The share of all labels that the largest classes have, by how many classes (log)."""
    rising = np.cumsum(np.sort(counts)[::-1])
    half = int(np.searchsorted(rising, rising[-1] / 2)) + 1
    x = _axis(0, math.log10(len(rising)), LEFT, WIDTH - RIGHT)
    y = _axis(0, 1.04, HEIGHT - BOTTOM, TOP)
    ranks = np.unique(np.geomspace(1, len(rising), CURVE_POINTS).round().astype(int)).tolist()
    decades = [(math.log10(value), label) for value, label in _decades(1, len(rising))]
    body = [
        *_grid_y(y, [(share / 100, f"{share} %") for share in (0, 25, 50, 75, 100)]),
        _curve([(x(math.log10(rank)), y(int(rising[rank - 1]) / int(rising[-1]))) for rank in ranks]),
        *_ticks_x(x, decades),
        _mark_x(x(math.log10(half)), f"half in {half:,}", is_left=half * half < len(rising)),
        _axis_names("largest classes (log)", "share of all labels"),
    ]
    about = f"Half of all labels are of the {half:,} largest of {len(rising):,} classes."
    return _svg(about, HEIGHT, body)


def histogram(
    counts: NDArray[np.int64],
    edges: tuple[float, float],
    *,
    ticks: Ticks,
    name: str,
    about: str,
    marks: Iterable[tuple[float, str]] = (),
) -> Markup:
    """Bars of equal width between two edges; `ticks` and `marks` are places on the same scale with their texts."""
    x = _axis(*edges, LEFT, WIDTH - RIGHT)
    y = _axis(0, max(int(counts.max()), 1) * 1.04, HEIGHT - BOTTOM, TOP)
    step = (edges[1] - edges[0]) / len(counts)
    bars = []
    for place, count in enumerate(counts.tolist()):
        if count:
            left, right = x(edges[0] + place * step), x(edges[0] + (place + 1) * step)
            tall = max(y(0) - y(count), 1.0)  # one image among millions is still visible
            bars.append(f"M{left:.1f} {y(0):.1f}v{-tall:.1f}h{max(right - left - 1, 0.6):.1f}v{tall:.1f}z")
    body = [
        *_grid_y(y, _round_ticks(0, int(counts.max()))),
        f'<path class="bar" d="{"".join(bars)}"/>',
        *_ticks_x(x, ticks),
        *(_mark_x(x(at), text, is_left=2 * at < sum(edges)) for at, text in marks),
        _axis_names(name, "images"),
    ]
    return _svg(about, HEIGHT, body)


def density(sides: NDArray[np.int64], *, steps: int, about: str) -> Markup:
    """Height against width on log axes, darker for more images (log), with both margins.

    `sides` is int64[height bin, width bin] with `steps` bins per octave, from 1 pixel.
    """
    used = np.flatnonzero(sides.any(axis=0) | sides.any(axis=1))
    low, high = max(int(used[0]) - 1, 0), min(int(used[-1]) + 2, len(sides))
    high = max(high, low + 2 * steps)
    shown = sides[low:high, low:high]
    side, margin, top = 400, 46, 82
    x, y = _axis(low, high, LEFT, LEFT + side), _axis(low, high, top + side, top)
    cell = side / (high - low)
    body = [f'<rect class="frame" x="{LEFT}" y="{top}" width="{side}" height="{side}"/>']
    for at, label in _side_ticks(low / steps, high / steps):
        at_x, at_y = x(at * steps), y(at * steps)
        body.append(f'<path class="grid" d="M{at_x:.1f} {top}v{side}M{LEFT} {at_y:.1f}h{side}"/>')
        body.append(f'<text class="tick" x="{at_x:.1f}" y="{top + side + 18}" text-anchor="middle">{label}</text>')
        body.append(f'<text class="tick" x="{LEFT - 8}" y="{at_y + 4:.1f}" text-anchor="end">{label}</text>')
    body.append(f'<path class="guide" d="M{LEFT} {top + side}L{LEFT + side} {top}"/>')
    body += _shaded(shown, lambda row, column: (x(low + column), y(low + row + 1)), cell)
    columns, rows = (margin / max(int(sums.max()), 1) * sums for sums in (shown.sum(axis=0), shown.sum(axis=1)))
    bars = [
        f"M{x(low + place):.1f} {top - 6}v{-tall:.1f}h{cell:.1f}v{tall:.1f}z"
        for place, tall in enumerate(columns.tolist())
        if tall
    ]
    bars += [
        f"M{LEFT + side + 6} {y(low + place):.1f}h{long:.1f}v{-cell:.1f}h{-long:.1f}z"
        for place, long in enumerate(rows.tolist())
        if long
    ]
    body.append(f'<path class="bar soft" d="{"".join(bars)}"/>')
    height = top + side + BOTTOM
    body.append(_axis_names("width in pixels", "height in pixels", height, right=LEFT + side))
    return _svg(about, height, body)


def heat_map(shares: NDArray[np.float64], names: Sequence[str], *, about: str) -> Markup:
    """A square of percentages, rows and columns by the same names; the diagonal is left empty."""
    count, cell, left, top = len(names), 28, 168, 128
    off_diagonal = shares[~np.eye(count, dtype=bool)]
    most = max(float(off_diagonal.max()), 1e-9) if off_diagonal.size else 1.0
    body = []
    for row, name in enumerate(names):
        at = top + row * cell
        body.append(f'<text class="name" x="{left - 8}" y="{at + 18}" text-anchor="end">{escape(name)}</text>')
        turned = f'transform="translate({left + row * cell + 18} {top - 8}) rotate(-55)"'
        body.append(f'<text class="name" {turned}>{escape(name)}</text>')
        for column, share in enumerate(shares[row].tolist()):
            box = f'x="{left + column * cell}" y="{at}" width="{cell - 1}" height="{cell - 1}"'
            if row == column:
                body.append(f'<rect class="none" {box}/>')
                continue
            opacity = math.sqrt(share / most)
            body.append(f'<rect class="cell" {box} fill-opacity="{0.04 + 0.96 * opacity:.2f}"/>')
            if share:
                style = "value strong" if opacity > 0.6 else "value"
                middle = f'x="{left + column * cell + 13.5}" y="{at + 18}" text-anchor="middle"'
                body.append(f'<text class="{style}" {middle}>{_percent(share)}</text>')
    return _svg(about, top + count * cell + 4, body, width=left + count * cell + 60)


def _percent(share: float) -> str:
    """A percentage in two or three characters; a few of many is never 0, and almost all is never 100."""
    if 0 < share < 0.01:
        return "&lt;1"
    return "&gt;99" if 0.99 < share < 1 else f"{100 * share:.0f}"


def byte_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round numbers of bytes between two base-2 logarithms."""
    octaves = high - low
    steps = (1,) if octaves > 12 else (1, 2, 5) if octaves > 3 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    units = (("B", 1), ("kB", 10**3), ("MB", 10**6), ("GB", 10**9))
    values = [(step * decade * size, f"{step * decade:g} {unit}")
              for unit, size in units for decade in (1, 10, 100) for step in steps]  # fmt: skip
    return [(math.log2(value), label) for value, label in values if low <= math.log2(value) <= high]


def aspect_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Usual ratios of width to height between two base-2 logarithms."""
    sides = ((1, 8), (1, 4), (1, 3), (1, 2), (2, 3), (1, 1), (3, 2), (2, 1), (3, 1), (4, 1), (8, 1))
    ticks = [(math.log2(width / height), f"{width}:{height}") for width, height in sides]
    return [tick for tick in ticks if low <= tick[0] <= high and (high - low < 7 or tick[1] not in ("2:3", "3:2"))]


def _axis(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    scale = (last - first) / (high - low or 1)
    return lambda value: first + (value - low) * scale


def _shaded(counts: NDArray[np.int64], corner: Callable[[int, int], tuple[float, float]], cell: float) -> list[str]:
    """One path per shade, since a rectangle for every cell would be most of the page."""
    strength = np.log1p(counts) / max(math.log1p(int(counts.max())), 1e-9)
    shade = np.ceil(strength * SHADES).astype(int)
    paths = []
    for level in range(1, SHADES + 1):
        cells = [corner(row, column) for row, column in np.argwhere(shade == level).tolist()]
        outline = "".join(f"M{px:.1f} {py:.1f}h{cell:.1f}v{cell:.1f}h{-cell:.1f}z" for px, py in cells)
        if outline:
            paths.append(f'<path class="cell" fill-opacity="{0.1 + 0.9 * level / SHADES:.2f}" d="{outline}"/>')
    return paths


def _side_ticks(low: float, high: float) -> list[tuple[float, str]]:
    step = 2 if high - low > 9 else 1
    return [(at, f"{2**at:,}") for at in range(math.ceil(low), math.floor(high) + 1, step)]


def _round_ticks(low: int, high: int) -> list[tuple[float, str]]:
    """Chooses at most five round whole numbers, `low` itself first if it is 1."""
    rough = max((high - low) / 4, 1)
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    values = range(0, high + 1, int(step))
    return [(value or low, f"{value or low:,}") for value in values if value == 0 or value >= low]


def _decades(low: float, high: int) -> list[tuple[float, str]]:
    values = [10**power for power in range(13) if low <= 10**power <= high]
    return [(value, f"{value:,}") for value in values]


def _grid_y(y: Callable[[float], float], ticks: Ticks) -> list[str]:
    return [
        f'<path class="grid" d="M{LEFT} {y(at):.1f}h{WIDTH - LEFT - RIGHT}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y(at) + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        for at, label in ticks
    ]


def _ticks_x(x: Callable[[float], float], ticks: Ticks) -> list[str]:
    base = HEIGHT - BOTTOM
    return [
        f'<path class="axis" d="M{x(at):.1f} {base}v4"/>'
        f'<text class="tick" x="{x(at):.1f}" y="{base + 18}" text-anchor="middle">{escape(label)}</text>'
        for at, label in ticks
    ] + [f'<path class="axis" d="M{LEFT} {base}H{WIDTH - RIGHT}"/>']


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """A line with the area below it."""
    line, base = " ".join(f"{px:.1f},{py:.1f}" for px, py in points), HEIGHT - BOTTOM
    area = f"{points[0][0]:.1f},{base} {line} {points[-1][0]:.1f},{base}"
    return f'<polygon class="area" points="{area}"/><polyline class="curve" points="{line}"/>'


def _mark_x(at: float, text: str, *, is_left: bool) -> str:
    """A dashed line with its text on the side that has room."""
    shift, anchor = (6, "start") if is_left else (-6, "end")
    line = f'<path class="mark" d="M{at:.1f} {TOP - 12}V{HEIGHT - BOTTOM}"/>'
    return f'{line}<text class="marked" x="{at + shift:.1f}" y="{TOP - 4}" text-anchor="{anchor}">{escape(text)}</text>'


def _axis_names(horizontal: str, vertical: str, height: int = HEIGHT, *, right: int = WIDTH - RIGHT) -> str:
    return (
        f'<text class="axis-name" x="{right}" y="{height - 6}" text-anchor="end">{escape(horizontal)}</text>'
        f'<text class="axis-name" x="4" y="13">{escape(vertical)}</text>'
    )


def _svg(about: str, height: int, body: Iterable[str], *, width: int = WIDTH) -> Markup:
    # every text in `body` is either made here or was escaped when it was put in
    drawn = "".join(body)
    return Markup(  # noqa: S704
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(about)}"'
        f' style="max-width:{width * 1.15:.0f}px">{drawn}</svg>'
    )

"""Draws the plots of a dataset's card: its classes, and the sizes and labels of its images."""

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from shards.card.tally import ASPECT_OCTAVES, ASPECT_STEPS, BYTE_STEPS, SIDE_STEPS, Tally, quantile
from shards.output.quantities import percent, share, size
from shards.pages.page import BOTTOM, LEFT, WIDTH, Axis, Frame, Ticks, labelled, log_ticks, matrix, svg, ticks

CURVE_POINTS = 400
SHADES = 8


def rank_curve(counts: NDArray[np.int64]) -> Markup:
    """Draws the samples per class, with the largest class first, which shows a long tail. `counts`:
    int64[num_classes]."""
    falling = np.sort(counts)[::-1]
    most, least, num_classes = int(falling[0]), int(falling[falling > 0][-1]), len(falling)
    is_log = most >= 10 * least
    floor = least / 1.3 if is_log else 0.0
    frame = Frame(
        x=Axis(name="classes, largest first", low=1, high=num_classes, ticks=_from_one(num_classes)),
        y=Axis(
            name="samples per class",
            low=floor,
            high=1.2 * most if is_log else 1.08 * most,
            ticks=labelled(log_ticks(least, most) if is_log else ticks(0, most, is_whole=True)),
            is_log=is_log,
        ),
    )
    ranks = np.unique(np.linspace(0, num_classes - 1, CURVE_POINTS).round().astype(int)).tolist()
    line = frame.line(((rank + 1, max(int(falling[rank]), floor)) for rank in ranks), has_area=True)
    about = f"Samples per class, sorted: from {most:,} down to {int(falling[-1]):,} over {num_classes:,} classes."
    return frame.svg(about, [line])


def _from_one(last: int) -> Ticks:
    return labelled(max(at, 1) for at in ticks(0, last, is_whole=True))


def coverage(counts: NDArray[np.int64]) -> Markup:
    """Draws the share of all labels that belong to the n largest classes, against n."""
    rising = np.cumsum(np.sort(counts)[::-1])
    num_classes, num_labels = len(rising), int(rising[-1])
    half = int(np.searchsorted(rising, num_labels / 2)) + 1
    frame = Frame(
        x=Axis(name="largest classes", low=1, high=num_classes, ticks=labelled(log_ticks(1, num_classes)), is_log=True),
        y=Axis(name="share of all labels", low=0, high=1.04, ticks=labelled((0, 0.25, 0.5, 0.75, 1), percent)),
    )
    ranks = np.unique(np.geomspace(1, num_classes, CURVE_POINTS).round().astype(int)).tolist()
    line = frame.line(((rank, int(rising[rank - 1]) / num_labels) for rank in ranks), has_area=True)
    about = f"Half of all labels are of the {half:,} largest of {num_classes:,} classes."
    return frame.svg(about, [line, frame.mark(half, f"half in {half:,}")])


def byte_sizes(tally: Tally) -> Markup:
    """Draws the histogram of bytes per image, on a log axis."""
    used = np.flatnonzero(tally.byte_sizes)
    # a bar is two bins of 1/16 octave; the axis has at least 1.5 octaves
    first = int(used[0]) // 2 * 2 - 4
    last = max(int(used[-1]) // 2 * 2 + 6, first + 3 * BYTE_STEPS // 2)
    first = max(first, 0)
    bars = tally.byte_sizes[first : first + (last - first) // 2 * 2].reshape(-1, 2).sum(axis=1)
    low, high = first / BYTE_STEPS, (first + 2 * len(bars)) / BYTE_STEPS
    median = quantile(tally.byte_sizes, 0.5) / BYTE_STEPS
    least, most = map(size, tally.bytes_range)
    x = Axis(name="bytes per image (log scale)", low=low, high=high, ticks=byte_ticks(low, high))
    about = f"Bytes per image: from {least} to {most}, median about {size(2**median)}."
    return histogram(bars, x, about=about, marks=[(median, f"median {size(2**median)}")])


def aspects(tally: Tally) -> Markup:
    """Draws the histogram of the ratio of width to height, on a log axis."""
    middle = ASPECT_OCTAVES // 2 * ASPECT_STEPS
    used = np.flatnonzero(tally.aspects)
    reach = min(max(middle - int(used[0]), int(used[-1]) - middle, ASPECT_STEPS) + 2, middle - 1)
    edge = (reach + 0.5) / ASPECT_STEPS
    wide, square = int(tally.aspects[middle + 1 :].sum()), int(tally.aspects[middle])
    total = tally.num_images
    texts = share(wide, total), share(square, total), share(total - wide - square, total)
    about = "Width to height: {} wide, {} square or nearly, {} tall.".format(*texts)
    x = Axis(name="width : height (log scale)", low=-edge, high=edge, ticks=aspect_ticks(-edge, edge))
    return histogram(tally.aspects[middle - reach : middle + reach + 1], x, about=about)


def histogram(counts: NDArray[np.int64], x: Axis, *, about: str, marks: Sequence[tuple[float, str]] = ()) -> Markup:
    """Draws bars of equal width over the whole axis. `marks`: places on the axis, with their texts."""
    most = int(counts.max())
    y = Axis(name="images", low=0, high=1.04 * max(most, 1), ticks=labelled(ticks(0, most, is_whole=True)))
    frame, step = Frame(x=x, y=y), (x.high - x.low) / len(counts)
    base, bars = frame.down(0), []
    for place, count in enumerate(counts.tolist()):
        if count:
            left, right = (frame.across(x.low + edge * step) for edge in (place, place + 1))
            tall = max(base - frame.down(count), 1.0)  # one image among millions is still visible
            bars.append(f"M{left:.1f} {base:.1f}v{-tall:.1f}h{max(right - left - 1, 0.6):.1f}v{tall:.1f}z")
    return frame.svg(about, [f'<path class="bar" d="{"".join(bars)}"/>', *(frame.mark(at, text) for at, text in marks)])


def byte_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Returns round numbers of bytes between two base-2 logarithms, with their labels."""
    octaves = high - low
    steps = (1,) if octaves > 12 else (1, 2, 5) if octaves > 3 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    units = (("B", 1), ("kB", 10**3), ("MB", 10**6), ("GB", 10**9))
    values = [(step * decade * unit, f"{step * decade:g} {name}")
              for name, unit in units for decade in (1, 10, 100) for step in steps]  # fmt: skip
    return [(math.log2(value), label) for value, label in values if low <= math.log2(value) <= high]


def aspect_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Returns common ratios of width to height between two base-2 logarithms, with their labels."""
    sides = ((1, 8), (1, 4), (1, 3), (1, 2), (2, 3), (1, 1), (3, 2), (2, 1), (3, 1), (4, 1), (8, 1))
    found = [(math.log2(width / height), f"{width}:{height}") for width, height in sides]
    return [tick for tick in found if low <= tick[0] <= high and (high - low < 7 or tick[1] not in ("2:3", "3:2"))]


def resolution(tally: Tally) -> Markup:
    """Draws height against width on log axes, with a darker cell for more images, and the histogram of each side."""
    height, width = np.flatnonzero(tally.sides.any(axis=1)), np.flatnonzero(tally.sides.any(axis=0))
    spans = [
        f"{2 ** (int(used[0]) / SIDE_STEPS):.0f} to {2 ** ((int(used[-1]) + 1) / SIDE_STEPS):.0f}"
        for used in (width, height)
    ]
    about = f"Sizes of the images: width from about {spans[0]}, height from about {spans[1]} pixels."
    return density(tally.sides, about=about)


def density(sides: NDArray[np.int64], *, about: str) -> Markup:
    """Draws how many images have each height and width. `sides`: int64[height bin, width bin], with SIDE_STEPS bins per
    octave, from 1 pixel."""
    used = np.flatnonzero(sides.any(axis=0) | sides.any(axis=1))
    low, high = max(int(used[0]) - 1, 0), min(int(used[-1]) + 2, len(sides))
    high = max(high, low + 2 * SIDE_STEPS)
    shown = sides[low:high, low:high]
    side, margin, top = 400, 46, 82
    cell, right, base = side / (high - low), LEFT + side, top + side
    body = [f'<rect class="frame" x="{LEFT}" y="{top}" width="{side}" height="{side}"/>']
    for octave in _octaves(low / SIDE_STEPS, high / SIDE_STEPS):
        at, label = (octave * SIDE_STEPS - low) * cell, f"{2**octave:,}"
        body.append(f'<path class="grid" d="M{LEFT + at:.1f} {top}v{side}M{LEFT} {base - at:.1f}h{side}"/>')
        body.append(f'<text x="{LEFT + at:.1f}" y="{base + 18}" text-anchor="middle">{label}</text>')
        body.append(f'<text x="{LEFT - 8}" y="{base - at + 4:.1f}" text-anchor="end">{label}</text>')
    body.append(f'<path class="guide" d="M{LEFT} {base}L{right} {top}"/>')
    body += _shaded(shown, base=base, cell=cell)
    columns, rows = (margin / max(int(sums.max()), 1) * sums for sums in (shown.sum(axis=0), shown.sum(axis=1)))
    bars = [
        f"M{LEFT + place * cell:.1f} {top - 6}v{-tall:.1f}h{cell:.1f}v{tall:.1f}z"
        for place, tall in enumerate(columns.tolist())
        if tall
    ]
    bars += [
        f"M{right + 6} {base - place * cell:.1f}h{long:.1f}v{-cell:.1f}h{-long:.1f}z"
        for place, long in enumerate(rows.tolist())
        if long
    ]
    body.append(f'<path class="bar soft" d="{"".join(bars)}"/>')
    body.append(f'<text x="{right}" y="{base + BOTTOM - 6}" text-anchor="end">width in pixels</text>')
    body.append('<text x="4" y="13">height in pixels</text>')
    return svg(about, WIDTH, base + BOTTOM, body)


def _octaves(low: float, high: float) -> range:
    return range(math.ceil(low), math.floor(high) + 1, 2 if high - low > 9 else 1)


def _shaded(counts: NDArray[np.int64], *, base: int, cell: float) -> list[str]:
    """Returns one path per shade, since a rectangle for every cell would make the page much larger."""
    strength = np.log1p(counts) / max(math.log1p(int(counts.max())), 1e-9)
    shade = np.ceil(strength * SHADES).astype(int)
    paths = []
    for level in range(1, SHADES + 1):
        outline = "".join(
            f"M{LEFT + column * cell:.1f} {base - (row + 1) * cell:.1f}h{cell:.1f}v{cell:.1f}h{-cell:.1f}z"
            for row, column in np.argwhere(shade == level).tolist()
        )
        if outline:
            paths.append(f'<path class="cell" fill-opacity="{0.1 + 0.9 * level / SHADES:.2f}" d="{outline}"/>')
    return paths


def together(tally: Tally, names: Sequence[str]) -> Markup:
    """Draws a matrix: the percentage of the samples with the row's label that also have the column's label. `names`:
    the names of the top classes."""
    shares = tally.together / np.maximum(np.diag(tally.together), 1)[:, None]
    about = f"How often the {len(names)} most frequent labels occur together."
    return matrix(
        shares.tolist(), names, names, style=lambda row, column: "none" if row == column else "cell", about=about
    )

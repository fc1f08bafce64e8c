"""Draws docs/order.svg from the real sample order of a dataset that is small enough to show whole."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from shards.order import SampleOrder, WindowId

NUM_BLOCKS, SAMPLES_A_BLOCK = 8, 4
LANES, WINDOW_BLOCKS, SEED = 2, 2, 4
BATCH, STEPS, RANKS = 6, 6, (1, 2, 3)

WIDTH, HEIGHT = 800, 548  # as in the SVG
WORDS, SMALL = 18, 15  # sizes of text, which a telephone shows at half of them
CELL, LEFT, RIGHT = 21.5, 20.0, 780.0
BATCH_CELL, BATCH_LEFT = 18.4, 44.0
BATCH_WIDTH = BATCH * BATCH_CELL + 4  # with a gap of 4 between its lanes
ROWS = {"packed": 44.0, "permuted": 136.0, "shuffled": 240.0, "batch": 358.0}  # upper edges of the cells
# Colours that the usual kinds of colour blindness tell apart: Okabe and Ito, "Color Universal Design", 2008.
COLOURS = ("#e69f00", "#56b4e9", "#f0e442", "#2b2b2b", "#cc79a7", "#d55e00", "#0072b2", "#009e73")
WHITE_TEXT_ON = ("#0072b2", "#2b2b2b")
INK, FAINT = "#101820", "#44546a"


@dataclass(frozen=True, kw_only=True)
class Example:
    """The data of the figure's rows, from top to bottom."""

    packed: list[list[int]]  # block -> sample ids
    permuted: list[list[list[int]]]  # window of the epoch -> its blocks, in permuted order -> sample ids
    shuffled: list[list[int]]  # window -> sample ids
    batches: list[list[int]]  # step -> sample ids
    epochs: list[list[int]]  # step -> the epoch of each


def example() -> Example:
    """The order of 32 samples in 8 blocks: 2 lanes, windows of 2 blocks, batches of 6."""
    sizes = np.full(NUM_BLOCKS, SAMPLES_A_BLOCK, dtype=np.int64)
    order = SampleOrder(sizes, seed=SEED, lanes=LANES, window_blocks=WINDOW_BLOCKS)
    windows = [
        WindowId(epoch=0, lane=lane, window=window)
        for lane in range(LANES)
        for window in range(NUM_BLOCKS // (LANES * WINDOW_BLOCKS))
    ]
    slices = [order.window_slices(window) for window in windows]
    positions = [order.positions(step, BATCH, 0, 1) for step in range(STEPS)]
    return Example(
        packed=np.arange(order.num_samples).reshape(NUM_BLOCKS, SAMPLES_A_BLOCK).tolist(),
        permuted=[
            [list(range(one.first_sample_id, one.first_sample_id + one.num_samples)) for one in blocks]
            for blocks in slices
        ],
        shuffled=[order.window_samples(window).tolist() for window in windows],
        batches=[order.at(one).tolist() for one in positions],
        epochs=[(one // order.num_samples).tolist() for one in positions],
    )


def draw(shown: Example, path: Path) -> None:
    """Writes the same file for the same order and version of matplotlib."""
    mpl.rcParams.update({"svg.hashsalt": "order", "svg.fonttype": "none"})
    mpl.rcParams["font.sans-serif"] = ["DejaVu Sans", "Helvetica", "Arial", "sans-serif"]
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.set_axis_off()
    headings = {
        "packed": "As packed: 8 blocks of 4 samples, each one range read of its tar.",
        "permuted": "Each epoch permutes the blocks: 2 lanes, each with windows of 2 blocks.",
        "shuffled": "The samples of each window are shuffled.",
        "batch": "Each batch of 6 takes 3 samples of each lane; the last reaches epoch 1.",
    }
    for number, (row, text) in enumerate(headings.items(), start=1):
        _say(axes, LEFT, ROWS[row] - 24, f"{number}  {text}")
    _draw_blocks(axes, shown)
    _draw_batches(axes, shown)
    _draw_ranks(axes)
    legend = "Colour: block. Number: sample. Dashed: epoch 1, with its own permutations."
    _say(axes, BATCH_LEFT, HEIGHT - 18, legend, size=SMALL)
    figure.savefig(path, format="svg", metadata={"Date": None, "Title": "The sample order, from shards to ranks"})


def _draw_blocks(axes: Any, shown: Example) -> None:
    """Rows 1 to 3, with bands that follow each block."""
    gap = (RIGHT - LEFT - 32 * CELL) / (NUM_BLOCKS - 1)
    before = [LEFT + block * (SAMPLES_A_BLOCK * CELL + gap) for block in range(NUM_BLOCKS)]
    for x, block in zip(before, shown.packed, strict=True):
        _cells(axes, x, ROWS["packed"], block, gid=f"packed-{_block(block[0])}")
    for window, (x, blocks) in enumerate(zip(_window_lefts(), shown.permuted, strict=True)):
        width = SAMPLES_A_BLOCK * CELL
        for place, block in enumerate(blocks):
            left = x + place * (width + 4)
            _cells(axes, left, ROWS["permuted"], block, gid=f"permuted-{window}-{place}")
            start = before[_block(block[0])]
            colour = COLOURS[_block(block[0])]
            _band(axes, (start, width, ROWS["packed"] + CELL), (left, width, ROWS["permuted"]), colour, alpha=0.35)
        whole = WINDOW_BLOCKS * width + 4
        lower = (x + 2, whole - 4, ROWS["shuffled"])
        _band(axes, (x, whole, ROWS["permuted"] + CELL), lower, FAINT, alpha=0.12)
        lane, number = divmod(window, len(shown.permuted) // LANES)
        middle = (ROWS["permuted"] + CELL + ROWS["shuffled"] - 24) / 2
        _say(axes, x + whole / 2, middle, f"lane {lane}, window {number}", anchor="center")
        _cells(axes, x + 2, ROWS["shuffled"], shown.shuffled[window], gid=f"shuffled-{window}")


def _batch_left(step: int) -> float:
    gap = (RIGHT - BATCH_LEFT - STEPS * BATCH_WIDTH) / (STEPS - 1)
    return BATCH_LEFT + step * (BATCH_WIDTH + gap)


def _draw_batches(axes: Any, shown: Example) -> None:
    """Row 4 with the bands from row 3."""
    share = BATCH // LANES
    top = ROWS["batch"]
    for step, (ids, epochs) in enumerate(zip(shown.batches, shown.epochs, strict=True)):
        left = _batch_left(step)
        for entry in range(BATCH):
            lane, member = divmod(entry, share)
            cell_left = left + lane * (share * BATCH_CELL + 4) + member * BATCH_CELL
            is_next = epochs[entry] > 0
            _cell(axes, (cell_left, top), BATCH_CELL, ids[entry], gid=f"batch-{step}-{entry}", dashed=is_next)
            if not is_next:
                upper = (_shuffled_left(lane, step * share + member), CELL, ROWS["shuffled"] + CELL)
                _band(axes, upper, (cell_left, BATCH_CELL, top), FAINT, alpha=0.16)
        _say(axes, left + BATCH_WIDTH / 2, top + BATCH_CELL + 13, f"batch {step}", anchor="center")


def _draw_ranks(axes: Any) -> None:
    """Each rank's slice of the batches above, for several numbers of ranks."""
    top = ROWS["batch"]
    _say(axes, LEFT, top + 62, "5  Ranks take equal slices of each batch: the same batch for all R.")
    for line, num_ranks in enumerate(RANKS):
        y = top + 80 + line * 27
        _say(axes, LEFT - 14, y + 10, f"R={num_ranks}", size=SMALL)
        for step in range(STEPS):
            for rank in range(num_ranks):
                x = _batch_left(step) + rank * BATCH_WIDTH / num_ranks
                width = BATCH_WIDTH / num_ranks - 2
                box = Rectangle((x + 1, y), width, 20, facecolor="#eef2f7", edgecolor=FAINT, linewidth=0.8)
                axes.add_patch(box)
                text = f"rank {rank}" if width > 50 else f"{rank}"
                _say(axes, x + 1 + width / 2, y + 10, text, size=SMALL, anchor="center")


def _block(sample_id: int) -> int:
    return sample_id // SAMPLES_A_BLOCK


def _window_lefts() -> list[float]:
    """Left edges of the windows in rows 2 and 3; the gap between lanes is wider than within a lane."""
    whole = WINDOW_BLOCKS * SAMPLES_A_BLOCK * CELL + 4
    a_lane = NUM_BLOCKS // (LANES * WINDOW_BLOCKS)
    inner = 10.0
    outer = (RIGHT - LEFT - LANES * (a_lane * whole + (a_lane - 1) * inner)) / (LANES - 1)
    lane_width = a_lane * whole + (a_lane - 1) * inner
    return [
        LEFT + lane * (lane_width + outer) + window * (whole + inner)
        for lane in range(LANES)
        for window in range(a_lane)
    ]


def _shuffled_left(lane: int, index: int) -> float:
    """Left edge, in row 3, of a lane's sample `index`."""
    window, place = divmod(index, WINDOW_BLOCKS * SAMPLES_A_BLOCK)
    return _window_lefts()[lane * (NUM_BLOCKS // (LANES * WINDOW_BLOCKS)) + window] + 2 + place * CELL


def _cells(axes: Any, x: float, y: float, ids: list[int], *, gid: str) -> None:
    for place, sample_id in enumerate(ids):
        _cell(axes, (x + place * CELL, y), CELL, sample_id, gid=f"{gid}-{place}")


def _cell(axes: Any, at: tuple[float, float], size: float, sample_id: int, *, gid: str, dashed: bool = False) -> None:
    colour = COLOURS[_block(sample_id)]
    inset = 1.0 if dashed else 0.0
    box = Rectangle((at[0] + inset, at[1] + inset), size - 2 * inset, size - 2 * inset, facecolor=colour)
    box.set(edgecolor=INK if dashed else "white", linewidth=1.6 if dashed else 0.8)
    box.set_linestyle((0, (2.2, 1.4)) if dashed else "-")
    axes.add_patch(box)
    ink = "white" if colour in WHITE_TEXT_ON else INK
    text = axes.text(at[0] + size / 2, at[1] + size / 2, str(sample_id), color=ink, fontsize=0.7 * size, ha="center")
    text.set(va="center_baseline", gid=gid)


def _band(
    axes: Any, upper: tuple[float, float, float], lower: tuple[float, float, float], colour: str, *, alpha: float
) -> None:
    """A band behind everything from one row to the next; each end is (left, width, y)."""
    (x0, width0, y0), (x1, width1, y1) = upper, lower
    corners = [(x0, y0), (x0 + width0, y0), (x1 + width1, y1), (x1, y1)]
    axes.add_patch(Polygon(corners, closed=True, facecolor=colour, alpha=alpha, linewidth=0, zorder=0))


def _say(axes: Any, x: float, y: float, text: str, *, size: float = WORDS, anchor: str = "left") -> None:
    said = axes.text(x, y, text, color=INK, fontsize=size, ha=anchor, va="center_baseline")
    if anchor == "left":  # bands run behind the headings
        said.set_bbox({"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 2})

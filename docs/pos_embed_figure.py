"""Draws docs/pos_embed.svg: a smooth table of position embeddings, resampled by each of the three modes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pipeline.models.config import Mode
from pipeline.models.positions import resample_position_embeddings

FROM, TO = (14, 14), (24, 24)  # B/16 from 224 to 384 px
MODES: tuple[Mode, ...] = ("paper", "bicubic", "timm")
PAIRS: tuple[tuple[Mode, Mode], ...] = (("bicubic", "paper"), ("timm", "paper"), ("timm", "bicubic"))
ROW = 0  # of the maps, shown as curves

WIDTH, HEIGHT, SIDE = 800, 736, 166.0  # as in the SVG
TOPS = {"tables": 62.0, "differences": 298.0, "curves": 566.0}
WORDS, SMALL = 18, 15  # sizes of text, which a telephone shows at half of them
LEFTS = (20.0, 218.0, 416.0, 614.0)
INK = "#101820"
WHY = """paper: corner
patches stay in the
corners, so all others
shift a little

bicubic, timm: each
patch keeps its place
in the image"""
# Okabe and Ito's colours; dashes and markers for readers who cannot tell them apart.
STROKES = {"paper": ("#0072b2", "-", "o"), "bicubic": ("#d55e00", "--", "s"), "timm": ("#009e73", ":", "^")}
Map = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One column of a table as a map [height, width], and its resampled maps by mode."""

    table: Map
    resampled: dict[Mode, Map]

    def difference(self, one: Mode, other: Mode) -> Map:
        """One mode's map minus another's."""
        return self.resampled[one] - self.resampled[other]

    def says(self, one: Mode, other: Mode) -> str:
        """The largest difference and the RMS difference, relative to the table's RMS."""
        apart, scale = self.difference(one, other), math.sqrt(float((self.table**2).mean()))
        return f"max {100 * np.abs(apart).max() / scale:.1f} %, RMS {100 * math.sqrt((apart**2).mean()) / scale:.1f} %"


def example() -> Example:
    """A smooth column: a wave with two thirds of a period down and one and a half across."""
    down, across = (np.linspace(0.0, 1.0, size) for size in FROM)
    table = np.cos(2 * math.pi * (0.67 * down + 0.1))[:, None] * np.cos(2 * math.pi * (1.5 * across + 0.15))[None]
    table_ND = torch.from_numpy(table).reshape(-1, 1)
    made = {
        mode: resample_position_embeddings(table_ND, from_grid=FROM, to_grid=TO, mode=mode, num_prefix_tokens=0)
        for mode in MODES
    }
    return Example(table=table, resampled={mode: map_ND.double().reshape(TO).numpy() for mode, map_ND in made.items()})


def draw(shown: Example, path: Path) -> None:
    """Writes the same file for the same maps and version of matplotlib."""
    mpl.rcParams.update({"svg.hashsalt": "pos_embed", "svg.fonttype": "none"})
    mpl.rcParams["font.sans-serif"] = ["DejaVu Sans", "Helvetica", "Arial", "sans-serif"]
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), facecolor="white")
    _say(figure, 16, "1  One column of a table of positions, resampled from 14 x 14 to 24 x 24.")
    _map(figure, (LEFTS[0], TOPS["tables"]), shown.table, scale=1.0, title="the table, 14 x 14")
    for left, mode in zip(LEFTS[1:], MODES, strict=True):
        _map(figure, (left, TOPS["tables"]), shown.resampled[mode], scale=1.0, title=f"{mode}, 24 x 24")
    _say(
        figure,
        252,
        "2  Differences, relative to the table's RMS; colours five times as strong.",
    )
    figure.text(
        LEFTS[0] / WIDTH, 1 - (TOPS["differences"] + SIDE / 2) / HEIGHT, WHY, color=INK, fontsize=SMALL, va="center"
    )
    for left, (one, other) in zip(LEFTS[1:], PAIRS, strict=True):
        axes = _map(
            figure, (left, TOPS["differences"]), shown.difference(one, other), scale=0.2, title=f"{one} - {other}"
        )
        said = axes.text(0.5, -0.06, shown.says(one, other), transform=axes.transAxes, color=INK, fontsize=SMALL)
        said.set(ha="center", va="top", gid=f"apart-{one}-{other}")
    _curves(figure, shown)
    figure.savefig(path, format="svg", metadata={"Date": None, "Title": "Position embeddings for a larger grid"})


def _map(figure: Any, at: tuple[float, float], values: Map, *, scale: float, title: str) -> Any:
    axes = _axes(figure, (*at, SIDE, SIDE))
    axes.imshow(values, cmap="PuOr", vmin=-scale, vmax=scale, interpolation="none")
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=SMALL, color=INK, pad=5)
    return axes


def _curves(figure: Any, shown: Example) -> None:
    """The first row of each map, against the position of its patches in the image."""
    _say(figure, 514, "3  The first row of each map, by position in the image.")
    axes = _axes(figure, (LEFTS[0], TOPS["curves"], WIDTH - 2 * LEFTS[0], HEIGHT - TOPS["curves"] - 34))
    axes.plot(
        _places(FROM[1]), shown.table[ROW], color=INK, marker="D", markersize=6, linestyle="none", label="the table"
    )
    for mode in MODES:
        colour, dashes, mark = STROKES[mode]
        (line,) = axes.plot(_places(TO[1]), shown.resampled[mode][ROW], color=colour, linestyle=dashes, label=mode)
        line.set(gid=f"curve-{mode}", linewidth=1.6, marker=mark, markersize=3.5)
    axes.set(xlim=(0, 1), yticks=[], xticks=[0, 0.25, 0.5, 0.75, 1.0])
    axes.set_xticklabels(["left edge", "1/4", "1/2", "3/4", "right edge"], fontsize=SMALL, color=INK)
    for label, anchor in zip(axes.get_xticklabels(), ("left", "center", "center", "center", "right"), strict=True):
        label.set_ha(anchor)
    axes.legend(
        fontsize=SMALL, ncols=4, loc="lower right", bbox_to_anchor=(1.01, 0.97), frameon=False, columnspacing=1.2
    )


def _places(count: int) -> Map:
    """The centres of `count` patches, as fractions of the image's width."""
    return (np.arange(count) + 0.5) / count


def _axes(figure: Any, box: tuple[float, float, float, float]) -> Any:
    """Axes at (left, top, width, height)."""
    left, top, width, height = box
    return figure.add_axes((left / WIDTH, 1 - (top + height) / HEIGHT, width / WIDTH, height / HEIGHT))


def _say(figure: Any, y: float, text: str) -> None:
    figure.text(LEFTS[0] / WIDTH, 1 - y / HEIGHT, text, color=INK, fontsize=WORDS, va="center_baseline")

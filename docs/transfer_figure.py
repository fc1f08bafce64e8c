"""Draws docs/transfer_curves.svg from the results of benchmarks/transfer_curves.py.

python -m docs.transfer_figure
"""

import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "transfer_curves.json"
INK = "#101820"
# Okabe and Ito, "Color Universal Design", 2008; each with a line of its own.
LINES = (("#0072b2", "-"), ("#d55e00", "--"), ("#2b2b2b", ":"), ("#cc79a7", "-."))
TITLES = {"48 px": "Fine-tuned at 48 px", "all labels": "32 px, all labels"}


def draw(results: dict[str, Any], path: Path) -> None:
    """Writes the SVG: a panel for each comparison, the share of right test images over the steps."""
    mpl.rcParams.update({"svg.hashsalt": "patchline", "svg.fonttype": "none", "font.family": "sans-serif"})
    panels = list(dict.fromkeys(run["panel"] for run in results["runs"] if run["panel"]))
    top = 10 * math.ceil(10 * max(value for run in results["runs"] if run["panel"] for value in run["accuracy"]))
    figure = Figure(figsize=(10.0, 3.4), facecolor="white")
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, [run for run in results["runs"] if run["panel"] == panel], top=top)
        axes.set_title(TITLES.get(panel, f"32 px, {panel}"), fontsize=11, color=INK, loc="left")
    figure.axes[0].set_ylabel("test accuracy, %", fontsize=10, color=INK)
    figure.subplots_adjust(left=0.06, right=0.99, bottom=0.15, top=0.91, wspace=0.08)
    figure.savefig(path, format="svg", metadata={"Date": None, "Title": "Test accuracy on CIFAR-10"})


def _draw_panel(axes: Axes, runs: list[dict[str, Any]], *, top: int) -> None:
    for run, (colour, style) in zip(runs, LINES, strict=False):
        percent = [100 * one for one in run["accuracy"]]
        axes.plot(run["steps"], percent, color=colour, linestyle=style, linewidth=1.8, label=run["label"])
    axes.set(xlim=(0, None), ylim=(0, top))
    axes.set_xlabel("step", fontsize=10, color=INK, labelpad=2)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color="#d5dbe3", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right", labelcolor=INK)


if __name__ == "__main__":
    draw(json.loads(RESULTS.read_text()), Path(__file__).with_name("transfer_curves.svg"))

"""Draws docs/plain.svg from runs of plain ViT recipes, and writes their curves to benchmarks/results/plain.json.

python -m docs.plain_figure cifar10=RUN photographs=RUN
"""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from pipeline.training.reporting.metrics import read_metrics

INK, FAINT, BLUE, ORANGE = "#101820", "#64748b", "#0072b2", "#d55e00"
_WINDOW = 10
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "plain.json"


def curves_of(run: Path) -> dict[str, Any]:
    """The steps of a finished run, its training loss by epoch, and its test accuracy and loss by epoch."""
    lines = read_metrics(run)
    done = json.loads((run / "DONE").read_text())
    scores = [line for line in lines if "test_accuracy" in line]
    return {
        "steps": done["step"],
        "loss": [[round(line["epoch"], 3), round(line["loss"], 4)] for line in lines if "loss" in line],
        "test": [[round(line["epoch"], 3), line["test_accuracy"], round(line["test_loss"], 4)] for line in scores],
    }


def draw(curves: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes the SVG: a panel for each run, with its training loss, the mean of it over 10 lines of metrics, and on the
    right axis its test accuracy."""
    mpl.rcParams.update({"svg.hashsalt": "patchline", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure = Figure(figsize=(4.4 * len(curves), 2.9), facecolor="white")
    for number, (name, found) in enumerate(curves.items()):
        axes = figure.add_subplot(1, len(curves), number + 1)
        epochs, losses = zip(*found["loss"], strict=True)
        axes.plot(epochs, losses, color=BLUE, linewidth=0.8, alpha=0.35)
        means = np.convolve(losses, np.ones(_WINDOW) / _WINDOW, mode="valid")
        axes.plot(epochs[_WINDOW // 2 :][: len(means)], means, color=BLUE, linewidth=1.5)
        axes.set_title(name, fontsize=11, color=INK, loc="left")
        axes.set_xlabel("epoch", fontsize=10, color=INK, labelpad=2)
        axes.set_ylabel("training loss", fontsize=10, color=BLUE)
        axes.tick_params(colors=INK, labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        if len(found["test"]) > 1:
            right = axes.twinx()
            at, accuracies, _ = zip(*found["test"], strict=True)
            right.plot(at, [100 * each for each in accuracies], color=ORANGE, marker="o", markersize=3, linewidth=1.2)
            right.set_ylabel("test accuracy, %", fontsize=10, color=ORANGE)
            right.set_ylim(0, None)
            right.tick_params(colors=INK, labelsize=9)
            right.spines[["top"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(
        path, format="svg", metadata={"Date": None, "Title": "Plain ViT recipes on CIFAR-10 and photographs"}
    )


def main() -> None:
    """Reads the runs, writes the results and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="NAME=RUN")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("plain.svg"))
    arguments = parser.parse_args()
    pairs = [one.partition("=") for one in arguments.runs]
    curves = {name: curves_of(Path(run)) for name, _, run in pairs}
    command = shlex.join(["python", "-m", "docs.plain_figure", *arguments.runs])
    RESULTS.write_text(json.dumps({"command": command, "curves": curves}) + "\n")
    draw(curves, arguments.out)


if __name__ == "__main__":
    main()

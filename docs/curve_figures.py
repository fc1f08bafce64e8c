"""Draws the pictures of curves: docs/loss.svg from two runs, and the others from committed results of benchmarks.

python -m docs.curve_figures cifar10=RUN photographs=RUN    # keeps the runs' curves in benchmarks/results/plain.json

`python -m docs.pictures` draws them all. Every picture is six inches wide, so that its text can be read at the width of
a telephone.
"""

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.small_studies import TOKENS, small
from pipeline.planning.step_time import flops_of_steps
from pipeline.training.reporting.metrics import read_metrics
from shards.images.config import DEFAULT_MAX_DISTANCE

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
WIDTH, PANEL_HEIGHT = 6.0, 2.7  # inches
INK, FAINT, GRID = "#101820", "#64748b", "#d5dbe3"
# Okabe and Ito, "Color Universal Design", 2008; each with a line of its own.
BLUE, ORANGE, BLACK, PINK = "#0072b2", "#d55e00", "#2b2b2b", "#cc79a7"
LINES = ((BLUE, "-"), (ORANGE, "--"), (BLACK, ":"), (PINK, "-."), ("#009e73", "-"), ("#e69f00", "--"), (FAINT, "-"))
COPIES = (
    "JPEG quality 30",
    "15 % brighter",
    "crop 0 to 5 % at random",
    "crop 5 % each side",
    "crop 5 % left",
    "crop 5 % left and top",
    "crop 10 % each side",
)
TITLES = {"48 px": "Fine-tuned at 48 px", "all labels": "32 px, all labels"}
_MEAN_OF = 10


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The losses of two runs by step, and the step from which the second was resumed."""

    unbroken: dict[int, float]
    resumed: dict[int, float]
    resumed_from: int

    @property
    def num_identical(self) -> int:
        """How many steps after resuming have bit-identical losses."""
        steps = [step for step in self.unbroken if step > self.resumed_from]
        return sum(self.resumed.get(step) == self.unbroken[step] for step in steps)


def losses(unbroken: Path, resumed: Path) -> Losses:
    """Reads the losses of two runs of the same job, the second of which was killed and resumed."""
    found = [
        {line["step"]: line["loss"] for line in read_metrics(run) if "loss" in line} for run in (unbroken, resumed)
    ]
    attempts = sorted((resumed / "checkpoints" / "attempts").glob("*.json"))
    origin = json.loads(attempts[-1].read_text())["resumed_from"]
    return Losses(unbroken=found[0], resumed=found[1], resumed_from=int(origin["step"]))


def draw_losses(shown: Losses) -> None:
    """Writes docs/loss.svg: the losses of both runs, one on top of the other."""
    figure, (axes,) = _panels(1)
    steps = sorted(shown.unbroken)
    after = [step for step in sorted(shown.resumed) if step > shown.resumed_from]
    axes.plot(steps, [shown.unbroken[step] for step in steps], color=BLUE, linewidth=1.6, label="unbroken run")
    name = f"resumed from step {shown.resumed_from}"
    dots = {"color": ORANGE, "linestyle": (0, (1.5, 2.5)), "linewidth": 2.6}
    axes.plot(after, [shown.resumed[step] for step in after], label=name, **dots)
    axes.axvline(shown.resumed_from, color=FAINT, linewidth=0.8, linestyle="--")
    _title(axes, f"After SIGKILL, {shown.num_identical} of {len(after)} losses are bit-identical")
    axes.set(xlim=(0, max(steps)), yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    _name(axes, "step", "training loss (log scale)")
    _legend(axes, loc="upper right")
    _save(figure, "loss", "Loss of two runs")


def draw_transfer_curves() -> None:
    """Writes docs/transfer_curves.svg: a panel for each comparison of benchmarks/transfer_curves.py."""
    runs = [run for run in _results("transfer_curves")["runs"] if run["panel"]]
    names = list(dict.fromkeys(run["panel"] for run in runs))
    top = 10 * math.ceil(10 * max(value for run in runs for value in run["accuracy"]))
    figure, panels = _panels(len(names))
    for axes, name in zip(panels, names, strict=True):
        for run, (colour, style) in zip((run for run in runs if run["panel"] == name), LINES, strict=False):
            percent = [100 * one for one in run["accuracy"]]
            axes.plot(run["steps"], percent, color=colour, linestyle=style, linewidth=1.8, label=run["label"])
        axes.set(xlim=(0, None), ylim=(0, top))
        _title(axes, TITLES.get(name, f"32 px, {name}"))
        _name(axes, "step", "test accuracy, %")
        _legend(axes, loc="lower right")
    _save(figure, "transfer_curves", "Test accuracy on CIFAR-10")


def draw_small_studies() -> None:
    """Writes docs/small_studies.svg: the test accuracy by operations of each arm of benchmarks/small_studies.py, as the
    median over the seeds and their range. Operations are those of the model."""
    figure, (tokens, teacher) = _panels(2, height=3.0)
    for name, (steps, percent), style in _arms("fewer_tokens"):
        num_steps = max(steps)
        job = replace(small(), steps=num_steps, tokens=TOKENS[name](num_steps))
        _draw_arm(tokens, [flops_of_steps(job, step) * job.global_batch / 1e12 for step in steps], percent, name, style)
    for name, (steps, percent), style in _arms("teacher"):
        _draw_arm(teacher, steps, percent, name, style)
    _title(tokens, "Fewer tokens, for the same operations")
    _name(tokens, "operations, TFLOP", "test accuracy, %")
    _title(teacher, "A small model and a teacher, for the same steps")
    _name(teacher, "step", "test accuracy, %")
    for axes in (tokens, teacher):
        axes.set(xlim=(0, None))
        _legend(axes, loc="lower right")
    _save(figure, "small_studies", "Test accuracy on CIFAR-10 with fewer tokens and with a teacher")


def _arms(name: str) -> list[tuple[str, tuple[list[int], NDArray[np.float64]], tuple[str, str]]]:
    """Returns each arm's name, its steps and the accuracies at them, in percent, float64[seeds, steps], and how its
    line looks."""
    found = []
    for (arm, value), style in zip(_results(name)["arms"].items(), LINES, strict=False):
        curves = value["curves"]
        steps = [int(step) for step in curves[0]]
        found.append((arm, (steps, np.array([[100 * one for one in curve.values()] for curve in curves])), style))
    return found


def _draw_arm(axes: Axes, x: Sequence[float], percent: NDArray[np.float64], name: str, style: tuple[str, str]) -> None:
    """Draws the median over the seeds, and their range as a band."""
    colour, line = style
    axes.plot(x, np.median(percent, axis=0), color=colour, linestyle=line, linewidth=1.8, label=name)
    axes.fill_between(x, percent.min(axis=0), percent.max(axis=0), color=colour, alpha=0.15, linewidth=0)


def draw_near_duplicates() -> None:
    """Writes docs/near_duplicates.svg: recall and false matches of benchmarks/near_duplicates.py by threshold."""
    results = _results("near_duplicates")
    figure, (upper, lower) = _panels(2, height=4.0)
    for name, (colour, style) in zip(COPIES, LINES, strict=True):
        percent = {int(limit): 100 * share for limit, share in results["copies"]["recall"][name].items()}
        upper.plot(list(percent), list(percent.values()), color=colour, linestyle=style, linewidth=1.8, label=name)
    kinds = (("random crops of photographs", "random_crops"), ("CIFAR-10", "cifar10"))
    for (name, key), (colour, style) in zip(kinds, LINES, strict=False):
        seen = {int(limit): count for limit, count in results[key]["expected"].items() if count}
        lower.plot(list(seen), list(seen.values()), color=colour, linestyle=style, linewidth=1.8, label=name)
    lower.set(yscale="log", xlim=upper.get_xlim())
    _title(upper, "Recall: copies of 500 photographs that are found")
    _title(lower, "False matches: 14.2 M images against 200,000")
    for axes, name in ((upper, "copies found, %"), (lower, "images")):
        name_of_line = f"default: {DEFAULT_MAX_DISTANCE}"
        axes.axvline(DEFAULT_MAX_DISTANCE, color=INK, linewidth=1, linestyle=(0, (1, 3)), label=name_of_line)
        _name(axes, "threshold in bits", name)
        _legend(axes, loc="upper left", bbox_to_anchor=(-0.12, -0.2), ncols=2)
    _save(figure, "near_duplicates", "Recall and false matches by threshold")


def draw_plain() -> None:
    """Writes docs/plain.svg: a panel for each run, with its training loss, the mean of it over 10 lines of metrics, and
    on the right axis its test accuracy."""
    curves = _results("plain")["curves"]
    figure, panels = _panels(len(curves))
    for axes, (name, found) in zip(panels, curves.items(), strict=True):
        epochs, values = zip(*found["loss"], strict=True)
        axes.plot(epochs, values, color=BLUE, linewidth=0.8, alpha=0.35)
        means = np.convolve(values, np.ones(_MEAN_OF) / _MEAN_OF, mode="valid")
        axes.plot(epochs[_MEAN_OF // 2 :][: len(means)], means, color=BLUE, linewidth=1.5)
        _title(axes, name)
        _name(axes, "epoch", "training loss")
        axes.yaxis.label.set_color(BLUE)
        if len(found["test"]) > 1:
            right = axes.twinx()
            at, accuracies, _ = zip(*found["test"], strict=True)
            right.plot(at, [100 * each for each in accuracies], color=ORANGE, marker="o", markersize=3, linewidth=1.2)
            right.set_ylabel("test accuracy, %", color=ORANGE)
            right.set_ylim(0, None)
            right.spines[["top"]].set_visible(False)
    _save(figure, "plain", "Plain ViT recipes on CIFAR-10 and photographs")


def keep_plain(runs: Sequence[str]) -> None:
    """Writes the steps of finished runs, their training loss, and their test accuracy and loss by epoch, to plain.json.
    `runs`: NAME=RUN."""
    curves = {}
    for name, _, folder in (one.partition("=") for one in runs):
        lines = read_metrics(Path(folder))
        curves[name] = {
            "steps": json.loads((Path(folder) / "DONE").read_text())["step"],
            "loss": [[round(line["epoch"], 3), round(line["loss"], 4)] for line in lines if "loss" in line],
            "test": [
                [round(line["epoch"], 3), line["test_accuracy"], round(line["test_loss"], 4)]
                for line in lines
                if "test_accuracy" in line
            ],
        }
    command = shlex.join(["python", "-m", "docs.curve_figures", *runs])
    (RESULTS / "plain.json").write_text(json.dumps({"command": command, "curves": curves}) + "\n")


def _results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _panels(num: int, *, height: float = PANEL_HEIGHT) -> tuple[Figure, list[Axes]]:
    """A figure of panels below each other."""
    sizes = {"font.size": 11, "axes.titlesize": 12, "axes.labelsize": 11, "legend.fontsize": 11}
    mpl.rcParams.update({"svg.hashsalt": "patchline", "svg.fonttype": "none", "font.family": "sans-serif", **sizes})
    mpl.rcParams.update({"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK})
    figure = Figure(figsize=(WIDTH, 0.3 + num * height), facecolor="white", layout="constrained")
    panels = figure.subplots(num, 1, squeeze=False)[:, 0].tolist()
    for axes in panels:
        axes.grid(axis="y", color=GRID, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left")


def _name(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, labelpad=2)
    axes.set_ylabel(y)


def _legend(axes: Axes, **where: Any) -> None:
    axes.legend(frameon=False, labelcolor=INK, **where)


def _save(figure: Figure, name: str, title: str) -> None:
    """Writes the same file for the same curves and version of matplotlib."""
    figure.savefig(DOCS / f"{name}.svg", format="svg", metadata={"Date": None, "Title": title})


def main() -> None:
    """Keeps the curves of runs in plain.json and draws them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="NAME=RUN")
    keep_plain(parser.parse_args().runs)
    draw_plain()


if __name__ == "__main__":
    main()

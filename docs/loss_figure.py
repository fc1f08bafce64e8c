"""Draws docs/loss.svg from two runs of the demo: one unbroken, one killed and resumed.

make demo && python -m docs.loss_figure demo-run
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from pipeline.training.reporting.metrics import read_metrics

INK, FAINT, BLUE, ORANGE = "#101820", "#64748b", "#0072b2", "#d55e00"


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Losses of both runs by step, and the step from which the second was resumed."""

    unbroken: dict[int, float]
    resumed: dict[int, float]
    resumed_from: int

    @property
    def num_identical(self) -> int:
        """How many steps after resuming have bit-identical losses."""
        steps = [step for step in self.unbroken if step > self.resumed_from]
        return sum(self.resumed.get(step) == self.unbroken[step] for step in steps)


def read(demo_run: Path) -> Curves:
    """The curves of a finished demo."""
    losses = [
        {line["step"]: line["loss"] for line in read_metrics(demo_run / name)} for name in ("unbroken", "pretrain")
    ]
    attempts = sorted((demo_run / "pretrain" / "checkpoints" / "attempts").glob("*.json"))
    origin = json.loads(attempts[-1].read_text())["resumed_from"]
    return Curves(unbroken=losses[0], resumed=losses[1], resumed_from=int(origin["step"]))


def draw(curves: Curves, path: Path) -> None:
    """Writes the SVG."""
    mpl.rcParams.update({"svg.hashsalt": "patchline", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure = Figure(figsize=(8.0, 2.9), facecolor="white")
    axes = figure.add_axes((0.075, 0.17, 0.905, 0.70))
    steps = sorted(curves.unbroken)
    after = [step for step in sorted(curves.resumed) if step > curves.resumed_from]
    axes.plot(steps, [curves.unbroken[s] for s in steps], color=BLUE, linewidth=1.6, label="unbroken run")
    axes.plot(
        after,
        [curves.resumed[s] for s in after],
        color=ORANGE,
        linestyle=(0, (1.5, 2.5)),
        linewidth=2.6,
        label=f"killed with SIGKILL, resumed from step {curves.resumed_from}",
    )
    axes.axvline(curves.resumed_from, color=FAINT, linewidth=0.8, linestyle="--")
    same = curves.num_identical
    axes.set_title(
        f"{same} of {len(after)} losses after the kill are bit-identical", fontsize=11, color=INK, loc="left"
    )
    axes.set(xlim=(0, max(steps)), ylim=(0, None))
    axes.set_xlabel("step", fontsize=10, color=INK, labelpad=2)
    axes.set_ylabel("training loss", fontsize=10, color=INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=10, loc="upper right", labelcolor=INK)
    figure.savefig(path, format="svg", metadata={"Date": None, "Title": "Loss of the demo's runs"})


def main() -> None:
    """Reads the demo's folder and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo_run", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("loss.svg"))
    arguments = parser.parse_args()
    draw(read(arguments.demo_run), arguments.out)


if __name__ == "__main__":
    main()

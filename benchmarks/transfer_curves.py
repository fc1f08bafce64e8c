"""What two parts of the paper are worth on CIFAR-10, as curves of test accuracy.

Resolution (section 3.2): vit_small of cifar10_study.py, pre-trained at 32 px, is fine-tuned at 48 px with its positions
resampled, or with new ones; the same model is also trained from scratch at 48 px, with the same recipe and with that of
pre-training. Masked patches (section 4.6): vit_tiny, with the mean over its patches in place of the class token, is
pre-trained on CIFAR-10 without labels, and then trained on all labels or on 10 % of them, beside the same from scratch.

Each run is a command of its own; the same command again continues what was interrupted and runs what is missing. Half
an hour on two cores, after cifar10_study.py, whose weights it starts from:

    python -m benchmarks.transfer_curves --data data/cifar10 --weights runs/study/vit_small-100/weights \\
        --runs runs/curves --out benchmarks/results/transfer_curves.json
    python -m docs.pictures transfer_curves
"""

import argparse
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import cifar10_study
from benchmarks.cifar10_study import patchline, vit_small, vit_small_48, vit_tiny
from benchmarks.measure import machine
from benchmarks.rounds import say, write
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.settings.job import TrainingJob

_MASKED_STEPS, _TUNING_STEPS, _EVERY = 3000, 250, 50


def vit_small_48_adamw() -> TrainingJob:
    """vit_small_48 with the optimiser and schedule of pre-training, for training from scratch."""
    job, pretraining = vit_small_48(), vit_small()
    schedule = replace(pretraining.schedule, warmup_steps=job.schedule.warmup_steps)
    return replace(job, optimizer=pretraining.optimizer, schedule=schedule)


def vit_tiny_masked() -> TrainingJob:
    """vit_tiny_short pre-trained by masked patch prediction."""
    job = vit_tiny_short()
    return replace(job, model=replace(job.model, masked_patches=True, num_classes=512), steps=_MASKED_STEPS)


def vit_tiny_short() -> TrainingJob:
    """vit_tiny without a class token, for the steps that follow masked patch prediction, which trains none."""
    job = vit_tiny()
    return replace(job, model=replace(job.model, pooling="average"), steps=_TUNING_STEPS)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run. `words`: of its command, without data and folder. `panel`: of the figure; none if it is no curve."""

    name: str
    panel: str
    label: str
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Where the packed CIFAR-10 is (its test split beside it), the weights of vit_small, and where the runs go. `only`:
    names of runs, none for all. `more`: flags of every run."""

    data: str
    weights: str
    runs: Path
    only: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    def all(self) -> list[Curve]:
        """In the order in which they run."""
        tuned, start = _recipe(cifar10_study, "vit_small_48"), f"--initial.weights={self.weights}"
        resolution = (
            ("resampled", "positions resampled", ("finetune", tuned, start)),
            ("anew", "positions not resampled", ("finetune", tuned, start, "--initial.resample=none")),
            ("scratch", "from scratch", ("pretrain", tuned)),
            (
                "scratch-adamw",
                "from scratch, AdamW",
                ("pretrain", _recipe(sys.modules[__name__], "vit_small_48_adamw")),
            ),
        )
        own = sys.modules[__name__]
        made = [Curve(name=name, panel="48 px", label=label, words=words) for name, label, words in resolution]
        made.append(Curve(name="masked", panel="", label="", words=("pretrain", _recipe(own, "vit_tiny_masked"))))
        masked = f"--initial.weights={self.runs / 'masked' / 'weights'}"
        for share, panel in ((1.0, "all labels"), (0.1, "10 % of the labels")):
            part = () if share == 1 else (f"--data.subset.share={share}",)
            short = ("pretrain", _recipe(own, "vit_tiny_short"), *part)
            ending = f"{round(100 * share)}"
            made.append(
                Curve(name=f"tuned-{ending}", panel=panel, label="masked patches first", words=(*short, masked))
            )
            made.append(Curve(name=f"untuned-{ending}", panel=panel, label="from scratch", words=short))
        return [curve for curve in made if not self.only or curve.name in self.only]

    def command(self, curve: Curve) -> tuple[str, ...]:
        """Words of `patchline`."""
        scored = (f"--evaluation.url={self.data}-test", f"--evaluation.every-steps={_EVERY}") if curve.panel else ()
        return (*curve.words, f"--data.url={self.data}", *scored, f"--run-dir={self.runs / curve.name}", *self.more)


def main() -> None:
    """Runs what is not done, and keeps the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="packed CIFAR-10; its test split is at DATA-test")
    parser.add_argument("--weights", required=True, help="of vit_small, pre-trained at 32 px")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=(), help="names of runs")
    parser.add_argument("--out", type=Path)
    arguments, more = parser.parse_known_args()
    own = {"only": tuple(arguments.only), "more": tuple(more)}
    curves = Curves(data=arguments.data, weights=arguments.weights, runs=arguments.runs, **own)
    for number, curve in enumerate(curves.all(), start=1):
        words = curves.command(curve)
        say(f"run {number} of {len(curves.all())}: patchline {shlex.join(words)}")
        patchline(words)
    if arguments.out:
        write(arguments.out, results(curves))


def results(curves: Curves) -> dict[str, Any]:
    """Test accuracy by step of every run, with its command and the machine."""
    found = []
    for curve in curves.all():
        lines = [line for line in read_metrics(curves.runs / curve.name) if "test_accuracy" in line]
        points = {"steps": [line["step"] for line in lines], "accuracy": [line["test_accuracy"] for line in lines]}
        said = shlex.join(("patchline", *curves.command(curve))).replace(f"{Path(__file__).parents[1]}/", "")
        found.append({"name": curve.name, "panel": curve.panel, "label": curve.label, "command": said, **points})
    command = shlex.join(["python", "-m", "benchmarks.transfer_curves", *sys.argv[1:]])
    return {"command": command, "machine": machine(), "runs": found}


def _recipe(module: Any, name: str) -> str:
    return f"{module.__file__}:{name}"


if __name__ == "__main__":
    main()

"""A study of data and size on CIFAR-10, as the paper's Figures 3 and 4 on JFT-300M: does a larger model gain more from
more data?

Two Vision Transformers and one BiT ResNet are pre-trained on 10, 30 and 100 % of CIFAR-10 for the same number of steps,
with few-shot accuracy on the way, and then fine-tuned at 48 px on all of it. With --photographs, a folder of images of
ImageNet in one folder (n01440764_tench.JPEG), it is also measured how well a few of these, told apart as animals and
things, are recognised by what each pre-trained model has learned. Each run is a command of its own; the same study
again continues what was interrupted and runs what is missing. With CIFAR-10 packed as in the README:

    python -m benchmarks.cifar10_study --data data/cifar10 --runs runs/study --photographs photographs --threads=1 \\
        --out benchmarks/results/cifar10_study.json
    patchline compare runs/study --out study.html
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import machine
from benchmarks.rounds import say, write
from jobs.recipes.finetune import cifar10_48
from jobs.recipes.pretrain import cifar10_small
from pipeline.models.config import ModelConfig
from pipeline.training.settings.job import TrainingJob

SHARES = (0.1, 0.3, 1.0)
MODELS = ("vit_small", "vit_tiny", "bit_small")
_STEPS, _TUNING_STEPS, _EVERY = 1500, 100, 300
_FIRST_THING = "n02666196"
"""Abacus, the 399th of ImageNet's 1,000 classes in the order of their ids; the 398 before it are animals."""


def vit_small() -> TrainingJob:
    """1.2 M parameters: 6 layers of width 128, 16 patches of 8 px."""
    return _pretrained(replace(cifar10_small().model, name="vit_small"))


def vit_tiny() -> TrainingJob:
    """0.2 M parameters: 4 layers of width 64, 16 patches of 8 px."""
    model = replace(cifar10_small().model, name="vit_tiny", depth=4, width=64, mlp_width=256, num_heads=2)
    return _pretrained(model)


def bit_small() -> TrainingJob:
    """0.5 M parameters: the root and two units of BiT's ResNet-50x1."""
    return _pretrained(ModelConfig(name="bit_r50x1", image_size=32, num_classes=0, resnet_units=(1, 1)))


def vit_small_48() -> TrainingJob:
    """vit_small fine-tuned at 48 px."""
    return _tuned(vit_small())


def vit_tiny_48() -> TrainingJob:
    """vit_tiny fine-tuned at 48 px."""
    return _tuned(vit_tiny())


def bit_small_48() -> TrainingJob:
    """bit_small fine-tuned at 48 px."""
    return _tuned(bit_small())


def _pretrained(model: ModelConfig) -> TrainingJob:
    job = cifar10_small()
    return replace(job, model=model, steps=_STEPS, schedule=replace(job.schedule, warmup_steps=100))


def _tuned(pretrained: TrainingJob) -> TrainingJob:
    job = cifar10_48()
    schedule = replace(job.schedule, warmup_steps=30)
    model = replace(pretrained.model, image_size=48)
    return replace(job, model=model, steps=_TUNING_STEPS, global_batch=256, schedule=schedule)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Where the packed CIFAR-10 is (its test split beside it), where the runs go, and which. `photographs`: the packed
    photographs, empty for none; `more`: flags of every run."""

    data: str
    runs: Path
    shares: tuple[float, ...] = SHARES
    models: tuple[str, ...] = MODELS
    photographs: str = ""
    more: tuple[str, ...] = ()

    def commands(self) -> list[tuple[str, ...]]:
        """Those of all runs, in order: each model on each share, and what is fine-tuned from it."""
        made = []
        for share in self.shares:
            for model in self.models:
                folder = self._folder(model, share)
                few = (f"--fewshot.url={self.data}", f"--fewshot.every-steps={_EVERY}", "--fewshot.shots", "5", "10")
                part = (f"--data.subset.share={share}",)
                made.append(self._command("pretrain", model, folder, *part, *few))
                start = f"--initial.weights={folder / 'weights'}"
                made.append(self._command("finetune", f"{model}_48", Path(f"{folder}-48"), start))
        return made

    def measurements(self) -> list[tuple[str, ...]]:
        """Commands of the few-shot measurements on one half of the photographs, with shots of the other."""
        half = ("--data.held-out.share=.5", "--shots", "5", "10", "25", "--seeds=10")
        folders = [self._folder(model, share) for share in self.shares for model in self.models]
        return [
            ("fewshot", str(folder), f"--data.url={self.photographs}", *half, f"--run-dir={folder}-photographs")
            for folder in folders
            if self.photographs
        ]

    def _folder(self, model: str, share: float) -> Path:
        return self.runs / f"{model}-{round(100 * share)}"

    def _command(self, stage: str, recipe: str, folder: Path, *more: str) -> tuple[str, ...]:
        data = (f"--data.url={self.data}", f"--evaluation.url={self.data}-test", f"--run-dir={folder}")
        return stage, f"{__file__}:{recipe}", *data, *more, *self.more


def main() -> None:
    """Runs what is not done, and keeps every point that `patchline compare` has of the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="packed CIFAR-10; its test split is at DATA-test")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--photographs", type=Path, help="images of ImageNet in one folder: n01440764_tench.JPEG")
    parser.add_argument("--out", type=Path)
    arguments, more = parser.parse_known_args()
    which = {"shares": tuple(arguments.shares), "models": tuple(arguments.models)}
    packed = str(pack_photographs(arguments.photographs, arguments.runs)) if arguments.photographs else ""
    study = Study(data=arguments.data, runs=arguments.runs, photographs=packed, more=tuple(more), **which)
    commands = study.commands() + study.measurements()
    for number, words in enumerate(commands, start=1):
        say(f"run {number} of {len(commands)}: patchline {shlex.join(words)}")
        patchline(words)
    if arguments.out:
        write(arguments.out, results(study, sys.argv[1:]))


def pack_photographs(folder: Path, runs: Path) -> Path:
    """Packs the images, labelled as animals and things by the ids in their names, into RUNS/photographs; as many of
    each, so that chance is right half of the time. What there is more of is taken at even distances."""
    names = sorted(path.name for path in folder.glob("n*.JPEG"))
    animals, things = [one for one in names if one < _FIRST_THING], [one for one in names if one >= _FIRST_THING]
    number = min(len(animals), len(things))
    rows = [
        f"{one},{label}" for label, all_ in (("animal", animals), ("thing", things)) for one in _spread(all_, number)
    ]
    runs.mkdir(parents=True, exist_ok=True)
    table = runs / "photographs.csv"
    table.write_text("\n".join(["path,label", *rows]) + "\n")
    out = runs / "photographs"
    patchline(("pack", "manifest", f"--source.files={table}", f"--source.root={folder.absolute()}", f"--out={out}"))
    return out


def _spread(names: Sequence[str], number: int) -> list[str]:
    return [names[place * len(names) // number] for place in range(number)]


def results(study: Study, words: Sequence[str]) -> dict[str, Any]:
    """The points of the comparison and the accuracies on the photographs, with the study's command and the machine."""
    lines = patchline(["compare", str(study.runs), "--json"], capture=True).splitlines()
    measured = [Path(words[-1].partition("=")[2]) for words in study.measurements()]
    return {
        "command": shlex.join(["python", "-m", "benchmarks.cifar10_study", *words]),
        "machine": machine(),
        "points": [json.loads(line) for line in lines],
        "photographs": [{"run": one.name, **json.loads((one / "fewshot.json").read_text())} for one in measured],
    }


def patchline(words: Sequence[str], *, capture: bool = False) -> str:
    """What the command writes, if it is captured. SystemExit with its code if it fails."""
    command = [sys.executable, "-m", "jobs.cli", *words]
    ended = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.returncode)
    return ended.stdout or ""


if __name__ == "__main__":
    main()

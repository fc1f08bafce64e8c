"""What a training step costs with options that change its operations, beside what `patchline plan` says.

A ViT-Ti/16 at 224 px trains on one thread, in fp32, with batches of 8 images. Each arm runs for a few and for more
steps; the difference in CPU-seconds is that of the steps between, without start, end and checkpoints. Arms take turns.
With CIFAR-10 packed as in the README (a quarter of an hour):

    python -m benchmarks.step_options --data data/cifar10 --work /tmp/options \\
        --out benchmarks/results/step_options.json
"""

import argparse
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cifar10_study import patchline
from benchmarks.measure import machine, run
from benchmarks.rounds import say, spread, write
from jobs.recipes.pretrain import cifar10_small
from jobs.record import read_record
from pipeline.models.config import ModelConfig
from pipeline.planning.forecast import cost_of
from pipeline.training.settings.job import TrainingJob

FEW, MORE = 3, 15  # steps
PLAIN = "all tokens"
OPTIONS: Mapping[str, tuple[str, ...]] = {
    PLAIN: (),
    "patch dropout 0.25": ("--tokens.patch-dropout=0.25",),
    "patch dropout 0.5": ("--tokens.patch-dropout=0.5",),
    "patch dropout 0.75": ("--tokens.patch-dropout=0.75",),
    "160 px": ("--tokens.image-sizes", "160", "--tokens.size-steps", "{before_last}"),
    "SAM": ("--optimizer.sam-rho=0.1",),
    "a teacher of the same size": ("--teacher.weights={teacher}",),
}


def tiny() -> TrainingJob:
    """The model and batch of each arm."""
    job = cifar10_small()
    schedule = replace(job.schedule, warmup_steps=0)
    return replace(job, model=ModelConfig(name="vit_ti16", num_classes=10), global_batch=8, schedule=schedule)


def cpu_seconds(name: str, num_steps: int, arguments: argparse.Namespace) -> float:
    """Runs an arm anew, and returns the CPU-seconds of the whole command."""
    words = [word.format(before_last=num_steps - 1, teacher=arguments.work / "teacher") for word in OPTIONS[name]]
    folder = run_dir(name, num_steps, arguments)
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "jobs.cli", *_words(num_steps, arguments), *words, "--run-dir", str(folder)]
    return run(command).cpu_seconds


def _words(num_steps: int, arguments: argparse.Namespace) -> list[str]:
    few = ["--threads=1", "--engine.precision=fp32", f"--steps={num_steps}"]
    return ["pretrain", f"{__file__}:tiny", "--data.url", arguments.data, *few]


def run_dir(name: str, num_steps: int, arguments: argparse.Namespace) -> Path:
    """Returns the folder of a run."""
    work: Path = arguments.work
    return work / f"{name.replace(' ', '-')}-{num_steps}"


def operations(name: str, arguments: argparse.Namespace) -> float:
    """Returns the operations of an image in the steps between, by what the runs recorded."""
    total = 0
    for num_steps, sign in ((FEW, -1), (MORE, 1)):
        job = read_record(run_dir(name, num_steps, arguments) / "job.yaml", stage="pretrain", kind=TrainingJob)
        total += sign * num_steps * cost_of(job, num_images=0, num_classes=0, days=1).train_flops
    return total / (MORE - FEW)


def main() -> None:
    """Runs all arms in turn and writes the results after each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="packed CIFAR-10")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs, which are replaced")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    teacher = arguments.work / "teacher"
    if not teacher.exists():
        first = arguments.work / "first"
        patchline([*_words(FEW, arguments), "--run-dir", str(first)])
        patchline(["import", str(first / "weights"), "--out", str(teacher)])
    found: dict[str, list[float]] = {name: [] for name in OPTIONS}
    for number in range(arguments.rounds):
        for name in OPTIONS:
            more, few = (cpu_seconds(name, num_steps, arguments) for num_steps in (MORE, FEW))
            found[name].append((more - few) / (MORE - FEW))
            say(f"round {number + 1}, {name}: {found[name][-1]:.3f} CPU-seconds a step")
        if arguments.out:
            write(arguments.out, results(found, arguments))


def results(found: Mapping[str, list[float]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Quartiles of the CPU-seconds of a step, of their ratio to those without options in the same round, and the ratio
    of operations."""
    plain, plain_operations = found[PLAIN], operations(PLAIN, arguments)
    arms = {
        name: {
            "cpu_seconds": spread(seconds),
            "ratio": spread([one / other for one, other in zip(seconds, plain, strict=False)]),
            "gflop_per_image": round(operations(name, arguments) / 1e9, 3),
            "operations_ratio": round(operations(name, arguments) / plain_operations, 4),
        }
        for name, seconds in found.items()
        if seconds
    }
    command = f"python -m benchmarks.step_options --data DIR --work DIR --rounds {arguments.rounds}"
    return {"command": command, "machine": machine(), "rounds": len(plain), "arms": arms}


if __name__ == "__main__":
    main()

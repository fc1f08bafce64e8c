"""Two studies on CIFAR-10 with a ViT of 0.2 M parameters and patches of 4 px, each arm with several seeds.

`tokens`: does a run with fewer tokens reach more than one with all of them, for the same operations? Half of the
patches left out (PatchDropout), with all of them in the last tenth of the steps; and smaller images first. Each arm has
as many steps as the operations of the whole run allow.

`teacher`: does a student learn more with a teacher? The teacher is a ViT of 1.2 M parameters that is trained first; the
student learns from its probabilities (soft) or its classes (hard), for as many steps as without it.

Each run is a command of its own; the same study again continues what was interrupted and runs what is missing. With
CIFAR-10 packed as in the README:

    python -m benchmarks.small_studies tokens --data data/cifar10 --runs runs/tokens \\
        --out benchmarks/results/fewer_tokens.json
    python -m benchmarks.small_studies teacher --data data/cifar10 --runs runs/teacher \\
        --out benchmarks/results/teacher.json
"""

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cifar10_study import patchline
from benchmarks.measure import machine
from benchmarks.rounds import say, write
from jobs.recipes.pretrain import cifar10_small
from pipeline.planning.step_time import flops_of_steps
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.tokens import TokensConfig

EVALUATIONS = 6  # in each run
TEACHER_EPOCHS = 3
NUM_IMAGES = 50_000
WHOLE_SHARE, SIZE_SHARES = 10, (0.5, 0.8)  # the last tenth has all patches; ends of the steps at 16 and 24 px


def small() -> TrainingJob:
    """The model of both studies: 4 layers of width 64, 64 patches of 4 px."""
    job = cifar10_small()
    model = replace(job.model, name="vit_tiny", num_classes=10, patch=4, depth=4, width=64, mlp_width=256, num_heads=2)
    return replace(job, model=model, global_batch=128, schedule=replace(job.schedule, warmup_steps=100))


def teacher() -> TrainingJob:
    """The teacher: 6 layers of width 128."""
    job = small()
    model = replace(job.model, name="vit_small", depth=6, width=128, mlp_width=512, num_heads=4)
    return replace(job, model=model)


def patch_dropout(num_steps: int) -> TokensConfig:
    """Half of the patches, and all of them in the last steps."""
    return TokensConfig(patch_dropout=0.5, whole_steps=num_steps // WHOLE_SHARE)


def smaller_first(num_steps: int) -> TokensConfig:
    """16 px, then 24 px, then 32 px."""
    return TokensConfig(image_sizes=(16, 24), size_steps=tuple(int(share * num_steps) for share in SIZE_SHARES))


TOKENS: dict[str, Callable[[int], TokensConfig]] = {
    "all tokens": lambda _: TokensConfig(),
    "patch dropout 0.5": patch_dropout,
    "16 and 24 px first": smaller_first,
}
TEACHERS: dict[str, tuple[str, ...]] = {
    "no teacher": (),
    "soft": ("--teacher.target=soft", "--teacher.temperature=2"),
    "hard": ("--teacher.target=hard", "--teacher.share=0.5"),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of an arm. `recipe`: a function of this file. `more`: words of its command."""

    name: str
    recipe: str
    num_steps: int
    more: tuple[str, ...] = ()


def steps_within(budget: int, tokens: Callable[[int], TokensConfig]) -> int:
    """Returns the most steps whose operations are within the budget, in operations of one image a step."""
    low, high = 10, 100 * (budget // flops_of_steps(small(), 1) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        job = replace(small(), steps=middle, tokens=tokens(middle))
        low, high = (middle, high) if flops_of_steps(job, middle) <= budget else (low, middle)
    return low


def runs_with_tokens(num_steps: int) -> list[Run]:
    """A run of each arm, of equal operations."""
    budget, found = flops_of_steps(small(), num_steps), []
    for name, tokens in TOKENS.items():
        steps = steps_within(budget, tokens)
        config = tokens(steps)
        words: tuple[str, ...] = ()
        if config.patch_dropout:
            words = (f"--tokens.patch-dropout={config.patch_dropout}", f"--tokens.whole-steps={config.whole_steps}")
        if config.image_sizes:
            words = ("--tokens.image-sizes", *map(str, config.image_sizes))
            words = (*words, "--tokens.size-steps", *map(str, config.size_steps))
        found.append(Run(name=name, recipe="small", num_steps=steps, more=words))
    return found


def runs_with_teachers(num_steps: int, weights: Path) -> list[Run]:
    """A run of each arm, of equal steps."""
    start = f"--teacher.weights={weights}"
    return [
        Run(name=name, recipe="small", num_steps=num_steps, more=(start, *words) if words else ())
        for name, words in TEACHERS.items()
    ]


def main() -> None:
    """Runs what is not done, and keeps the accuracies of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("tokens", "teacher"))
    parser.add_argument("--data", required=True, help="packed CIFAR-10; its test split is at DATA-test")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--epochs", type=float, default=3, help="of the run with all tokens, or of each student")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    num_steps = round(arguments.epochs * NUM_IMAGES / small().global_batch)
    taught_by: dict[str, Any] = {}
    if arguments.study == "tokens":
        runs = runs_with_tokens(num_steps)
    else:
        one = Run(name="teacher", recipe="teacher", num_steps=round(TEACHER_EPOCHS * NUM_IMAGES / small().global_batch))
        train(one, arguments, seed=0, threads=arguments.at_once)
        runs = runs_with_teachers(num_steps, folder(one, arguments, seed=0) / "weights")
        taught_by = {"teacher": {"steps": one.num_steps, "curve": accuracies(folder(one, arguments, seed=0))}}
    each = [(run, seed) for seed in range(arguments.seeds) for run in runs]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(lambda pair: train(pair[0], arguments, seed=pair[1]), each))
    if arguments.out:
        write(arguments.out, results(runs, arguments) | taught_by)


def folder(run: Run, arguments: argparse.Namespace, *, seed: int) -> Path:
    """Returns the folder of a run."""
    runs: Path = arguments.runs
    return runs / f"{run.name.replace(' ', '-')}-{seed}"


def train(run: Run, arguments: argparse.Namespace, *, seed: int, threads: int = 1) -> None:
    """Trains a run of an arm, or continues it."""
    say(f"{run.name}, seed {seed}: {run.num_steps} steps")
    data = (f"--data.url={arguments.data}", f"--evaluation.url={arguments.data}-test")
    every = f"--evaluation.every-steps={-(-run.num_steps // EVALUATIONS)}"
    where = f"--run-dir={folder(run, arguments, seed=seed)}"
    few = (f"--threads={threads}", f"--seed={seed}", f"--steps={run.num_steps}", every, where)
    patchline(("pretrain", f"{__file__}:{run.recipe}", *data, *few, *run.more))


def results(runs: list[Run], arguments: argparse.Namespace) -> dict[str, Any]:
    """Each arm's steps, operations and accuracies by step, with the median of the last ones."""
    arms = {}
    for run in runs:
        curves = [accuracies(folder(run, arguments, seed=seed)) for seed in range(arguments.seeds)]
        last = [curve[max(curve)] for curve in curves]
        arms[run.name] = {"steps": run.num_steps, "flags": run.more, "curves": curves, "last": last}
        say(f"{run.name}: {statistics.median(last):.4f} ({min(last):.4f} to {max(last):.4f})")
    return {
        "command": f"python -m benchmarks.small_studies {arguments.study} --data DIR --runs DIR "
        f"--epochs {arguments.epochs:g} --seeds {arguments.seeds}",
        "machine": machine(),
        "arms": arms,
    }


def accuracies(run_dir: Path) -> dict[int, float]:
    """Returns the accuracy on the test split by step."""
    lines = read_metrics(run_dir)
    return {line["step"]: line["test_accuracy"] for line in lines if "test_accuracy" in line}


if __name__ == "__main__":
    main()

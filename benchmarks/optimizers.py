"""Muon beside AdamW on CIFAR-10, and AdamW with its first moment in bf16 beside fp32 on digits, at equal steps.

Muon and AdamW both train cifar10_small, shortened to one epoch, with all else equal: the decay, the schedule's shape,
the clipping. Each chooses among the same few learning rates, with the first seed, by its mean loss over the last steps;
almost no image has been seen before then, so this is a loss on new images. At the chosen rate, further seeds follow.
The first moments are compared on digits_smoke as it is. What an update costs is measured in this process, in CPU time:
on one thread, each optimiser in turn, for the model of cifar10_small and its gradients of 8 images.

Each run is a command of its own; the same command again continues what was interrupted and runs what is missing. The
CPU seconds of a run are those of its whole process, with the start and the evaluation at its end. With CIFAR-10 and the
digits packed as in the README:

    python -m benchmarks.optimizers --cifar10 data/cifar10 --digits data/digits --runs runs/optimizers --threads=1 \\
        --out benchmarks/results/optimizers.json
"""

import argparse
import json
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cifar10_study import patchline
from benchmarks.measure import machine
from benchmarks.rounds import say, write
from jobs.recipes.pretrain import cifar10_small
from pipeline.models import build_model
from pipeline.models.loss import classification_loss
from pipeline.ranks.world import current_world, enter, leave
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.zero.batch_plan import plan_batch
from pipeline.training.zero.engine import Engine

OPTIMIZERS = ("adamw", "muon")
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
MOMENTS = ("fp32", "bf16")
SEEDS = (0, 1, 2)
_FEW_STEPS = ("--steps=200", "--schedule.warmup-steps=20")
_LAST = 50  # steps whose losses are averaged
_IMAGES, _UPDATES = 8, 30
_FIGURES = ("last_losses", "test_accuracy", "test_loss", "cpu_seconds")

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Where the packed datasets are (the test split of each is beside it) and where the runs go. `more`: flags of every
    run."""

    cifar10: str
    digits: str
    runs: Path
    more: tuple[str, ...] = ()

    def of_optimizer(self, name: str, rate: float, seed: int) -> Result:
        """A run of cifar10_small."""
        flags = (*_FEW_STEPS, f"--optimizer.name={name}", f"--schedule.learning-rate={rate:g}")
        found = self._result(f"{name}-{rate:g}-{seed}", "cifar10_small", self.cifar10, *flags, f"--seed={seed}")
        return {"optimizer": name, "learning_rate": rate, "seed": seed, **found}

    def of_moment(self, precision: str, seed: int) -> Result:
        """A run of digits_smoke."""
        flags = (f"--optimizer.first-moment={precision}", f"--seed={seed}")
        found = self._result(f"moment-{precision}-{seed}", "digits_smoke", self.digits, *flags)
        return {"first_moment": precision, "seed": seed, **found}

    def _result(self, name: str, recipe: str, data: str, *flags: str) -> Result:
        """What a run came to; it runs first if it has not."""
        measured = self.runs / f"{name}.json"
        if not measured.exists():
            folders = (f"--data.url={data}", f"--evaluation.url={data}-test", f"--run-dir={self.runs / name}")
            words = ("pretrain", recipe, *folders, "--log-every-steps=1", *flags, *self.more)
            say(f"patchline {shlex.join(words)}")
            before = _cpu_seconds()
            patchline(words)
            measured.write_text(json.dumps({"cpu_seconds": _cpu_seconds() - before}))
        lines = read_metrics(self.runs / name)
        (scored,) = [line for line in lines if "test_accuracy" in line]
        return {
            "last_losses": statistics.fmean(line["loss"] for line in lines[-_LAST:]),
            "test_accuracy": scored["test_accuracy"],
            "test_loss": scored["test_loss"],
            **json.loads(measured.read_text()),
        }


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def of_optimizers(trials: Trials) -> tuple[list[Result], dict[str, Any]]:
    """The results of all runs of CIFAR-10, and the spread of each optimiser at its best rate."""
    results, spreads = [], {}
    for name in OPTIMIZERS:
        first = [trials.of_optimizer(name, rate, SEEDS[0]) for rate in RATES]
        best = min(first, key=lambda result: float(result["last_losses"]))
        others = [trials.of_optimizer(name, best["learning_rate"], seed) for seed in SEEDS[1:]]
        results += [*first, *others]
        spreads[name] = {"learning_rate": best["learning_rate"], **spread([best, *others])}
    return results, spreads


def of_moments(trials: Trials) -> tuple[list[Result], dict[str, Any]]:
    """The results of all runs of digits, and the spread of each precision."""
    by_precision = {precision: [trials.of_moment(precision, seed) for seed in SEEDS] for precision in MOMENTS}
    results = [result for found in by_precision.values() for result in found]
    return results, {name: spread(found) for name, found in by_precision.items()}


def of_updates() -> dict[str, list[float]]:
    """CPU seconds of an update: least, median and largest of each optimiser."""
    world = replace(current_world("cpu"), num_threads=1)
    enter(world)
    job = cifar10_small()
    model = replace(job.model, num_classes=10)
    chosen: dict[str, dict[str, Any]] = {
        "adamw": {},
        "muon": {"name": "muon"},
        "first moment in bf16": {"first_moment": "bf16"},
    }
    engines = {
        name: Engine(
            build_model(model),
            config=job.engine,
            plan=plan_batch(_IMAGES, micro_batch=_IMAGES, num_ranks=1, lanes=1),
            optimizer=replace(job.optimizer, **fields),
            clip_norm=job.clip_norm,
        )
        for name, fields in chosen.items()
    }
    images = torch.randint(0, 256, (_IMAGES, model.image_size, model.image_size, 3), dtype=torch.uint8)
    labels = torch.arange(_IMAGES)[:, None]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for update in range(_UPDATES + 1):
        for name, engine in engines.items():
            engine.accumulate(lambda module: classification_loss(module(images), labels, name="softmax"))
            began = time.process_time()
            engine.update(learning_rate=job.schedule.learning_rate)
            if update:  # the first one makes the moments
                seconds[name].append(time.process_time() - began)
    leave()
    return {name: [min(found), statistics.median(found), max(found)] for name, found in seconds.items()}


def spread(results: Sequence[Result]) -> dict[str, list[float]]:
    """Least, median and largest value of each figure."""
    values = {figure: [float(result[figure]) for result in results] for figure in _FIGURES}
    return {figure: [min(found), statistics.median(found), max(found)] for figure, found in values.items()}


def main() -> None:
    """Runs what is not done, and keeps what the runs came to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", required=True, help="packed CIFAR-10; its test split is at CIFAR10-test")
    parser.add_argument("--digits", required=True, help="packed digits; their test split is at DIGITS-test")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    arguments, more = parser.parse_known_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    trials = Trials(cifar10=arguments.cifar10, digits=arguments.digits, runs=arguments.runs, more=tuple(more))
    moments, of_precision = of_moments(trials)
    optimizers, of_optimizer = of_optimizers(trials)
    updates = of_updates()
    found = {
        "command": shlex.join(["python", "-m", "benchmarks.optimizers", *sys.argv[1:]]),
        "machine": machine(),
        "optimizers": {"summary": of_optimizer, "runs": optimizers},
        "first_moments": {"summary": of_precision, "runs": moments},
        "update_cpu_seconds": updates,
    }
    say(json.dumps(found, indent=1))
    if arguments.out:
        write(arguments.out, found)


if __name__ == "__main__":
    main()

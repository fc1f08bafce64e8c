"""Layers of float8 on digits, emulated on a CPU: their scores beside those of bf16, and the errors of a step.

Every arm trains digits_smoke, shortened to 100 steps, with the same seeds. torchao's emulation rounds to float8 as on a
GPU, but adds up in fp32, where a GPU has fewer bits. So this shows what rounding does to training, and nothing of
speed. Each run is a command of its own; the same command again runs what is missing. Errors of a step are relative to
the norm, against fp32, with all gradients as one vector. They are those of the model that the first run of bf16 ends
with, on random pixels and labels, whose gradients are not small. With the digits packed as in the README:

    python -m benchmarks.float8 --digits data/digits --runs runs/float8 --threads=1 --out benchmarks/results/float8.json
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.measure import machine
from benchmarks.rounds import say, write
from jobs.recipes.pretrain import digits_smoke
from pipeline.models.loss import classification_loss
from pipeline.models.weights.folder import open_weights
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.settings.job import EngineConfig
from pipeline.training.start import starting_model

Arm = Literal["fp32", "bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"]
TRAINED: tuple[Arm, ...] = ("bf16", "tensorwise", "rowwise")
ROUNDED: tuple[Arm, ...] = (*TRAINED, "rowwise_with_gw_hp")
SEEDS = (0, 1, 2)
_FLAGS = ("--steps=100", "--log-every-steps=1")
_LAST = 50  # steps whose losses are averaged
_IMAGES = 256
_FIGURES = ("last_losses", "test_accuracy", "test_loss")


def main() -> None:
    """Runs what is not done, and keeps what the runs came to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--digits", required=True, help="packed digits; their test split is at DIGITS-test")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    arguments, more = parser.parse_known_args()
    runs = [
        {"arm": arm, "seed": seed, **trained(arm, seed, arguments.digits, arguments.runs, more)}
        for seed in SEEDS
        for arm in TRAINED
    ]
    found = {
        "command": shlex.join(["python", "-m", "benchmarks.float8", *sys.argv[1:]]),
        "machine": machine(),
        "summary": {arm: spread([run for run in runs if run["arm"] == arm]) for arm in TRAINED},
        "runs": runs,
        "step_errors": step_errors(arguments.runs / f"{TRAINED[0]}-{SEEDS[0]}"),
    }
    say(json.dumps({name: found[name] for name in ("summary", "step_errors")}, indent=1))
    if arguments.out:
        write(arguments.out, found)


def trained(arm: Arm, seed: int, digits: str, runs: Path, more: list[str]) -> dict[str, float]:
    """What a run of digits_smoke came to; it runs first if it has not."""
    run_dir, engine = runs / f"{arm}-{seed}", engine_of(arm)
    if not (run_dir / "DONE").exists():
        words = ["pretrain", "digits_smoke", f"--data.url={digits}", f"--evaluation.url={digits}-test"]
        words += [f"--run-dir={run_dir}", f"--seed={seed}", *_FLAGS, *more]
        words += [f"--engine.precision={engine.precision}", f"--engine.float8={engine.float8}"]
        say(f"patchline {shlex.join(words)}")
        subprocess.run([sys.executable, "-m", "tests.rigs.emulated_float8", *words], check=True)
    lines = read_metrics(run_dir)
    (scored,) = [line for line in lines if "test_accuracy" in line]
    return {
        "last_losses": statistics.fmean(line["loss"] for line in lines[-_LAST:]),
        "test_accuracy": scored["test_accuracy"],
        "test_loss": scored["test_loss"],
    }


def engine_of(arm: Arm) -> EngineConfig:
    """Layers of float8 are in a model of bf16."""
    if arm == "fp32" or arm == "bf16":  # noqa: PLR1714 - mypy narrows no literal by `in`
        return EngineConfig(precision=arm)
    return EngineConfig(precision="bf16", float8=arm)


def spread(results: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Least, median and largest value of each figure."""
    values = {figure: sorted(result[figure] for result in results) for figure in _FIGURES}
    return {figure: [found[0], statistics.median(found), found[-1]] for figure, found in values.items()}


def step_errors(run_dir: Path) -> dict[str, dict[str, float]]:
    """Each arm's errors of the logits and of all gradients in one, relative to their norm, against fp32."""
    exact = step_of("fp32", run_dir)
    return {
        arm: {
            name: float(f"{(found - expected).norm() / expected.norm():.2g}")
            for name, found, expected in zip(("logits", "gradients"), step_of(arm, run_dir), exact, strict=True)
        }
        for arm in ROUNDED
    }


def step_of(arm: Arm, run_dir: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a batch and the gradients of its loss."""
    weights, engine = open_weights(str(run_dir)), engine_of(arm)
    model = starting_model(replace(digits_smoke(), model=weights.config, engine=engine), is_compiled=False)
    model.to(torch.float32 if engine.precision == "fp32" else torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.tensor(name))
    generator, side = torch.Generator().manual_seed(0), weights.config.image_size
    images = torch.randint(0, 256, (_IMAGES, side, side, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, weights.config.num_classes, (_IMAGES, 1), generator=generator)
    logits = model(images)
    torch.autograd.backward(classification_loss(logits, labels, name="softmax"))
    gradients = [each.grad.float().flatten() for each in model.parameters() if each.grad is not None]
    return logits.detach().float(), torch.cat(gradients)


if __name__ == "__main__":
    main()

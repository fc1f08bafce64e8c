"""The curves: what is run, and that it runs, on digits and for a few steps."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.transfer_curves import Curves, vit_small_48_adamw, vit_tiny_masked, vit_tiny_short
from jobs.data.pack import PackJob, run
from shards.sources.kinds import DigitsSource
from tests.jobs.reports.test_ls import CHECKOUT


def test_every_curve_is_in_a_panel_with_its_rivals() -> None:
    curves = Curves(data="data/cifar10", weights="weights", runs=Path("runs"))
    panels = [curve.panel for curve in curves.all()]
    assert panels == ["48 px"] * 4 + [""] + ["all labels"] * 2 + ["10 % of the labels"] * 2
    commands = {curve.name: curves.command(curve) for curve in curves.all()}
    assert commands["anew"][:4] == (*commands["resampled"][:3], "--initial.resample=none")
    assert not any(word.startswith("--initial") for word in commands["scratch"])
    for share in ("100", "10"):
        assert "--initial.weights=runs/masked/weights" in commands[f"tuned-{share}"]
        assert set(commands[f"untuned-{share}"]) - set(commands[f"tuned-{share}"]) == {
            f"--run-dir=runs/untuned-{share}"
        }
    assert "--data.subset.share=0.1" in commands["tuned-10"]


def test_recipes() -> None:
    assert vit_small_48_adamw().optimizer.name == "adamw"
    assert vit_small_48_adamw().steps == 100
    masked, short = vit_tiny_masked().model, vit_tiny_short().model
    assert replace(masked, masked_patches=False, num_classes=0) == short
    assert (masked.num_classes, short.pooling) == (512, "average")


@pytest.mark.long
def test_it_runs_and_keeps_every_curve(tmp_path: Path) -> None:
    for ending, split in (("", "train"), ("-test", "test")):
        source = DigitsSource(split=split)  # type: ignore[arg-type]
        assert run(PackJob(out=str(tmp_path / f"digits{ending}"), source=source, split=split)) == 0
    out = tmp_path / "results.json"
    words = ("--data", str(tmp_path / "digits"), "--weights", str(tmp_path / "runs" / "scratch-adamw" / "weights"))
    short = ("--steps=2", "--schedule.warmup-steps=0", "--global-batch=32", "--data.lanes=8", "--device=cpu")
    for only in (("scratch-adamw",), ("anew", "masked", "tuned-10", "untuned-10")):
        chosen = ("--runs", str(tmp_path / "runs"), "--out", str(out), "--only", *only, *short)
        command = [sys.executable, "-m", "benchmarks.transfer_curves", *words, *chosen]
        ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
    runs = {one["name"]: one for one in json.loads(out.read_text())["runs"]}
    assert list(runs) == ["anew", "masked", "tuned-10", "untuned-10"]
    assert [one["steps"] for one in runs.values()] == [[2], [], [2], [2]]
    assert all(0 <= accuracy <= 1 for one in runs.values() for accuracy in one["accuracy"])
    assert runs["anew"]["command"].startswith("patchline finetune benchmarks/cifar10_study.py:vit_small_48 ")

"""The study: what it runs, and that it runs, on digits and for a few steps."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import cifar10_study as study_module
from benchmarks.cifar10_study import MODELS, SHARES, Study
from jobs.data.pack import PackJob, run
from shards.dataset import open_dataset
from shards.sources.kinds import DigitsSource
from tests.jobs.reports.test_ls import CHECKOUT


def _save(path: Path, *, seed: int) -> None:
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(path)


def test_each_model_is_pretrained_on_each_share_and_fine_tuned() -> None:
    commands = Study(data="data/cifar10", runs=Path("runs")).commands()
    assert len(commands) == 2 * len(SHARES) * len(MODELS)
    assert len({next(word for word in words if word.startswith("--run-dir=")) for words in commands}) == len(commands)
    for pretrained, tuned in zip(commands[::2], commands[1::2], strict=True):
        folder = next(word for word in pretrained if word.startswith("--run-dir=")).partition("=")[2]
        assert f"--initial.weights={folder}/weights" in tuned
        assert (pretrained[0], tuned[0]) == ("pretrain", "finetune")


@pytest.mark.parametrize("name", MODELS)
def test_models_are_of_the_sizes_that_are_said(name: str) -> None:
    before, after = getattr(study_module, name)(), getattr(study_module, f"{name}_48")()
    assert (before.model.image_size, after.model.image_size) == (32, 48)
    assert before.steps == 1500


def test_photographs_are_of_two_labels_and_as_many_of_each(tmp_path: Path) -> None:
    folder = tmp_path / "photographs"
    folder.mkdir()
    ids = ("n01440764", "n01484850", "n02655020", "n02666196", "n03000247", "n03014705", "n04000000", "n04999999")
    for number, name in enumerate(ids):
        _save(folder / f"{name}_it.JPEG", seed=number)
    packed = study_module.pack_photographs(folder, tmp_path / "runs")
    lines = (tmp_path / "runs" / "photographs.csv").read_text().split()[1:]
    animals = [f"{name}_it.JPEG,animal" for name in ids[:3]]
    assert lines == animals + [f"{name}_it.JPEG,thing" for name in ("n02666196", "n03000247", "n04000000")]
    assert open_dataset(str(packed)).num_samples == 6


@pytest.mark.long
def test_it_runs_and_keeps_every_point(tmp_path: Path) -> None:
    for ending, split in (("", "train"), ("-test", "test")):
        source = DigitsSource(split=split)  # type: ignore[arg-type]
        assert run(PackJob(out=str(tmp_path / f"digits{ending}"), source=source, split=split)) == 0
    short = ("--steps=2", "--schedule.warmup-steps=0", "--global-batch=32", "--data.lanes=8", "--device=cpu")
    out = tmp_path / "results.json"
    words = ("--data", str(tmp_path / "digits"), "--runs", str(tmp_path / "runs"), "--out", str(out), *short)
    photographs = tmp_path / "photographs"
    photographs.mkdir()
    for number in range(200):
        _save(photographs / f"{'n01440764' if number % 2 else 'n04999999'}_{number}.JPEG", seed=number)
    chosen = ("--shares", "0.3", "--models", "vit_tiny", "bit_small", "--photographs", str(photographs))
    command = [sys.executable, "-m", "benchmarks.cifar10_study", *words, *chosen]
    ended = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    kept = json.loads(out.read_text())
    points = kept["points"]
    assert [one["run"] for one in kept["photographs"]] == ["vit_tiny-30-photographs", "bit_small-30-photographs"]
    assert {one["num_test_images"] for one in kept["photographs"]} == {100}
    assert sorted(one["name"] for one in points) == ["bit_small-30", "bit_small-30-48", "vit_tiny-30", "vit_tiny-30-48"]
    assert {one["num_images"] for one in points} == {431}
    assert all(one["accuracy"] is not None and one["exaflops"] > 0 for one in points)

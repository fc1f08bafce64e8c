"""Photographs of any size and CIFAR-10 go through packing and a few steps of training; skipped where they are not."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs import pack
from jobs.recipes.pack import cifar10, flat
from shards.dataset import open_dataset
from shards.sources import FlatSource, ParquetSource
from tests.rigs.training import losses, run

pytestmark = pytest.mark.slow
FEW_STEPS = ("--steps", "3", "--schedule.warmup-steps", "1", "--checkpoint.every-steps", "3", "--device", "cpu")


def test_photographs_train(test_data: Path, tmp_path: Path) -> None:
    """ImageNet's own sizes; the synset is the part of the file name before the first underscore."""
    url = str(tmp_path / "photos")
    assert pack.run(replace(flat(), out=url, source=FlatSource(root=str(test_data / "imagenet-sample")))) == 0
    assert all(name.startswith(("n0", "n1")) for name in open_dataset(url).label_names)
    words = ["pretrain", "photos_smoke", "--data.url", url, "--run-dir", str(tmp_path / "run"), *FEW_STEPS]
    assert run([*words, "--global-batch", "16"], num_ranks=2, log_dir=tmp_path) == 0
    assert set(losses(tmp_path / "run")) == {1, 2, 3}


def test_cifar10_trains(test_data: Path, tmp_path: Path) -> None:
    """The Parquet layout of Hugging Face datasets, 10,000 images."""
    url = str(tmp_path / "cifar10-test")
    source = cifar10().source
    assert isinstance(source, ParquetSource)
    source = replace(source, files=(str(test_data / "cifar10" / "{split}.parquet"),))
    assert pack.run(replace(cifar10(), out=url, split="test", source=source)) == 0
    assert open_dataset(url).label_names[:2] == ("airplane", "automobile")
    words = ["pretrain", "cifar10_small", "--data.url", url, "--run-dir", str(tmp_path / "run"), *FEW_STEPS]
    assert run([*words, "--log-every-steps", "1"], num_ranks=2, log_dir=tmp_path) == 0
    assert set(losses(tmp_path / "run")) == {1, 2, 3}

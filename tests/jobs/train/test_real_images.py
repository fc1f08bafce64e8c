"""Photographs of any size and CIFAR-10 are packed and trained on for a few steps: real ones if available, and generated
images in the same layouts."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.data import pack
from jobs.recipes.pack import cifar10, flat
from shards.dataset import open_dataset
from shards.sources.kinds import FlatSource, ParquetSource
from tests.rigs.images import image_bytes
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


@pytest.mark.long
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


def test_made_photographs_train(tmp_path: Path) -> None:
    """Mixed sizes in one flat folder, named as in the ImageNet sample."""
    photos, url = tmp_path / "images", str(tmp_path / "photos")
    photos.mkdir()
    for number in range(24):
        data = image_bytes(number, height=40 + 13 * (number % 5), width=48 + 29 * (number % 7))
        (photos / f"n{number:08d}_word.JPEG").write_bytes(data)
    assert pack.run(replace(flat(), out=url, source=FlatSource(root=str(photos)))) == 0
    assert open_dataset(url).label_names == tuple(f"n{number:08d}" for number in range(24))
    words = ["pretrain", "photos_smoke", "--data.url", url, "--run-dir", str(tmp_path / "run"), *FEW_STEPS]
    assert run([*words, "--global-batch", "16", "--log-every-steps", "1"], num_ranks=1, log_dir=tmp_path) == 0
    assert set(losses(tmp_path / "run")) == {1, 2, 3}


def test_a_made_parquet_trains_and_fine_tunes(tmp_path: Path) -> None:
    """CIFAR-10's layout: 32x32 PNG of 10 classes in a struct of bytes and path, with an integer label."""
    images = [
        {"bytes": image_bytes(i, height=32, width=32, image_format="PNG"), "path": f"{i}.png"} for i in range(320)
    ]
    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {"image": pa.array(images, image_type), "label": pa.array([i % 10 for i in range(320)], pa.int64())}
    pq.write_table(pa.table(columns), tmp_path / "train.parquet", row_group_size=100)
    url, first, second = str(tmp_path / "cifar10"), tmp_path / "first", tmp_path / "second"
    source = cifar10().source
    assert isinstance(source, ParquetSource)
    source = replace(source, files=(str(tmp_path / "{split}.parquet"),))
    assert pack.run(replace(cifar10(), out=url, source=source)) == 0
    assert open_dataset(url).label_names[:2] == ("airplane", "automobile")
    words = ["pretrain", "cifar10_small", "--data.url", url, "--run-dir", str(first), *FEW_STEPS]
    assert run([*words, "--log-every-steps", "1"], num_ranks=1, log_dir=tmp_path) == 0
    assert set(losses(first)) == {1, 2, 3}
    words = ["finetune", "cifar10_48", "--initial.weights", str(first / "weights"), "--data.url", url]
    words += ["--run-dir", str(second), *FEW_STEPS, "--steps", "2", "--global-batch", "64", "--log-every-steps", "1"]
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    assert set(losses(second)) == {1, 2}

"""A dataset whose loss jumps at chosen data steps: all images are of one class, but for those of these steps."""

import csv
from collections.abc import Collection
from pathlib import Path

import numpy as np
from PIL import Image

from jobs.data.pack import PackJob, run
from pipeline.data.config import DataConfig
from pipeline.data.training_data import open_training_data
from shards.dataset import Dataset, open_dataset
from shards.sources.folders import FlatSource
from tests.rigs.datasets import index_rows

BATCH, NUM_STEPS = 8, 40  # in the dataset's only epoch
CONFIG = DataConfig(lanes=4, window_blocks=2)


def packed_with_poison(folder: Path, data_steps: Collection[int]) -> str:
    """Its URL. The images of the other class are those of the batches at `data_steps`, and only these."""
    images = folder / "images"
    images.mkdir(parents=True)
    for number in range(BATCH * NUM_STEPS):
        pixels = np.full((16, 16, 3), number % 200 + 20, dtype=np.uint8)
        pixels[number // 16 % 16, number % 16] = number // 200  # no two are the same
        Image.fromarray(pixels).save(images / f"{number:04d}.png")
    names = sorted(path.name for path in images.iterdir())
    plain = _packed(folder, "plain", {name: "rare" if name == names[0] else "common" for name in names})
    poison = {name for step in data_steps for name in _names(plain, step)}
    poisoned = _packed(folder, "poisoned", {name: "rare" if name in poison else "common" for name in names})
    if data_steps and {name for step in data_steps for name in _names(poisoned, step)} != poison:
        raise AssertionError("labels changed the order of the samples")
    return poisoned.url


def _packed(folder: Path, name: str, labels: dict[str, str]) -> Dataset:
    table, out = folder / f"{name}.csv", str(folder / name)
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label"), *labels.items()])
    source = FlatSource(root=str(folder / "images"), labels_csv=str(table))
    if run(PackJob(out=out, source=source, samples_per_shard=64, samples_per_block=8)):
        raise AssertionError(f"{out} was not packed")
    return open_dataset(out)


def _names(dataset: Dataset, data_step: int) -> set[str]:
    """The files whose images are in the batch of a data step."""
    data = open_training_data(DataConfig(url=dataset.url))
    (order,) = data.orders(CONFIG, seed=0)
    rows = [row for shard in range(len(dataset.manifest.shards)) for row in index_rows(dataset, shard)]
    return {Path(rows[number].source).name for number in order.batch(data_step, BATCH)}

"""Sources are told apart by their kinds, and depend on their libraries; the digits are fixed in split and bytes."""

import io
from typing import get_args

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from shards.errors import ImageRefusedError
from shards.sources.digits import split_indices
from shards.sources.kinds import DigitsSource, FolderSource, Source, tool_versions

ALL: list[Source] = [kind() for kind in get_args(Source)]


@pytest.mark.parametrize("source", ALL, ids=lambda source: source.kind)
def test_every_kind_is_an_image_source_of_its_own(source: Source) -> None:
    assert [other.kind for other in ALL].count(source.kind) == 1
    assert source.staged in (True, False)


def test_only_the_digits_depend_on_scikit_learn() -> None:
    assert "scikit-learn" in tool_versions(DigitsSource())
    assert sorted(tool_versions(FolderSource())) == ["numpy", "pillow", "pyarrow"]


def test_the_split_of_the_digits_is_fixed_and_covers_all() -> None:
    train, test = split_indices("train"), split_indices("test")
    assert (len(train), len(test)) == (1438, 359)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(1797))
    assert test[:6].tolist() == [5, 11, 20, 21, 28, 34]  # fixed here: the split must never change


@pytest.mark.parametrize("split", ["train", "test"])
def test_labels_are_spread_over_both_splits(split: str) -> None:
    labels = [entry.labels for entry in DigitsSource(split=split).entries()]  # type: ignore[arg-type]
    counts = [labels.count((str(digit),)) for digit in range(10)]
    assert min(counts) > 0.08 * len(labels)


def test_images_are_the_same_bytes_every_time_and_enlarged_fourfold() -> None:
    source = DigitsSource()
    locators = [entry.locator for entry in source.entries()][:3]
    images = list(source.reader().read_many(locators))
    assert images == list(source.reader().read_many(locators))
    first = images[0]
    pixels = np.asarray(Image.open(io.BytesIO(first)))
    assert pixels.shape == (32, 32, 3)
    assert np.array_equal(pixels[::4, ::4], pixels[3::4, 3::4])
    values = load_digits().images[int(locators[0])]
    assert np.array_equal(pixels[::4, ::4, 1], np.rint(values * 255 / 16))


def test_the_scan_reads_what_packing_reads_again() -> None:
    source = DigitsSource(split="test")
    entries = list(source.entries())[:5]
    found = list(source.images(entries, max_bytes=1 << 20))
    assert [entry for entry, _ in found] == entries
    assert [image for _, image in found] == list(source.reader().read_many([entry.locator for entry in entries]))
    assert all(isinstance(image, ImageRefusedError) for _, image in source.images(entries, max_bytes=10))

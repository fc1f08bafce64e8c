"""Labels of images that have exactly one each, and what is said where they have not."""

from pathlib import Path

import numpy as np
import pytest

from shards.dataset import open_dataset
from shards.errors import UserError
from shards.single_labels import labels_of, refuse_too_few
from tests.rigs.datasets import index_rows, packed_folders, packed_with_weights


def test_labels_are_those_of_the_index(tmp_path: Path) -> None:
    dataset = open_dataset(str(packed_folders(tmp_path)))
    rows = [row for shard in range(len(dataset.manifest.shards)) for row in index_rows(dataset, shard)]
    assert [[label] for label in labels_of(dataset, what="it").tolist()] == [list(row.labels) for row in rows]


def test_several_labels_are_refused(tmp_path: Path) -> None:
    url = str(packed_with_weights(tmp_path, ["a,", "a|b,1|1", "b,"]))
    with pytest.raises(UserError, match="has a sample with 2 labels; a measurement needs images with exactly one"):
        labels_of(open_dataset(url), what="a measurement")


@pytest.mark.parametrize(
    ("labels", "least", "message"),
    [
        pytest.param(
            [0, 0, 0, 1, 1, 2], 2, "u has 1 images of class 'c', fewer than --shots 2; allowed: at most 1", id="one"
        ),
        pytest.param([0, 0, 0, 1, 1, 2], 3, r"--shots 3 \(2 of 3 classes have too few\); allowed", id="several"),
        pytest.param([0, 1], 1, "u has 0 images of class 'c', .* give a dataset with images of every class", id="none"),
    ],
)
def test_too_few_images_are_refused(labels: list[int], least: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        refuse_too_few(np.array(labels), ("a", "b", "c"), least=least, flag=f"--shots {least}", url="u")
    refuse_too_few(np.array(labels), ("a", "b"), least=1, flag="--shots 1", url="u")

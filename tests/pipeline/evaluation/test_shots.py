"""The shots of each class: nested, of the right class, different for every seed, and never different tomorrow."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.evaluation.shots import chosen_shots, labels_of, refuse_too_few
from shards.dataset import open_dataset
from shards.errors import UserError
from tests.rigs.datasets import index_rows, packed_folders, packed_with_weights


@given(seed=st.integers(0, 2**32), num_classes=st.integers(1, 7), more=st.integers(0, 9))
def test_few_shots_are_among_more_shots(seed: int, num_classes: int, more: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(num_classes), 10 + more))
    ten = chosen_shots(labels, num_classes=num_classes, shots=10, seed=seed)
    assert ten.shape == (num_classes, 10)
    assert np.unique(ten).size == ten.size
    assert (labels[ten] == np.arange(num_classes)[:, None]).all()
    assert np.array_equal(chosen_shots(labels, num_classes=num_classes, shots=5, seed=seed), ten[:, :5])


def test_the_choice_never_changes() -> None:
    labels = np.arange(40) % 2
    assert chosen_shots(labels, num_classes=2, shots=3, seed=0).tolist() == EXPECTED
    assert chosen_shots(labels, num_classes=2, shots=3, seed=1).tolist() != EXPECTED


EXPECTED = [[28, 8, 12], [9, 13, 17]]


def test_every_image_is_chosen_equally_often() -> None:
    labels = np.zeros(20, dtype=np.int64)
    chosen = [chosen_shots(labels, num_classes=1, shots=5, seed=seed) for seed in range(2000)]
    nums = np.bincount(np.concatenate(chosen, axis=None), minlength=20)  # 500 each, deviation 19
    assert 410 < nums.min() < nums.max() < 590


def test_labels_are_those_of_the_index(tmp_path: Path) -> None:
    dataset = open_dataset(str(packed_folders(tmp_path)))
    rows = [row for shard in range(len(dataset.manifest.shards)) for row in index_rows(dataset, shard)]
    assert [[label] for label in labels_of(dataset).tolist()] == [list(row.labels) for row in rows]


def test_several_labels_are_refused(tmp_path: Path) -> None:
    url = str(packed_with_weights(tmp_path, ["a,", "a|b,1|1", "b,"]))
    with pytest.raises(UserError, match="has a sample with 2 labels; a few-shot measurement needs images with exactly"):
        labels_of(open_dataset(url))


@pytest.mark.parametrize(
    ("labels", "shots", "message"),
    [
        pytest.param(
            [0, 0, 0, 1, 1, 2], 2, "u has 1 images of class 'c', fewer than --shots 2; allowed: at most 1", id="one"
        ),
        pytest.param([0, 0, 0, 1, 1, 2], 3, r"--shots 3 \(2 of 3 classes have too few\); allowed", id="several"),
        pytest.param([0, 1], 1, "u has 0 images of class 'c', .* give a dataset with images of every class", id="none"),
    ],
)
def test_too_few_images_are_refused(labels: list[int], shots: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        refuse_too_few(np.array(labels), ("a", "b", "c"), shots=shots, url="u")
    refuse_too_few(np.array(labels), ("a", "b"), shots=1, url="u")

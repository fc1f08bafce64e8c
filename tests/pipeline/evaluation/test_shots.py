"""The shots of each class: nested, of the right class, different for every seed, and never different tomorrow."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.evaluation.shots import chosen_shots


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

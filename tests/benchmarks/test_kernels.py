"""The kernels that the benchmark compares compute the same results."""

import pytest
import torch

from benchmarks.kernels import attention, measured


@pytest.mark.parametrize("shape", [(2, 3, 17, 8), (1, 2, 1025, 4)])
def test_both_of_a_pair_are_the_same_gradient(shape: tuple[int, int, int, int]) -> None:
    ours, theirs = (one() for one in attention(shape))
    assert isinstance(ours, tuple)
    assert isinstance(theirs, tuple)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0.05, atol=0.02)  # both are rounded to bf16 several times


def test_a_pair_is_measured_round_by_round() -> None:
    row = measured((lambda: sum(range(400_000)), lambda: sum(range(100_000))), rounds=5)
    assert 2.0 < row["ratio"][1] < 8.0
    assert row["ours"][1] > row["pytorch"][1] > 0

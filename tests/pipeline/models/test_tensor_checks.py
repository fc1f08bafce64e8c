"""What every file of tensors is checked for."""

import pytest
import torch

from pipeline.models.tensor_checks import MOST_TENSORS, refuse_absurd_tensors, refuse_not_finite
from shards.errors import InvalidDataError

LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 500, 999])
def test_one_value_is_enough(bad: float, at: int) -> None:
    value = torch.randn(10, 100)
    value.flatten()[at] = bad
    with pytest.raises(InvalidDataError, match=r"^w has 1 values of 1,000 that are not finite .* give other weights"):
        refuse_not_finite(value, "w")


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.full((1000,), LARGEST), id="a sum would overflow"),
        pytest.param(torch.tensor([LARGEST, -LARGEST, 1e-45]), id="the ends of the range"),
        pytest.param(torch.zeros(0, 3), id="nothing"),
        pytest.param(torch.tensor(2.0), id="one number"),
    ],
)
def test_what_is_finite_passes_as_it_is(value: torch.Tensor) -> None:
    assert refuse_not_finite(value, "w") is value


def test_more_tensors_than_any_model_has() -> None:
    with pytest.raises(InvalidDataError, match=r"'w' has 100,001 tensors; allowed: 100,000"):
        refuse_absurd_tensors("w", dict.fromkeys(map(str, range(MOST_TENSORS + 1)), (1,)))

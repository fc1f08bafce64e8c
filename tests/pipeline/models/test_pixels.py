"""Pixels in the value range of the paper's code."""

import pytest
import torch

from pipeline.models.pixels import centred

EVERY_BYTE = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(-1, -1, -1, 3)


def test_black_is_minus_one_and_white_is_one() -> None:
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).reshape(1, 1, 3, 1).expand(-1, -1, -1, 3)
    expected = torch.tensor([-1.0, 1.0, -0.6]).reshape(1, 1, 3, 1).expand(-1, -1, -1, 3)
    torch.testing.assert_close(centred(images, torch.float32), expected)


def test_bytes_and_the_same_numbers_as_floats_are_one() -> None:
    assert torch.equal(centred(EVERY_BYTE, torch.float32), centred(EVERY_BYTE.float(), torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_computed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    found = centred(EVERY_BYTE, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, ((EVERY_BYTE.float() - 127.5) / 127.5).to(dtype))

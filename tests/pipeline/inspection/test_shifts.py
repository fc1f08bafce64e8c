"""What a shift changes, on models whose answer is known: whole patches change nothing where there are no positions."""

from typing import Any

import pytest
import torch

from pipeline.inspection.shifts import consistency, shifts_for
from tests.pipeline.models.test_vit import random_model


def similar_at(shifts: range, **fields: Any) -> torch.Tensor:
    """Of images that repeat after their own width, so that a shift by a patch moves each patch to the next place."""
    model = random_model(pooling="average", **fields)  # 3 x 3 patches of 4 px
    if model.embed.position is not None:
        with torch.no_grad():
            model.embed.position.mul_(20)
    size = model.config.image_size
    rows = torch.randint(0, 256, (2, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    images = torch.cat([rows, rows], dim=2)
    images = torch.cat([images, images], dim=1)[:, :, : 2 * size]
    return consistency(model, images, shifts).similar


def test_shifts_by_whole_patches_change_nothing_without_positions() -> None:
    without = similar_at(range(0, 9, 2), position="none")
    assert without[[0, 2, 4]] == pytest.approx(torch.ones(3, 2).numpy(), abs=1e-5)
    assert without[[1, 3]].max() < 0.9999
    learned = similar_at(range(0, 9, 2))
    assert learned[0] == pytest.approx(torch.ones(2).numpy(), abs=1e-5)
    assert learned[[1, 2, 3, 4]].max() < 0.9999


@pytest.mark.parametrize(
    ("image_size", "stride", "last", "num"),
    [(224, 16, 32, 17), (224, 32, 64, 17), (32, 4, 8, 9), (12, 4, 6, 7), (1, 1, 1, 2), (518, 14, 28, 15)],
)
def test_shifts_reach_two_patches(image_size: int, stride: int, last: int, num: int) -> None:
    shifts = shifts_for(image_size, stride=stride)
    assert (shifts[0], shifts[-1], len(shifts)) == (0, last, num)

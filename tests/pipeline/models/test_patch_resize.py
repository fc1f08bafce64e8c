"""The patch embedding at another patch size, against big_vision's way in NumPy, timm's function, and its purpose."""

from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from pipeline.models.patch_resize import resized_patches

SIDES = [(8, 16), (16, 8), (4, 7), (16, 14), (3, 1)]


def random_weight(side: int, *, width: int = 5) -> torch.Tensor:
    return torch.randn(width, side * side * 3, generator=torch.Generator().manual_seed(side))


def as_convolution(weight: torch.Tensor, side: int) -> torch.Tensor:
    """(D, P * P * C) -> (D, C, P, P)."""
    return weight.reshape(len(weight), side, side, 3).permute(0, 3, 1, 2)


def bilinear(image: np.ndarray, to_side: int) -> np.ndarray:
    """Half-pixel centres without antialiasing, one pixel at a time: what tf.image.resize computes."""
    side, out = len(image), np.zeros((to_side, to_side))
    for row, column in np.ndindex(out.shape):
        y, x = (min(max((at + 0.5) * side / to_side - 0.5, 0), side - 1) for at in (row, column))
        top, left = int(y), int(x)
        down, right = min(top + 1, side - 1), min(left + 1, side - 1)
        y, x = y - top, x - left
        above = (1 - x) * image[top, left] + x * image[top, right]
        out[row, column] = (1 - y) * above + y * ((1 - x) * image[down, left] + x * image[down, right])
    return out


@pytest.mark.parametrize(("from_side", "to_side"), SIDES)
def test_it_is_big_visions_in_numpy(from_side: int, to_side: int) -> None:
    weight = random_weight(from_side)
    unit = np.eye(from_side**2).reshape(-1, from_side, from_side)
    resizing = np.stack([bilinear(one, to_side).reshape(-1) for one in unit]).T
    kernels = weight.double().numpy().reshape(5, from_side**2, 3)
    expected = np.einsum("qp,dpc->dqc", np.linalg.pinv(resizing.T), kernels).reshape(5, -1)
    found = resized_patches(weight, from_side=from_side, to_side=to_side)
    assert (found.shape, found.dtype) == ((5, to_side**2 * 3), torch.float32)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("from_side", "to_side"), SIDES)
def test_it_is_timms_as_timm_reads_big_visions_files(timm: ModuleType, from_side: int, to_side: int) -> None:
    weight = random_weight(from_side)
    found = as_convolution(resized_patches(weight, from_side=from_side, to_side=to_side), to_side)
    size = [to_side, to_side]
    theirs = timm.layers.resample_patch_embed(
        as_convolution(weight, from_side), size, interpolation="bilinear", antialias=False
    )
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)  # timm's inverse is of fp32


@pytest.mark.parametrize(("from_side", "to_side"), [(8, 16), (4, 7), (14, 16)])
def test_larger_patches_embed_an_enlarged_image_as_before(from_side: int, to_side: int) -> None:
    weight, x_BCPP = random_weight(from_side), torch.rand(6, 3, from_side, from_side, dtype=torch.float64)
    larger = F.interpolate(x_BCPP, size=(to_side, to_side), mode="bilinear", align_corners=False)
    before = torch.einsum("dcpq,bcpq->bd", as_convolution(weight, from_side).double(), x_BCPP)
    new = as_convolution(resized_patches(weight, from_side=from_side, to_side=to_side), to_side).double()
    torch.testing.assert_close(torch.einsum("dcpq,bcpq->bd", new, larger), before, rtol=1e-4, atol=1e-4)


def test_the_same_size_changes_no_bit_and_another_layout_is_refused() -> None:
    weight = random_weight(4)
    assert torch.equal(resized_patches(weight, from_side=4, to_side=4), weight)
    with pytest.raises(ValueError, match=r"\[5, 48\] is not of patches of 5 x 5 px"):
        resized_patches(weight, from_side=5, to_side=4)

"""Converts bytes to the range that the paper's code trains on, [-1, 1], on the device of the images."""

import torch

MIDDLE = 127.5


def centred(images_BHW3: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 or float[B, H, W, 3] in 0..255 -> [B, H, W, 3] in [-1, 1]; computed in fp32, returned in `dtype`."""
    return ((images_BHW3.float() - MIDDLE) / MIDDLE).to(dtype)

"""From bytes to the value range the paper's code trains on, [-1, 1], on whatever device the images are."""

import torch

MIDDLE = 127.5


def centred(images_BHW3: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 or float[B, H, W, 3] in 0..255 -> [B, H, W, 3] in [-1, 1]; computed in fp32, handed on in `dtype`."""
    return ((images_BHW3.float() - MIDDLE) / MIDDLE).to(dtype)

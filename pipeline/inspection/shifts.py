"""How much a model's output changes when an image moves: convolutions build that in, a Vision Transformer learns it.

Source: Zhang, "Making Convolutional Networks Shift-Invariant Again" (2019), section 4: how often two shifts of an image
get the same class. The cosine similarity of the features before the head is finer, and known of any model.

Shape letters: B images, W the width of an image with its margin, S the side that the model takes, N shifts.
"""

from dataclasses import dataclass

import torch

from pipeline.evaluation.features import represented
from pipeline.models.build import Model

_MOST_SHIFTS = 16


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """What is left of the output at each shift: `similar`, the cosine of the features with those of the image where it
    was, float32[N, B]; `is_same`, whether the class is the same, bool[N, B]."""

    similar: torch.Tensor
    is_same: torch.Tensor


def shifts_for(image_size: int, *, stride: int) -> range:
    """Shifts in pixels, from 0 to two patches or half an image, at most 17 of them."""
    most = max(1, min(2 * stride, image_size // 2))
    return range(0, most + 1, max(1, -(-most // _MOST_SHIFTS)))


def consistency(model: Model, images_BWW3: torch.Tensor, shifts: range) -> Consistency:
    """Compares each crop of S columns with the first, which begins at the left edge; rows are those of the centre."""
    size = model.config.image_size
    top = (images_BWW3.shape[1] - size) // 2
    similar, is_same = [], []
    with torch.no_grad():
        for shift in shifts:
            crop = images_BWW3[:, top : top + size, shift : shift + size]
            features_BD, logits = represented(model, crop.contiguous())
            features_BD, classes = features_BD.float(), logits.argmax(dim=-1)
            if shift == 0:
                first_BD, first = features_BD, classes
            similar.append(torch.nn.functional.cosine_similarity(features_BD, first_BD, dim=1))
            is_same.append(classes == first)
    return Consistency(similar=torch.stack(similar).cpu(), is_same=torch.stack(is_same).cpu())

"""The classifier of every model: linear, initially zero, and fp32 whatever the precision of the rest.

Shape letters: B images, D width, K classes.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


class LinearHead(nn.Linear):
    """Linear classifier whose product, bias and constant are fp32 whatever the weights' precision."""

    def __init__(self, width: int, num_classes: int, *, constant: float) -> None:
        if num_classes < 1:
            raise ValueError("num_classes is 0: take it from the dataset before the model is built")
        super().__init__(width, num_classes)
        self.constant = constant

    def forward(self, y_BD: torch.Tensor) -> torch.Tensor:
        """[B, D] -> float32[B, K]."""
        return F.linear(y_BD.float(), self.weight.float(), self.bias.float()) + self.constant

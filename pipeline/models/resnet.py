"""What hybrids and BiT share: convolutions with standardised weights and group norm, and their epsilons.

"Weight Standardization" (Qiao et al., 2019), as in vision_transformer's models_resnet.py and BiT's models.py. The
published codes differ in where epsilon stands and how large it is; trained weights give their own logits under their
own. Shape letters: B images, H W places, C channels, O channels out, I channels in, k kernel.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from pipeline.models.config import ResNetEpsilons

NUM_GROUPS = 32


@dataclass(frozen=True, kw_only=True)
class Epsilons:
    """Group norm's; and that of a standardised weight, w / (sqrt(variance + `in_variance`) + `beside_deviation`)."""

    group_norm: float
    in_variance: float = 0.0
    beside_deviation: float = 0.0


_TIMM = Epsilons(group_norm=1e-5, in_variance=1e-8)
HYBRID_EPSILONS: dict[ResNetEpsilons, Epsilons] = {
    "paper": Epsilons(group_norm=1e-6, beside_deviation=1e-5),  # vit_jax/models_resnet.py
    "timm": _TIMM,
}
BIT_EPSILONS: dict[ResNetEpsilons, Epsilons] = {
    "paper": Epsilons(group_norm=1e-5, in_variance=1e-10),  # bit_pytorch/models.py
    "timm": _TIMM,
}


def group_norm(channels: int, epsilons: Epsilons) -> nn.GroupNorm:
    """Group norm of 32 groups."""
    return nn.GroupNorm(NUM_GROUPS, channels, eps=epsilons.group_norm)


class StandardConv(nn.Module):
    """A convolution without bias whose weights are standardised for each channel out, in fp32 or better.

    Padding: as much on all sides ("even", as PyTorch and BiT), or TensorFlow's SAME, which pads one more at the end
    where the sum is odd (`same`, as the hybrids): the two differ for every stride of 2.
    """

    def __init__(self, sizes: tuple[int, int, int], *, epsilons: Epsilons, stride: int = 1, same: bool = False) -> None:
        """`sizes`: channels in, channels out, kernel."""
        super().__init__()
        channels_in, channels_out, self.kernel = sizes
        self.stride, self.same, self.epsilons = stride, same, epsilons
        self.weight = nn.Parameter(torch.empty(channels_out, channels_in, self.kernel, self.kernel))
        nn.init.kaiming_normal_(self.weight)  # build_model sets the paper's

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        weight_OIkk = self.standardised().to(x_BCHW.dtype)
        if not self.same:
            return F.conv2d(x_BCHW, weight_OIkk, stride=self.stride, padding=self.kernel // 2)
        padded_BCHW = pad_same(x_BCHW, self.kernel, self.stride, value=0.0)
        return F.conv2d(padded_BCHW, weight_OIkk, stride=self.stride)

    def standardised(self) -> torch.Tensor:
        """float32[O, I, k, k] (float64 in a model of that): mean 0 and variance 1 over (I, k, k)."""
        weight_OIkk = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        variance, mean = torch.var_mean(weight_OIkk, dim=(1, 2, 3), keepdim=True, correction=0)
        deviation = torch.sqrt(variance + self.epsilons.in_variance) + self.epsilons.beside_deviation
        standardised: torch.Tensor = (weight_OIkk - mean) / deviation
        return standardised


def pad_same(x_BCHW: torch.Tensor, kernel: int, stride: int, *, value: float) -> torch.Tensor:
    """TensorFlow's SAME: so many places that ceil(size / stride) windows fit, the odd one at the end."""
    height, width = (same_padding(size, kernel, stride) for size in x_BCHW.shape[2:])
    return F.pad(x_BCHW, (*width, *height), value=value)


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Places to add before and after."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2

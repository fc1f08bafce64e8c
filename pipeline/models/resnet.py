"""Shared by hybrids and BiT: stages of units, convolutions with standardised weights, group norm, their epsilons.

"Weight Standardization" (Qiao et al., 2019), as in vision_transformer's models_resnet.py and BiT's models.py. The
published implementations differ in the position and size of epsilon; weights reproduce their logits only with their
own.

Shape letters: B images, H W positions, C channels, O channels out, I channels in, k kernel.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.models.config import ResNetEpsilons, ResNetSize

NUM_GROUPS = 32


@dataclass(frozen=True, kw_only=True)
class Epsilons:
    """Epsilons of group norm and of standardised weights: w / (sqrt(variance + `in_variance`) + `beside_deviation`)."""

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


@dataclass(frozen=True, kw_only=True)
class UnitSize:
    """A unit: channels in, channels between, stride of its (first) 3x3 convolution. A bottleneck has four times as many
    channels out as between, a basic unit as many."""

    channels: int
    inner: int
    stride: int
    is_basic: bool = False

    @property
    def outer(self) -> int:
        """Channels out."""
        return self.inner if self.is_basic else 4 * self.inner

    @property
    def is_projected(self) -> bool:
        """True if the shortcut needs a convolution."""
        return self.channels != self.outer or self.stride != 1


def units_by_stage(size: ResNetSize) -> Iterator[list[UnitSize]]:
    """The sizes of each stage's units: every stage is twice as wide, and all but the first begin with a stride of 2."""
    channels = size.root_width
    for number, num_units in enumerate(size.units):
        inner = size.root_width * 2**number
        first = UnitSize(channels=channels, inner=inner, stride=2 if number else 1, is_basic=size.is_basic)
        channels = first.outer
        yield [first, *[replace(first, channels=channels, stride=1)] * (num_units - 1)]


def stages_of(size: ResNetSize, unit: Callable[[UnitSize, Epsilons], nn.Module], epsilons: Epsilons) -> nn.ModuleList:
    """One list of units per stage; `unit` makes a unit."""
    return nn.ModuleList(
        nn.ModuleList(unit(unit_size, epsilons) for unit_size in stage) for stage in units_by_stage(size)
    )


def through_stages(stages: nn.ModuleList, x_BCHW: torch.Tensor, *, recompute: bool) -> torch.Tensor:
    """Applies one unit after the other; `recompute`: only the input of each unit is kept, the rest is recomputed in the
    backward pass."""
    is_recomputed = recompute and x_BCHW.requires_grad  # not in evaluations, nor if the ResNet is frozen
    for units in stages:
        for unit in units.children():
            x_BCHW = checkpoint(unit, x_BCHW, use_reentrant=False) if is_recomputed else unit(x_BCHW)
    return x_BCHW


class StandardConv(nn.Module):
    """A convolution without bias whose weights are standardised for each channel out, in fp32 or better.

    Padding: the same on all sides (as in PyTorch and BiT), or TensorFlow's SAME (`same`, as in the hybrids), which pads
    one more at the end if the total is odd: the two differ for every stride of 2.
    """

    def __init__(self, sizes: tuple[int, int, int], *, epsilons: Epsilons, stride: int = 1, same: bool = False) -> None:
        """`sizes`: channels in, channels out, kernel."""
        super().__init__()
        channels_in, channels_out, self.kernel = sizes
        self.stride, self.same, self.epsilons = stride, same, epsilons
        self.weight = nn.Parameter(torch.empty(channels_out, channels_in, self.kernel, self.kernel))
        nn.init.kaiming_normal_(self.weight)  # build_model sets the paper's values

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        weight_OIkk = self.standardised().to(x_BCHW.dtype)
        if not self.same:
            return F.conv2d(x_BCHW, weight_OIkk, stride=self.stride, padding=self.kernel // 2)
        padded_BCHW = pad_same(x_BCHW, self.kernel, self.stride, value=0.0)
        return F.conv2d(padded_BCHW, weight_OIkk, stride=self.stride)

    def standardised(self) -> torch.Tensor:
        """float32[O, I, k, k] (float64 in a float64 model): mean 0 and variance 1 over (I, k, k)."""
        weight_OIkk = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        variance, mean = torch.var_mean(weight_OIkk, dim=(1, 2, 3), keepdim=True, correction=0)
        deviation = torch.sqrt(variance + self.epsilons.in_variance) + self.epsilons.beside_deviation
        standardised: torch.Tensor = (weight_OIkk - mean) / deviation
        return standardised


def pad_same(x_BCHW: torch.Tensor, kernel: int, stride: int, *, value: float) -> torch.Tensor:
    """TensorFlow's SAME: padding so that ceil(size / stride) kernels fit; an odd total has one more at the end."""
    height, width = (same_padding(size, kernel, stride) for size in x_BCHW.shape[2:])
    return F.pad(x_BCHW, (*width, *height), value=value)


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Positions to add before and after."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2

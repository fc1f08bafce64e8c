"""ResNets: the front part of a hybrid, and BiT, the paper's baselines.

Both have group norm and standardised weights: "Weight Standardization" (Qiao et al., 2019). The published
implementations differ in the position and size of epsilon; weights reproduce their logits only with the epsilons of
their implementation.

A hybrid ("An Image is Worth 16x16 Words", section 3.1) cuts its patches, usually single positions, out of the ResNet's
map. Its units are post-activation bottlenecks with SAME padding, as in vision_transformer's models_resnet.py; the
transformer that follows is in vit.py.

BiT ("Big Transfer", Kolesnikov et al., 2020) has pre-activation bottlenecks (ResNet-v2) and equal padding on all sides,
as in BiT's models.py. This includes the root, where the map is padded with zeros, not with minus infinity, before
pooling. R18 and R34, which BiT does not have, consist of basic units in the same form, like timm's PreActBasic
(resnetv2.py) with BiT's layers.

Shape letters: B images, H W positions, C channels, O channels out, I channels in, k kernel, D features, K classes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.models.config import ModelConfig, ResNetEpsilons, ResNetSize
from pipeline.models.layers import LinearHead, centred

NUM_GROUPS = 32


@dataclass(frozen=True, kw_only=True)
class Epsilons:
    """The epsilons of group norm and of standardised weights: w / (sqrt(variance + `in_variance`) +
    `beside_deviation`)."""

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
    """Returns a group norm with 32 groups."""
    return nn.GroupNorm(NUM_GROUPS, channels, eps=epsilons.group_norm)


@dataclass(frozen=True, kw_only=True)
class UnitSize:
    """The sizes of a unit: channels in, channels between, and the stride of its (first) 3x3 convolution. A bottleneck
    has four times as many channels out as between, a basic unit the same number."""

    channels: int
    inner: int
    stride: int
    is_basic: bool = False

    @property
    def outer(self) -> int:
        """The number of channels out."""
        return self.inner if self.is_basic else 4 * self.inner

    @property
    def is_projected(self) -> bool:
        """True if the shortcut needs a convolution."""
        return self.channels != self.outer or self.stride != 1


def units_by_stage(size: ResNetSize) -> Iterator[list[UnitSize]]:
    """Yields the sizes of each stage's units. Every stage is twice as wide as the one before, and all but the first
    begin with a stride of 2."""
    channels = size.root_width
    for number, num_units in enumerate(size.units):
        inner = size.root_width * 2**number
        first = UnitSize(channels=channels, inner=inner, stride=2 if number else 1, is_basic=size.is_basic)
        channels = first.outer
        yield [first, *[replace(first, channels=channels, stride=1)] * (num_units - 1)]


def stages_of(size: ResNetSize, unit: Callable[[UnitSize, Epsilons], nn.Module], epsilons: Epsilons) -> nn.ModuleList:
    """Returns a list of units for each stage. `unit` makes a unit."""
    return nn.ModuleList(
        nn.ModuleList(unit(unit_size, epsilons) for unit_size in stage) for stage in units_by_stage(size)
    )


def through_stages(stages: nn.ModuleList, x_BCHW: torch.Tensor, *, recompute: bool) -> torch.Tensor:
    """Applies all units in order. With `recompute`, only the input of each unit is kept, and the rest is recomputed in
    the backward pass."""
    is_recomputed = recompute and x_BCHW.requires_grad  # never in evaluations or if the ResNet is frozen
    for units in stages:
        for unit in units.children():
            x_BCHW = checkpoint(unit, x_BCHW, use_reentrant=False) if is_recomputed else unit(x_BCHW)
    return x_BCHW


class StandardConv(nn.Module):
    """A convolution without bias whose weights are standardised for each channel out, in fp32 or better.

    Padding is equal on all sides, as in PyTorch and BiT. With `same`, as in the hybrids, it is TensorFlow's SAME, which
    pads one more at the end if the total is odd. The two differ if the stride is 2.
    """

    def __init__(self, sizes: tuple[int, int, int], *, epsilons: Epsilons, stride: int = 1, same: bool = False) -> None:
        """`sizes`: the channels in, the channels out, and the side of the kernel."""
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
        """Returns the weights with mean 0 and variance 1 over (I, k, k): float32[O, I, k, k] (float64 in a float64
        model)."""
        weight_OIkk = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        variance, mean = torch.var_mean(weight_OIkk, dim=(1, 2, 3), keepdim=True, correction=0)
        deviation = torch.sqrt(variance + self.epsilons.in_variance) + self.epsilons.beside_deviation
        standardised: torch.Tensor = (weight_OIkk - mean) / deviation
        return standardised


def pad_same(x_BCHW: torch.Tensor, kernel: int, stride: int, *, value: float) -> torch.Tensor:
    """Pads as TensorFlow's SAME does, so that ceil(size / stride) kernels fit. If the total is odd, one more is added
    at the end."""
    height, width = (same_padding(size, kernel, stride) for size in x_BCHW.shape[2:])
    return F.pad(x_BCHW, (*width, *height), value=value)


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Returns the numbers of positions to add before and after."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


class HybridResNet(nn.Module):
    """The ResNet of a hybrid. It maps [B, H, W, 3] pixels in [-1, 1] to [B, H / stride, W / stride, C].
    `checkpoint_blocks` is as in ViT."""

    def __init__(self, size: ResNetSize, *, epsilons: ResNetEpsilons) -> None:
        super().__init__()
        eps = HYBRID_EPSILONS[epsilons]
        self.checkpoint_blocks = False
        self.conv_root = StandardConv((3, size.root_width, 7), stride=2, same=True, epsilons=eps)
        self.norm_root = group_norm(size.root_width, eps)
        self.stages = stages_of(size, PostActivationUnit, eps)

    def forward(self, x_BHWC: torch.Tensor) -> torch.Tensor:
        x_BCHW = x_BHWC.permute(0, 3, 1, 2)
        x_BCHW = F.relu(self.norm_root(self.conv_root(x_BCHW)))
        x_BCHW = F.max_pool2d(pad_same(x_BCHW, 3, 2, value=float("-inf")), kernel_size=3, stride=2)
        x_BCHW = through_stages(self.stages, x_BCHW, recompute=self.checkpoint_blocks)
        return x_BCHW.permute(0, 2, 3, 1)


class PostActivationUnit(nn.Module):
    """A bottleneck: 1x1, 3x3 (with the stride), 1x1. The last norm (gn3) starts at zero, so the unit adds nothing at
    first."""

    def __init__(self, size: UnitSize, epsilons: Epsilons) -> None:
        super().__init__()
        channels, inner, outer, stride = size.channels, size.inner, size.outer, size.stride
        self.conv1 = StandardConv((channels, inner, 1), epsilons=epsilons)
        self.norm1 = group_norm(inner, epsilons)
        self.conv2 = StandardConv((inner, inner, 3), stride=stride, same=True, epsilons=epsilons)
        self.norm2 = group_norm(inner, epsilons)
        self.conv3 = StandardConv((inner, outer, 1), epsilons=epsilons)
        self.norm_out = group_norm(outer, epsilons)
        self.conv_proj = (
            StandardConv((channels, outer, 1), stride=stride, same=True, epsilons=epsilons)
            if size.is_projected
            else None
        )
        self.norm_proj = group_norm(outer, epsilons) if size.is_projected else None

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y_BCHW = F.relu(self.norm1(self.conv1(x_BCHW)))
        y_BCHW = F.relu(self.norm2(self.conv2(y_BCHW)))
        y_BCHW = self.norm_out(self.conv3(y_BCHW))
        if self.conv_proj is not None and self.norm_proj is not None:
            x_BCHW = self.norm_proj(self.conv_proj(x_BCHW))
        return F.relu(x_BCHW + y_BCHW)


class BiT(nn.Module):
    """A BiT ResNet. It maps uint8[B, H, W, 3] images to float32[B, K] logits. `checkpoint_blocks` is as in ViT."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.resnet
        if not config.is_bit or size is None:
            raise ValueError(f"{config.name} is none of BiT's ResNets")
        eps = BIT_EPSILONS[config.resnet_epsilons]
        self.config, self.checkpoint_blocks = config, False
        self.conv_root = StandardConv((3, size.root_width, 7), stride=2, epsilons=eps)
        self.stages = stages_of(size, BasicPreActivationUnit if size.is_basic else PreActivationUnit, eps)
        self.norm = group_norm(size.width, eps)
        self.head = LinearHead(size.width, config.num_classes, constant=config.head_bias)

    def forward(self, images_BHW3: torch.Tensor) -> torch.Tensor:
        """Returns float32[B, K] logits."""
        logits_BK: torch.Tensor = self.head(self.features(images_BHW3))
        return logits_BK

    def features(self, images_BHW3: torch.Tensor) -> torch.Tensor:
        """Returns the mean over all positions of the last map: [B, D]."""
        x_BCHW = centred(images_BHW3, self.head.weight.dtype).permute(0, 3, 1, 2)
        x_BCHW = F.max_pool2d(F.pad(self.conv_root(x_BCHW), (1, 1, 1, 1)), kernel_size=3, stride=2)
        x_BCHW = through_stages(self.stages, x_BCHW, recompute=self.checkpoint_blocks)
        return F.relu(self.norm(x_BCHW)).mean(dim=(2, 3))


class PreActivationUnit(nn.Module):
    """A bottleneck: 1x1, 3x3 (with the stride), 1x1, each after its norm and ReLU. A projected shortcut also starts
    after the first norm and ReLU."""

    def __init__(self, size: UnitSize, epsilons: Epsilons) -> None:
        super().__init__()
        channels, inner, outer, stride = size.channels, size.inner, size.outer, size.stride
        self.norm1 = group_norm(channels, epsilons)
        self.conv1 = StandardConv((channels, inner, 1), epsilons=epsilons)
        self.norm2 = group_norm(inner, epsilons)
        self.conv2 = StandardConv((inner, inner, 3), stride=stride, epsilons=epsilons)
        self.norm3 = group_norm(inner, epsilons)
        self.conv3 = StandardConv((inner, outer, 1), epsilons=epsilons)
        self.conv_proj = (
            StandardConv((channels, outer, 1), stride=stride, epsilons=epsilons) if size.is_projected else None
        )

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y_BCHW = F.relu(self.norm1(x_BCHW))
        shortcut_BCHW = x_BCHW if self.conv_proj is None else self.conv_proj(y_BCHW)
        y_BCHW = self.conv1(y_BCHW)
        y_BCHW = self.conv2(F.relu(self.norm2(y_BCHW)))
        result: torch.Tensor = shortcut_BCHW + self.conv3(F.relu(self.norm3(y_BCHW)))
        return result


class BasicPreActivationUnit(nn.Module):
    """Two 3x3 convolutions (the first with the stride), each after its norm and ReLU. The shortcut is as in
    PreActivationUnit."""

    def __init__(self, size: UnitSize, epsilons: Epsilons) -> None:
        super().__init__()
        channels, outer, stride = size.channels, size.outer, size.stride
        self.norm1 = group_norm(channels, epsilons)
        self.conv1 = StandardConv((channels, outer, 3), stride=stride, epsilons=epsilons)
        self.norm2 = group_norm(outer, epsilons)
        self.conv2 = StandardConv((outer, outer, 3), epsilons=epsilons)
        self.conv_proj = (
            StandardConv((channels, outer, 1), stride=stride, epsilons=epsilons) if size.is_projected else None
        )

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y_BCHW = F.relu(self.norm1(x_BCHW))
        shortcut_BCHW = x_BCHW if self.conv_proj is None else self.conv_proj(y_BCHW)
        result: torch.Tensor = shortcut_BCHW + self.conv2(F.relu(self.norm2(self.conv1(y_BCHW))))
        return result

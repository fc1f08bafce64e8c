"""The ResNet in front of a hybrid ("An Image is Worth 16x16 Words", section 3.1): each position of its map is a patch.

Post-activation bottlenecks with group norm, standardised weights and SAME padding, as in vision_transformer's
models_resnet.py. The transformer that follows is in vit.py. Shape letters: B images, H W positions, C channels.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from pipeline.models.config import ResNetEpsilons, ResNetSize
from pipeline.models.resnet import (
    HYBRID_EPSILONS,
    Epsilons,
    StandardConv,
    UnitSize,
    group_norm,
    pad_same,
    stages_of,
    through_stages,
)


class HybridResNet(nn.Module):
    """[B, H, W, 3] in [-1, 1] -> [B, H / stride, W / stride, C]. `checkpoint_blocks`: as in ViT."""

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
    """A bottleneck: 1x1, 3x3 (with the stride), 1x1; the last norm (gn3) starts at zero, so it adds nothing."""

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

"""BiT's ResNets, the paper's baselines ("Big Transfer", Kolesnikov et al., 2020), as in BiT's models.py.

Pre-activation bottlenecks (ResNet-v2) with group norm, standardised weights and the same padding on all sides, at the
root too (where zeros, not minus infinity, surround the map before pooling). R18 and R34, which BiT does not have, are
basic units in the same form, as timm's PreActBasic (resnetv2.py) with BiT's layers. Shape letters: B images, H W
positions, C channels, D features, K classes.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from pipeline.models.config import ModelConfig
from pipeline.models.head import LinearHead
from pipeline.models.pixels import centred
from pipeline.models.resnet import BIT_EPSILONS, Epsilons, StandardConv, UnitSize, group_norm, stages_of, through_stages


class BiT(nn.Module):
    """uint8[B, H, W, 3] images -> float32[B, K] logits. `checkpoint_blocks`: as in ViT."""

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
        """float32[B, K] logits."""
        logits_BK: torch.Tensor = self.head(self.features(images_BHW3))
        return logits_BK

    def features(self, images_BHW3: torch.Tensor) -> torch.Tensor:
        """The mean over all positions of the last map: [B, D]."""
        x_BCHW = centred(images_BHW3, self.head.weight.dtype).permute(0, 3, 1, 2)
        x_BCHW = F.max_pool2d(F.pad(self.conv_root(x_BCHW), (1, 1, 1, 1)), kernel_size=3, stride=2)
        x_BCHW = through_stages(self.stages, x_BCHW, recompute=self.checkpoint_blocks)
        return F.relu(self.norm(x_BCHW)).mean(dim=(2, 3))


class PreActivationUnit(nn.Module):
    """A bottleneck: 1x1, 3x3 (with the stride), 1x1, each after its norm and ReLU; a projected shortcut also
    starts after the first norm and ReLU."""

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
    """Two 3x3 convolutions (the first with the stride), each after its norm and ReLU; the shortcut as above."""

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

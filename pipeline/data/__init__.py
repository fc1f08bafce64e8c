"""Planned reads -> decode -> augment -> batches of uint8 images."""

from pipeline.data.augment import AugmentConfig
from pipeline.data.batches import Batch
from pipeline.data.config import DataConfig
from pipeline.data.mixup import MixupConfig, mix_images, mix_targets, mix_weights
from pipeline.data.randaugment import RandAugmentConfig
from pipeline.data.stream import BatchStream, train_batches
from shards.storage.ranges import ReadConfig

__all__ = [
    "AugmentConfig",
    "Batch",
    "BatchStream",
    "DataConfig",
    "MixupConfig",
    "RandAugmentConfig",
    "ReadConfig",
    "mix_images",
    "mix_targets",
    "mix_weights",
    "train_batches",
]

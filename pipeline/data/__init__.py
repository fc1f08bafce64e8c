"""Planned reads -> decode -> augment -> batches of uint8 images."""

from pipeline.data.augment import AugmentConfig
from pipeline.data.batches import Batch
from pipeline.data.config import DataConfig, MixPart
from pipeline.data.mixup import MixupConfig
from pipeline.data.randaugment import RandAugmentConfig
from pipeline.data.stream import BatchStream, train_batches
from shards.storage.ranges import ReadConfig

__all__ = [
    "AugmentConfig",
    "Batch",
    "BatchStream",
    "DataConfig",
    "MixPart",
    "MixupConfig",
    "RandAugmentConfig",
    "ReadConfig",
    "train_batches",
]

"""Planned reads -> decode -> augment -> batches of uint8 images.

The names are loaded when they are first used: a configuration can be read without torch, OpenCV or a decoder.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipeline.data.config import AugmentConfig, DataConfig, MixupConfig, RandAugmentConfig
from shards.config import ReadConfig

if TYPE_CHECKING:
    from pipeline.data.batches import Batch
    from pipeline.data.mixup import Mix, draw_mix, mix_images, mix_targets, mix_weights
    from pipeline.data.stream import BatchStream, train_batches

__all__ = [
    "AugmentConfig",
    "Batch",
    "BatchStream",
    "DataConfig",
    "Mix",
    "MixupConfig",
    "RandAugmentConfig",
    "ReadConfig",
    "draw_mix",
    "mix_images",
    "mix_targets",
    "mix_weights",
    "train_batches",
]

_MIXUP = ("mix_images", "mix_targets", "mix_weights")
_MODULES = {
    "Batch": "batches",
    "BatchStream": "stream",
    "Mix": "cutmix",
    "draw_mix": "cutmix",
    "train_batches": "stream",
    **dict.fromkeys(_MIXUP, "mixup"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

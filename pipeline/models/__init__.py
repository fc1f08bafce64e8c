"""Models: Vision Transformers, hybrids and BiT's ResNets, their position embeddings, initial weights and costs.

Names are imported on first use, so that a configuration can be read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipeline.models.config import ModelConfig

if TYPE_CHECKING:
    from pipeline.models.build import Model, build_model, checkpoint_blocks, compile_blocks, shapes_of, unfilled_model
    from pipeline.models.resnet import BiT
    from pipeline.models.vit import ViT

__all__ = [
    "BiT",
    "Model",
    "ModelConfig",
    "ViT",
    "build_model",
    "checkpoint_blocks",
    "compile_blocks",
    "shapes_of",
    "unfilled_model",
]

_BUILD = ("Model", "build_model", "checkpoint_blocks", "compile_blocks", "shapes_of", "unfilled_model")
_MODULES = {"BiT": "resnet", "ViT": "vit", **dict.fromkeys(_BUILD, "build")}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

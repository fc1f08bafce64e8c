"""Models: Vision Transformers, hybrids and BiT's ResNets, their position embeddings, initial weights and costs."""

from pipeline.models.bit import BiT
from pipeline.models.build import Model, build_model, checkpoint_blocks, compile_blocks, shapes_of, unfilled_model
from pipeline.models.config import ModelConfig
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

"""Models: the Vision Transformer, its position embeddings, its initial weights, weights in and out."""

from pipeline.models.config import ModelConfig
from pipeline.models.vit import ViT, build_model, shapes_of

__all__ = ["ModelConfig", "ViT", "build_model", "shapes_of"]

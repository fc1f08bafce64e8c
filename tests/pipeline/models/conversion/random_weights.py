"""Small models with random weights, whose tensors all differ, and the same weights in the files of other libraries."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.models import ModelConfig, build_model
from pipeline.models.build import Model
from pipeline.models.weights.folder import Weights, filled_model
from pipeline.models.weights.safetensors import TensorByName

TINY: dict[str, Any] = {"name": "vit", "image_size": 16, "num_classes": 3, "patch": 4, "depth": 2, "width": 12}
TINY |= {"mlp_width": 20, "num_heads": 2}
VIT = ModelConfig(**TINY)
AVERAGE = ModelConfig(**TINY | {"pooling": "average"})
REPRESENTATION = ModelConfig(**TINY | {"representation": True})
ROOT = ModelConfig(**TINY | {"image_size": 32, "patch": 4, "resnet_units": (), "resnet_factor": 1})
SCALED = ModelConfig(**TINY | {"layer_scale": 1e-4})
REGISTERS = ModelConfig(**TINY | {"registers": 3})
DISTILLED = ModelConfig(**TINY | {"distillation_token": True})
AVERAGE_REGISTERS = ModelConfig(**TINY | {"registers": 3, "pooling": "average"})
QK_NORM = ModelConfig(**TINY | {"qk_norm": True})
MAP = ModelConfig(**TINY | {"pooling": "attention"})
ROTARY = ModelConfig(**TINY | {"position": "rope2d", "num_heads": 3, "gelu": "exact"})
HYBRID = ModelConfig(**TINY | {"image_size": 32, "patch": 1, "resnet_units": (1, 2), "resnet_factor": 1})
BIT = ModelConfig(name="bit_r50x1", num_classes=3, resnet_units=(1, 2), resnet_factor=1)
IMAGES = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))

Arrays = dict[str, NDArray[np.generic]]


def random_model(config: ModelConfig, *, seed: int = 1) -> Model:
    """A model with noise in every tensor."""
    model = build_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def tensors_of(model: Model) -> TensorByName:
    state = model.state_dict()
    return lambda name: state[name]


def logits(model: Model, image_size: int | None = None) -> torch.Tensor:
    side = image_size or model.config.image_size
    with torch.no_grad():
        result: torch.Tensor = model(IMAGES[:, :side, :side] if side <= 32 else IMAGES)
    return result


def assumed_of(weights: Weights) -> tuple[str, ...]:
    """What is assumed about weights, in words."""
    return tuple(map(str, weights.assumed))


def assert_same_tensors(weights: Weights, model: Model) -> None:
    """All tensors are the same, bit for bit."""
    state = model.state_dict()
    assert set(weights.shapes) == set(state)
    assert [name for name in state if not torch.equal(weights.tensor(name), state[name])] == []


def assert_same_logits(weights: Weights, model: Model) -> None:
    difference = (logits(filled_model(weights)) - logits(model)).abs().max()
    assert float(logits(model).std()) > 0.1
    assert float(difference) < 2e-5


def arrays_in(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}

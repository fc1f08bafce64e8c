"""Vision towers of transformers: the same features or logits as the library's own model, from the folder it writes."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pipeline.models import ViT
from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.open_any import open_any
from pipeline.models.weights.folder import Weights, filled_model
from shards.errors import UserError
from tests.pipeline.models.parity import random_images, theirs_of

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8}
SIZES |= {"image_size": 24, "intermediate_size": 48}
DINOV2: dict[str, Any] = SIZES | {"mlp_ratio": 2}
DINOV3_H: dict[str, Any] = SIZES | {"num_register_tokens": 2, "use_gated_mlp": True, "hidden_act": "silu"}
SIGLIP: dict[str, Any] = {"vision_config": SIZES, "num_labels": 3}
SIGLIP["text_config"] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8}
SIGLIP["text_config"] |= {"vocab_size": 9}
IMAGES = random_images(24, 24)
BOUND = 1e-5


def written(transformers: ModuleType, folder: Path, name: str, fields: dict[str, Any]) -> Any:
    """transformers' own model of this name with noise in every tensor, and its folder."""
    config_class = transformers.AutoConfig.for_model
    kind = {"Dinov2": "dinov2", "DINOv3": "dinov3_vit", "Siglip2": "siglip2", "Siglip": "siglip"}
    start = next(each for each in kind if name.startswith(each))
    model_type = "dinov2_with_registers" if "Registers" in name else kind[start]
    model_type += "_vision_model" if name.endswith("VisionModel") else ""
    model = getattr(transformers, name)(config_class(model_type, **fields)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model


def features_of(weights: Weights) -> torch.Tensor:
    model = filled_model(weights)
    assert isinstance(model, ViT)
    with torch.no_grad():
        return model.features(IMAGES)


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param("Dinov2Model", DINOV2, id="DINOv2"),
        pytest.param("Dinov2Model", DINOV2 | {"use_swiglu_ffn": True}, id="DINOv2 giant"),
        pytest.param("Dinov2WithRegistersModel", DINOV2 | {"num_register_tokens": 2}, id="with registers"),
        pytest.param("DINOv3ViTModel", SIZES | {"num_register_tokens": 2}, id="DINOv3"),
        pytest.param("DINOv3ViTModel", DINOV3_H, id="DINOv3 H+"),
        pytest.param("SiglipVisionModel", SIZES, id="SigLIP"),
    ],
)
def test_features_are_the_librarys(transformers: ModuleType, tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    model = written(transformers, tmp_path, name, fields)
    with torch.no_grad():
        theirs_BD = model(theirs_of(IMAGES)).pooler_output
    assert off(features_of(open_any(str(tmp_path), Hints())), theirs_BD) < BOUND


def flattened(images_BHW3: torch.Tensor) -> dict[str, torch.Tensor]:
    """What SigLIP 2 takes: patches, rows before columns before channels."""
    pixels = theirs_of(images_BHW3).permute(0, 2, 3, 1)
    patches = pixels.reshape(len(pixels), 3, 8, 3, 8, 3).transpose(2, 3).reshape(len(pixels), 9, -1)
    shapes = torch.tensor([[3, 3]]).expand(len(pixels), -1)
    return {"pixel_values": patches, "spatial_shapes": shapes, "pixel_attention_mask": torch.ones(len(pixels), 9)}


def test_siglip_2s_flexible_tower(transformers: ModuleType, tmp_path: Path) -> None:
    model = written(transformers, tmp_path, "Siglip2VisionModel", SIZES | {"num_patches": 9})
    with torch.no_grad():
        theirs_BD = model(**flattened(IMAGES)).pooler_output
    assert off(features_of(open_any(str(tmp_path), Hints())), theirs_BD) < BOUND


def test_siglips_classifier_reads_the_mean(transformers: ModuleType, tmp_path: Path) -> None:
    model = written(transformers, tmp_path, "SiglipForImageClassification", SIGLIP)
    with torch.no_grad():
        theirs_BK = model(theirs_of(IMAGES)).logits
        ours_BK = filled_model(open_any(str(tmp_path), Hints()))(IMAGES)
    assert off(ours_BK, theirs_BK) < BOUND


def test_dinov2s_classifier_is_left_out_with_a_warning(
    transformers: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = written(transformers, tmp_path, "Dinov2ForImageClassification", DINOV2 | {"num_labels": 3})
    with torch.no_grad():
        theirs_BD = model.dinov2(theirs_of(IMAGES)).pooler_output
    weights = open_any(str(tmp_path), Hints())
    assert weights.config.num_classes == 0
    assert "its classifier is left out" in caplog.text
    assert off(features_of(weights), theirs_BD) < BOUND


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param("SiglipVisionModel", SIZES | {"hidden_act": "relu"}, id="ReLU"),
        pytest.param("DINOv3ViTModel", DINOV3_H | {"hidden_act": "gelu"}, id="a gate with a GELU"),
    ],
)
def test_another_activation_is_refused(
    transformers: ModuleType, tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    written(transformers, tmp_path, name, fields)
    with pytest.raises(UserError) as caught:
        open_any(str(tmp_path), Hints())
    assert "hidden_act" in str(caught.value)

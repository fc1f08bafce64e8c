"""The pixels of weights: what files declare, what their names say, and that folding them in changes no logit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import conv2d

from pipeline.models.config import ModelConfig
from pipeline.models.conversion.image_processor import image_processor
from pipeline.models.conversion.pixel_range import (
    PIXELS,
    PixelRange,
    folded,
    name_by_words,
    of_processor,
    of_timm,
)
from pipeline.models.weights.folder import PIXELS_FILE
from pipeline.shared_settings import EvaluationTransform

OURS = image_processor(224, EvaluationTransform())
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
VIT = ModelConfig(name="vit_ti16", num_classes=3)


@pytest.mark.parametrize("wrapped", [False, True], ids=["preprocessor", "processor"])
@pytest.mark.parametrize(
    ("said", "pixels"),
    [
        pytest.param(OURS, PIXELS["paper"], id="ours"),
        pytest.param({"do_resize": True}, None, id="nothing: each kind of processor has its own default"),
        pytest.param({"image_mean": [0.5], "image_std": [0.5] * 3}, PIXELS["paper"], id="one number"),
        pytest.param({"image_mean": IMAGENET[0], "image_std": IMAGENET[1]}, PIXELS["imagenet"], id="ImageNet's"),
        pytest.param({"image_std": 0.25}, PixelRange(mean=(0.5,) * 3, deviation=(0.25,) * 3), id="a deviation"),
    ],
)
def test_pixels_that_a_processor_declares(
    said: dict[str, Any], pixels: PixelRange | None, wrapped: bool, tmp_path: Path
) -> None:
    assert of_processor(tmp_path) is None
    name = "processor_config.json" if wrapped else PIXELS_FILE
    (tmp_path / name).write_text(json.dumps({"image_processor": said} if wrapped else said))
    assert of_processor(tmp_path) == pixels


def test_pixels_that_timm_declares() -> None:
    assert of_timm({}, where="w") is None
    assert of_timm({"mean": IMAGENET[0], "std": IMAGENET[1]}, where="w") == PIXELS["imagenet"]
    assert of_timm({"mean": [0.5, 0.5, 0.5]}, where="w") == PIXELS["paper"]
    assert of_timm({"mean": [127.5] * 3, "std": [127.5] * 3}, where="w") == PIXELS["paper"]
    assert of_timm({"mean": [0, 0, 0], "std": [1, 1, 1]}, where="w") == PixelRange(mean=(0,) * 3, deviation=(1,) * 3)
    assert of_timm({"imagenet_default_mean_and_std": True, "mean": None}, where="w") == PIXELS["imagenet"]
    assert of_timm({"imagenet_default_mean_and_std": False}, where="w") == PIXELS["paper"]


@pytest.mark.parametrize(
    ("name", "pixels"),
    [
        ("deit_tiny_patch16_224.pth", "imagenet"),
        ("deit3_base_patch16_224.bin", "imagenet"),
        ("mae_pretrain_vit_base.pth", "imagenet"),
        ("dino_deitsmall16_pretrain.pth", "imagenet"),
        ("vit_base_patch14_dinov2.lvd142m.pth", "imagenet"),
        ("vit-b-300ep-mocov3.pth", "imagenet"),
        ("vit_base_patch16_clip_224.openai.safetensors", "clip"),
        ("eva02_base_patch14_224.bin", "clip"),
        ("vit_base_patch16_224.augreg_in21k.safetensors", None),
        ("ViT-B_16.npz", None),
        ("maeander.pth", None),
        ("pytorch_model.bin", None),
    ],
)
def test_what_a_files_name_says(name: str, pixels: str | None) -> None:
    assert name_by_words(name) == pixels


@pytest.mark.parametrize("pixels", [PIXELS["imagenet"], PIXELS["clip"], PixelRange(mean=(0,) * 3, deviation=(1,) * 3)])
def test_folded_pixels_change_no_embedding(pixels: PixelRange) -> None:
    """W ((x / 255 - m) / s) + b of the weights as they were, in float64, against W' (2 x / 255 - 1) + b' in float32."""
    patch, width = VIT.size.patch, VIT.size.width
    tensors = {"embed.patch.weight": torch.randn(width, 3 * patch**2), "embed.patch.bias": torch.randn(width)}
    tensors["norm.weight"] = torch.randn(width)
    tensor = folded(lambda name: tensors[name], VIT, pixels, where="w")
    images_BHW3 = torch.randint(256, (2, 32, 48, 3)).double()

    def embedded(x_BHW3: torch.Tensor, weight_DX: torch.Tensor, bias_D: torch.Tensor) -> torch.Tensor:
        kernel_DCPP = weight_DX.double().reshape(-1, patch, patch, 3).permute(0, 3, 1, 2)
        return conv2d(x_BHW3.permute(0, 3, 1, 2), kernel_DCPP, bias_D.double(), stride=patch)

    theirs_BHW3 = (images_BHW3 / 255 - torch.tensor(pixels.mean)) / torch.tensor(pixels.deviation)
    theirs = embedded(theirs_BHW3, tensors["embed.patch.weight"], tensors["embed.patch.bias"])
    ours = embedded(images_BHW3 / 127.5 - 1, tensor("embed.patch.weight"), tensor("embed.patch.bias"))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    assert tensor("embed.patch.weight").dtype == torch.float32
    assert tensor("norm.weight") is tensors["norm.weight"]


def test_the_papers_pixels_change_no_bit() -> None:
    value = torch.randn(4, 12)
    assert folded(lambda _: value, VIT, PIXELS["paper"], where="w")("embed.patch.weight") is value

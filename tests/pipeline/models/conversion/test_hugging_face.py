"""Hugging Face folders: transformers computes our logits from them, ours are read back, other models are refused."""

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from pipeline.data.transform import evaluation_view_of_pixels
from pipeline.models import ModelConfig
from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.hugging_face import (
    labels_of,
    open_hugging_face,
    save_hugging_face,
    transformers_class,
)
from pipeline.models.conversion.image_processor import PROCESSORS, transform_of
from pipeline.models.conversion.open_any import open_any, usage_for
from pipeline.models.conversion.open_file import open_tensor_file
from pipeline.models.weights.folder import PIXELS_FILE, Weights, filled_model
from pipeline.models.weights.usage import Usage
from pipeline.shared_settings import EvaluationTransform
from tests.pipeline.models.conversion.random_weights import (
    DISTILLED,
    TINY,
    VIT,
    assert_same_tensors,
    assumed_of,
    random_model,
    tensors_of,
)
from tests.pipeline.models.parity import difference, random_images
from tests.pipeline.models.parity import random_model as gentle_model
from tests.rigs.faults import differs, every_fault

LABELS = ("cat", "dog", "Füchsin")
EXACT = ModelConfig(**TINY | {"gelu": "exact", "layer_norm_epsilon": 1e-12})


def saved(folder: Path, config: ModelConfig = VIT, labels: tuple[str, ...] = LABELS) -> Path:
    save_hugging_face(folder, config=config, labels=labels, tensor=tensors_of(random_model(config)))
    return folder


def opened(folder: Path) -> Weights:
    description = json.loads((folder / "config.json").read_text())
    return open_hugging_face(open_tensor_file(folder / "model.safetensors"), description, Hints())


@pytest.mark.parametrize("config", [VIT, EXACT], ids=["as the paper's code", "as Hugging Face's own"])
def test_from_pretrained_gives_our_logits(transformers: ModuleType, tmp_path: Path, config: ModelConfig) -> None:
    other, said = transformers.ViTForImageClassification.from_pretrained(
        saved(tmp_path, config), output_loading_info=True
    )
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (other.config.hidden_act, other.config.layer_norm_eps) == (
        "gelu_pytorch_tanh" if config.gelu == "tanh" else "gelu",
        config.layer_norm_epsilon,
    )
    assert other.config.id2label == dict(enumerate(LABELS))
    assert difference(random_model(config), lambda x: other.eval()(x).logits, random_images(16, 16)) < 2e-5


def test_a_distillation_token_is_a_deit_with_a_teacher(transformers: ModuleType, tmp_path: Path) -> None:
    """Out to transformers, which has our logits, and back from what it saves and from its own state dict. These do not
    say that the model takes our pixels, and a DeiT usually takes ImageNet's."""
    config = replace(DISTILLED, gelu="exact")
    kind, model = getattr(transformers, transformers_class(config)), random_model(config)
    other, said = kind.from_pretrained(saved(tmp_path / "ours", config), output_loading_info=True)
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert difference(model, lambda x: other.eval()(x).logits, random_images(16, 16)) < 2e-5
    other.save_pretrained(tmp_path / "theirs")
    save_file(
        {name: value.contiguous() for name, value in other.state_dict().items()}, tmp_path / "theirs2.safetensors"
    )
    assert_same_tensors(opened(tmp_path / "ours"), model)
    usual = "pixels of mean 0.485 0.456 0.406 and deviation 0.229 0.224 0.225"
    assert assumed_of(open_any(str(tmp_path / "theirs"), Hints())) == (usual,)
    weights = open_any(str(tmp_path / "theirs"), Hints(pixels="paper"))
    assert (weights.config, weights.labels) == (config, LABELS)
    assert_same_tensors(weights, model)
    (tmp_path / "theirs2.safetensors").rename(tmp_path / "theirs" / "model.safetensors")
    assert_same_tensors(open_any(str(tmp_path / "theirs"), Hints(pixels="paper")), model)


def test_what_transformers_saves_comes_in(transformers: ModuleType, tmp_path: Path) -> None:
    """Under the names that any version writes. The defaults are exact GELU and 1e-12."""
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20, image_size=16, patch_size=4
    )
    other = transformers.ViTForImageClassification(config).eval()
    torch.nn.init.normal_(other.classifier.weight)
    other.save_pretrained(tmp_path)
    weights = opened(tmp_path)
    assert (weights.config.gelu, weights.config.layer_norm_epsilon, weights.config.num_classes) == ("exact", 1e-12, 2)
    assert difference(filled_model(weights), lambda x: other(x).logits, random_images(16, 16)) < 2e-5


def test_newer_names_are_read_too(transformers: ModuleType, tmp_path: Path) -> None:
    """The names that the model itself uses since transformers 5."""
    folder = saved(tmp_path)
    other = transformers.ViTForImageClassification.from_pretrained(folder)
    save_file({name: value.contiguous() for name, value in other.state_dict().items()}, folder / "model.safetensors")
    assert_same_tensors(opened(folder), random_model(VIT))


def test_a_model_without_a_head_and_with_a_pooler(transformers: ModuleType, tmp_path: Path) -> None:
    """ViTModel, as the ImageNet-21k weights are published: its pooler is the hidden tanh layer."""
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20, image_size=16, patch_size=4
    )
    transformers.ViTModel(config).save_pretrained(tmp_path)
    weights = opened(tmp_path)
    assert (weights.config.representation, weights.config.num_classes) == (True, 0)
    assert "representation.weight" in weights.shapes


@pytest.mark.parametrize("config", [VIT, EXACT], ids=["tanh", "exact"])
def test_a_round_trip_changes_no_bit(tmp_path: Path, config: ModelConfig) -> None:
    weights = opened(saved(tmp_path, config))
    assert (weights.config, weights.labels) == (config, LABELS)
    assert_same_tensors(weights, random_model(config))


def test_config_and_pixels_are_written_down(tmp_path: Path) -> None:
    description = json.loads((saved(tmp_path, labels=()) / "config.json").read_text())
    assert description["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    assert (description["hidden_act"], description["layer_norm_eps"]) == ("gelu_pytorch_tanh", 1e-6)
    pixels = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert (pixels["image_mean"], pixels["size"]) == ([0.5] * 3, {"height": 16, "width": 16})


@pytest.mark.parametrize(
    ("transform", "kind", "least"),
    [
        pytest.param(EvaluationTransform(antialias=True), "ViTImageProcessor", 50, id="resize, same pixels"),
        # transformers always antialiases, has no average over areas, and rounds the place of the crop down.
        pytest.param(EvaluationTransform(), "ViTImageProcessor", 43, id="resize"),
        pytest.param(EvaluationTransform(filter="area"), "ViTImageProcessor", 48, id="resize by areas"),
        pytest.param(
            EvaluationTransform(mode="central_crop", antialias=True), "CLIPImageProcessor", 45, id="central crop"
        ),
        pytest.param(
            EvaluationTransform(mode="central_crop", filter="area", short_side=131),
            "CLIPImageProcessor",
            44,
            id="central crop of another short side, by areas",
            marks=pytest.mark.long,
        ),
        pytest.param(EvaluationTransform(mode="fewshot", antialias=True), "CLIPImageProcessor", 45, id="few-shot"),
    ],
)
def test_transformers_prepares_images_as_ours(
    transformers: ModuleType,
    test_data: Path,
    tmp_path: Path,
    transform: EvaluationTransform,
    kind: str,
    least: int,
) -> None:
    """transformers reads the export and makes its processor; `least`: of 50 photographs with one top-1."""
    model = gentle_model(ModelConfig(name="vit_ti16", depth=2, num_classes=10, image_size=96))
    torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(3))
    save_hugging_face(
        tmp_path, config=model.config, labels=(), tensor=tensors_of(model), usage=Usage(transform=transform)
    )
    other = transformers.ViTForImageClassification.from_pretrained(tmp_path).eval()
    processor, num_same = transformers.AutoImageProcessor.from_pretrained(tmp_path), 0
    assert type(processor).__name__ == kind
    for path in sorted((test_data / "imagenet-sample").iterdir())[:50]:
        image = Image.open(path)
        ours = np.empty((96, 96, 3), np.uint8)
        evaluation_view_of_pixels(np.asarray(image.convert("RGB")), transform, out=ours)
        theirs_13HW = processor(image, return_tensors="pt")["pixel_values"]
        if least == 50:
            expected = torch.from_numpy(ours) / 127.5 - 1
            torch.testing.assert_close(theirs_13HW[0].permute(1, 2, 0), expected, atol=1.01 / 127.5, rtol=0)
        with torch.no_grad():
            num_same += int(model(torch.from_numpy(ours)[None]).argmax() == other(theirs_13HW).logits.argmax())
    assert num_same >= least


@pytest.mark.parametrize(
    "transform",
    [
        EvaluationTransform(antialias=True),
        EvaluationTransform(filter="bicubic"),
        EvaluationTransform(mode="central_crop", antialias=True, short_side=18),
        EvaluationTransform(mode="central_crop", filter="bicubic", short_side=16),
        EvaluationTransform(mode="fewshot", filter="bicubic", short_side=20),
    ],
    ids=lambda transform: f"{transform.mode} {transform.filter}",
)
def test_how_images_are_prepared_comes_back(tmp_path: Path, transform: EvaluationTransform) -> None:
    weights = random_model(VIT)
    save_hugging_face(tmp_path, config=VIT, labels=LABELS, tensor=tensors_of(weights), usage=Usage(transform=transform))
    assert usage_for(str(tmp_path)).transform == transform


@pytest.mark.parametrize(
    "change",
    [
        {"size": {"height": 16, "width": 18}},
        {"size": {"shortest_edge": 16}},
        {"size": {"height": [16], "width": {}}},
        {"size": "16"},
        {"resample": 1},
        {"resample": True},
        {"do_resize": False},
        {"max_num_patches": 16},
        {"do_center_crop": True, "size": {"shortest_edge": 1 << 40}},
        {"do_center_crop": True, "size": {}},
        {"do_center_crop": True, "size": {"shortest_edge": 18}, "crop_size": {"height": 16, "width": 15}},
        {"do_center_crop": True, "size": {"shortest_edge": 15}, "crop_size": 16},
    ],
    ids=str,
)
def test_what_ours_cannot_prepare_is_prepared_as_by_default_and_said(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = saved(tmp_path)
    said = json.loads((folder / PIXELS_FILE).read_text())
    (folder / PIXELS_FILE).write_text(json.dumps(said | change))
    weights = open_any(str(folder), Hints())
    assert weights.usage.transform == EvaluationTransform()
    (line,) = assumed_of(weights)
    assert line.startswith("transform resize, bilinear and without a crop (the file: {'do_resize': ")
    assert all(repr(value) in line for value in change.values())


CROP = EvaluationTransform(mode="central_crop", filter="bicubic", short_side=18)
SQUARE = EvaluationTransform(mode="fewshot", filter="bicubic", short_side=18)
SMOOTH = EvaluationTransform(antialias=True)
OLD_CLIP: dict[str, Any] = {"size": 18, "do_center_crop": True, "crop_size": 16, "resample": 3}


@pytest.mark.parametrize(
    ("processor", "model_type", "expected"),
    [
        pytest.param(OLD_CLIP, "clip", CROP, id="an old CLIP, which names no class"),
        pytest.param(OLD_CLIP, "dinov2", CROP, id="DINOv2, which has BiT's class"),
        pytest.param(OLD_CLIP, "dinov2_with_registers", CROP, id="DINOv2 with registers"),
        pytest.param(OLD_CLIP, "deit", SQUARE, id="DeiT's square"),
        pytest.param(OLD_CLIP, "vit", SQUARE, id="ViT's square"),
        pytest.param(OLD_CLIP | {"feature_extractor_type": "CLIPFeatureExtractor"}, "vit", CROP, id="an old name"),
        pytest.param(OLD_CLIP | {"image_processor_type": "BitImageProcessorFast"}, "vit", CROP, id="BiT"),
        pytest.param(OLD_CLIP | {"image_processor_type": "DeiTImageProcessor"}, "clip", SQUARE, id="the class decides"),
        pytest.param(
            {**OLD_CLIP, "size": {"shortest_edge": 18}, "image_processor_type": "NewImageProcessor"},
            "vit",
            CROP,
            id="an unknown class that decides nothing",
        ),
        pytest.param({"size": 18, "crop_size": 16}, "clip", CROP, id="CLIP crops and is bicubic by default"),
        pytest.param({"size": 18, "crop_size": 16, "resample": None}, "deit", SQUARE, id="so is DeiT"),
        pytest.param({"size": 16}, "vit", SMOOTH, id="ViT is bilinear and does not crop"),
        pytest.param({"size": 16}, "dinov3_vit", SMOOTH, id="and so is DINOv3"),
        pytest.param(
            {"size": {"height": 16, "width": 16}},
            "siglip",
            EvaluationTransform(filter="bicubic"),
            id="SigLIP is bicubic",
        ),
        pytest.param({"image_mean": [0.5] * 3}, "clip", EvaluationTransform(), id="nothing is declared"),
    ],
)
def test_what_a_processor_leaves_out_is_as_in_its_class(
    processor: dict[str, Any], model_type: str, expected: EvaluationTransform
) -> None:
    assert transform_of(processor, 16, model_type=model_type) == (expected, ())


@every_fault
def test_the_table_is_what_the_classes_of_transformers_do(transformers: ModuleType) -> Iterator[str]:
    for name, known in PROCESSORS.items():
        kind = getattr(transformers, f"{name}ImageProcessor")
        yield from differs(f"{name}: filter", known.resample, int(kind.resample))
        yield from differs(f"{name}: size", {known.size}, set(kind.size.values()))
        yield from differs(f"{name}: crop", known.crops, bool(kind(size=7).do_center_crop))
        if known.crops:
            yield from differs(f"{name}: size of the crop", {known.crop_size}, set(kind.crop_size.values()))
        yield from differs(f"{name}: size of one number", known.sides(7), dict(kind(size=7).size))


@pytest.mark.parametrize(
    ("processor", "model_type", "expected"),
    [
        pytest.param(
            {"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}},
            "dinov2",
            replace(CROP, short_side=592),
            id="DINOv2 as published",
        ),
        pytest.param({"size": 256}, "dinov2", replace(CROP, short_side=592), id="what DINOv2's class has"),
        pytest.param({"size": 256, "crop_size": 224}, "deit", replace(SQUARE, short_side=592), id="a square"),
        pytest.param({"size": 224}, "vit", SMOOTH, id="no crop"),
    ],
)
def test_proportions_are_kept_at_the_models_own_size_and_said(
    processor: dict[str, Any], model_type: str, expected: EvaluationTransform
) -> None:
    found, assumed = transform_of(processor, 518, model_type=model_type)
    assert found == expected
    assert list(map(str, assumed)) == ["transform of the same proportions (the file: for images of 224 px)"]


@pytest.mark.parametrize("given", [{}, {"size": {"shortest_edge": 256}, "resample": 3, "do_center_crop": True}])
def test_a_class_that_is_unknown_and_would_decide_is_not_guessed(given: dict[str, Any]) -> None:
    found, (line,) = transform_of(
        OLD_CLIP | given | {"image_processor_type": "BeitImageProcessor", "crop_size": None}, 16, model_type="vit"
    )
    assert found == EvaluationTransform()
    assert "(the file: {" in str(line)


def test_names_of_many_classes_are_read_at_once() -> None:
    """ImageNet-21k's 21,843 once took minutes, a time that grew with the square."""
    names = {str(number): f"class {number}" for number in range(50_000)}
    start = time.process_time()
    assert len(labels_of(names, 50_000, "w")) == 50_000
    assert time.process_time() - start < 1


def test_a_pooler_beside_a_classifier_is_no_part_of_it(
    transformers: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers classifies from the class token itself, but old files have a pooler as well."""
    folder = saved(tmp_path)
    other = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    pooler = {"vit.pooler.dense.weight": torch.randn(12, 12), "vit.pooler.dense.bias": torch.randn(12)}
    save_file(load_file(folder / "model.safetensors") | pooler, folder / "model.safetensors")
    with caplog.at_level(logging.INFO):
        weights = opened(folder)
    assert not weights.config.representation
    assert "vit.pooler" in caplog.text
    assert difference(filled_model(weights), lambda x: other(x).logits, random_images(16, 16)) < 2e-5


@pytest.mark.parametrize("kind", [dict, list])
def test_names_that_come_twice_are_made_different(tmp_path: Path, kind: type) -> None:
    description = json.loads((saved(tmp_path) / "config.json").read_text())
    names = ["crane", "dog", "crane"]
    description["id2label"] = names if kind is list else {str(number): name for number, name in enumerate(names)}
    (tmp_path / "config.json").write_text(json.dumps(description))
    assert opened(tmp_path).labels == ("crane", "dog", "crane (2)")


def test_the_meaning_of_logits_goes_out_and_comes_back(tmp_path: Path) -> None:
    """transformers' pipelines take softmax unless problem_type says otherwise."""
    assert opened(saved(tmp_path / "softmax")).usage.loss == "softmax"
    usage = Usage(loss="sigmoid")
    save_hugging_face(tmp_path / "s", config=VIT, labels=LABELS, tensor=tensors_of(random_model(VIT)), usage=usage)
    assert opened(tmp_path / "s").usage.loss == "sigmoid"
    assert json.loads((tmp_path / "s/config.json").read_text())["problem_type"] == "multi_label_classification"


def test_nothing_is_assumed(tmp_path: Path) -> None:
    """config.json gives GELU, epsilon and heads."""
    assert opened(saved(tmp_path)).assumed == ()

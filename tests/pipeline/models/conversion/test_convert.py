"""Conversion from any format to any other, at another image size and with another head; everything else is refused."""

import argparse
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from patchline import load_model
from pipeline.models import ModelConfig
from pipeline.models.config import Mode
from pipeline.models.conversion.config import Change, Format, Hints
from pipeline.models.conversion.convert import changed, save_as
from pipeline.models.conversion.open_any import open_any, open_for_use, usage_for
from pipeline.models.positions import resample_position_embeddings
from pipeline.models.weights.folder import Weights, filled_model, open_weights, save_weights, usage_at
from pipeline.models.weights.usage import Usage
from pipeline.shared_settings import EvaluationTransform
from shards.errors import UserError
from tests.pipeline.models.conversion.random_weights import (
    AVERAGE,
    BIT,
    HYBRID,
    IMAGES,
    REPRESENTATION,
    SCALED,
    VIT,
    assert_same_logits,
    assumed_of,
    logits,
    random_model,
    tensors_of,
)
from tests.pipeline.models.parity import difference, random_images
from tests.pipeline.models.parity import random_model as gentle_model

HEADS = Hints(num_heads=2)
LABELS = ("a", "b", "c")


def out(folder: Path, written: Format) -> Path:
    return folder / ("w.npz" if written in ("vision_transformer", "big_vision") else written)


def exported(folder: Path, config: ModelConfig, written: Format) -> Path:
    path = out(folder, written)
    save_as(written, path, config=config, labels=LABELS, tensor=tensors_of(random_model(config)))
    return path


def hints_for(written: Format) -> Hints:
    return HEADS if written == "timm" else Hints()


@pytest.mark.parametrize("written", get_args(Format))
def test_every_format_comes_back_with_the_same_logits(tmp_path: Path, written: Format) -> None:
    weights = open_any(str(exported(tmp_path, VIT, written)), hints_for(written))
    assert weights.config == VIT
    assert_same_logits(weights, random_model(VIT))
    assert [path.name for path in tmp_path.rglob("*.part")] == []


@pytest.mark.parametrize("written", [f for f in get_args(Format) if f != "patchline"])
@pytest.mark.parametrize("position", ["learned_2d", "sincos2d", "none"])
def test_other_positions_become_a_table_of_their_sums(tmp_path: Path, written: Format, position: str) -> None:
    config = replace(VIT, position=position)  # type: ignore[arg-type]
    weights = open_any(str(exported(tmp_path, config, written)), hints_for(written))
    assert weights.config == VIT
    difference = (logits(filled_model(weights)) - logits(random_model(config))).abs().max()
    assert float(difference) < 2e-5


@pytest.mark.parametrize("written", get_args(Format))
def test_the_heads_constant_is_folded_into_its_bias(tmp_path: Path, written: Format) -> None:
    weights = open_any(str(exported(tmp_path, replace(VIT, head_bias=-10.0), written)), hints_for(written))
    assert torch.equal(weights.tensor("head.bias"), random_model(VIT).head.bias - 10.0)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_bare_files_and_folders_with_torch_files(tmp_path: Path, kind: str) -> None:
    state = random_model(VIT).state_dict()
    if kind == "file":
        save_file(state, tmp_path / "w.safetensors")
        weights = open_any(str(tmp_path / "w.safetensors"), HEADS)
    else:
        folder = exported(tmp_path, VIT, "timm")
        tensors = open_any(str(folder), HEADS)
        assert tensors.where.endswith("model.safetensors")
        weights = open_any(str(folder / "model.safetensors"), Hints(num_heads=2, gelu="tanh", grid_side=4))
    assert_same_logits(weights, random_model(VIT))


def weights_of(config: ModelConfig, folder: Path) -> Weights:
    save_weights(folder / "w", config=config, labels=LABELS, tensor=tensors_of(random_model(config)))
    return open_weights(str(folder / "w"))


@pytest.mark.parametrize("mode", ["paper", "bicubic", "timm"])
def test_another_image_size_resamples_by_mode(tmp_path: Path, mode: Mode) -> None:
    weights = weights_of(VIT, tmp_path)
    config, tensor = changed(weights, Change(image_size=24, resample=mode))
    expected = resample_position_embeddings(
        weights.tensor("embed.position")[0], from_grid=(4, 4), to_grid=(6, 6), mode=mode
    )
    assert (config.image_size, tuple(tensor("embed.position").shape)) == (24, (1, 37, 12))
    assert torch.equal(tensor("embed.position")[0], expected)
    save_as("vision_transformer", tmp_path / "w.npz", config=config, labels=(), tensor=tensor)
    assert open_any(str(tmp_path / "w.npz"), Hints()).config.image_size == 24


@pytest.mark.parametrize("patch", [2, 8, 16])
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="learned positions"),
        pytest.param({"position": "learned_2d"}, id="positions of rows and columns"),
        pytest.param({"position": "none", "pooling": "average"}, id="no positions"),
        pytest.param({"position": "learned_rope2d", "num_heads": 3, "rotary_grid": 4}, id="rotary positions"),
        pytest.param({"position_at": "layers_shared"}, id="positions added at each layer"),
        pytest.param({"registers": 2, "distillation_token": True}, id="further tokens"),
        pytest.param({"attention": "axial", "pooling": "average"}, id="axial attention"),
    ],
)
def test_weights_for_other_patches_compute_what_a_training_pass_computes(
    tmp_path: Path, fields: dict[str, Any], patch: int
) -> None:
    weights, size = weights_of(replace(VIT, **fields), tmp_path), 2 * VIT.image_size
    config, tensor = changed(weights, Change(patch=patch, image_size=size))
    assert config == replace(weights.config, patch=patch, image_size=size)
    save_weights(tmp_path / "changed", config=config, labels=LABELS, tensor=tensor)
    with torch.no_grad():
        expected = filled_model(weights)(IMAGES, patch=patch)
        found = filled_model(open_weights(str(tmp_path / "changed")))(IMAGES)
    assert float(expected.std()) > 0.01
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_weights_for_their_own_patches_stay_as_they_are(tmp_path: Path) -> None:
    weights = weights_of(replace(VIT, name="vit_ti16", patch=None), tmp_path)
    config, tensor = changed(weights, Change(patch=16))
    assert config == weights.config
    assert all(torch.equal(tensor(name), weights.tensor(name)) for name in weights.shapes)


@pytest.mark.parametrize("config", [VIT, AVERAGE, REPRESENTATION, HYBRID, BIT])
def test_a_new_head_is_zero_and_the_hidden_layer_goes_with_the_old(tmp_path: Path, config: ModelConfig) -> None:
    target, tensor = changed(weights_of(config, tmp_path), Change(new_head=True, num_classes=7))
    assert (target.num_classes, target.representation) == (7, False)
    assert not tensor("head.weight").any()
    assert tensor("head.weight").shape[0] == 7


def test_a_head_that_does_not_fit_is_dropped_only_when_asked(tmp_path: Path) -> None:
    weights = weights_of(VIT, tmp_path)
    with pytest.raises(UserError):
        changed(weights, Change(num_classes=7))
    assert changed(weights, Change(num_classes=3))[0] == VIT


def test_without_a_head_one_must_be_asked_for(tmp_path: Path) -> None:
    state = {name: value for name, value in random_model(VIT).state_dict().items() if "head" not in name}
    save_file(state, tmp_path / "w.safetensors")
    weights = open_any(str(tmp_path / "w.safetensors"), HEADS)
    with pytest.raises(UserError):
        changed(weights, Change())
    with pytest.raises(UserError):
        changed(weights, Change(num_classes=5))
    assert changed(weights, Change(new_head=True, num_classes=5))[0] == replace(VIT, num_classes=5)


MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.mark.parametrize("library", ["timm", "hugging_face"])
def test_pixels_that_a_folder_declares_are_folded_in(
    library: Format, timm: ModuleType, transformers: ModuleType, tmp_path: Path
) -> None:
    """The library's own model, given its own pixels, has our logits for the images as they are."""
    folder = exported(tmp_path, VIT, library)
    hints = Hints(num_heads=2) if library == "timm" else Hints()
    assert assumed_of(open_any(str(folder), hints)) == ()
    if library == "timm":
        description = json.loads((folder / "config.json").read_text())
        description["pretrained_cfg"] |= {"mean": MEAN, "std": DEVIATION}
        (folder / "config.json").write_text(json.dumps(description))
        other = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    else:
        content = json.loads((folder / "preprocessor_config.json").read_text())
        (folder / "preprocessor_config.json").write_text(
            json.dumps(content | {"image_mean": MEAN, "image_std": DEVIATION})
        )
        other = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    images_BHW3 = random_images(16, 16)
    pixels_B3HW = ((images_BHW3 / 255 - torch.tensor(MEAN)) / torch.tensor(DEVIATION)).permute(0, 3, 1, 2)
    with torch.no_grad():
        theirs = other(pixels_B3HW.float())
        ours = filled_model(open_any(str(folder), hints))(images_BHW3)
    torch.testing.assert_close(ours, theirs if library == "timm" else theirs.logits, rtol=2e-5, atol=2e-5)


def test_a_bare_file_takes_the_pixels_that_are_given_or_named(tmp_path: Path) -> None:
    folder, hints = exported(tmp_path, VIT, "timm"), Hints(num_heads=2, grid_side=4)
    for name in ("deit_tiny.safetensors", "other.safetensors"):
        (tmp_path / name).write_bytes((folder / "model.safetensors").read_bytes())
    named, other = str(tmp_path / "deit_tiny.safetensors"), str(tmp_path / "other.safetensors")
    with pytest.raises(UserError):
        open_any(named, hints)
    said = "pixels of mean 0.5 0.5 0.5 and deviation 0.5 0.5 0.5"
    assert said in assumed_of(open_any(other, hints))
    given = open_any(named, replace(hints, pixels="imagenet"))
    assert assumed_of(given) == ("gelu exact", "layer_norm_epsilon 1e-06")
    assert not torch.equal(given.tensor("embed.patch.weight"), open_any(other, hints).tensor("embed.patch.weight"))


@pytest.mark.parametrize("names", [("a", "b"), tuple("abcde")])
def test_names_that_are_not_one_per_class_are_not_guessed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: tuple[str, ...]
) -> None:
    """Nothing says which of the classes they are of."""
    folder = exported(tmp_path, VIT, "timm")
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(description | {"label_names": list(names)}))
    model = load_model(folder, device="cpu")
    assert model.labels == ("0", "1", "2")
    assert len(model.predict(np.zeros((20, 20, 3), np.uint8))) == 3
    said = f"names {len(names)} classes, its head has 3: they are called 0 to 2; patchline import"
    assert [said in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [True]
    caplog.clear()
    load_model(exported(tmp_path / "right", VIT, "timm"), device="cpu")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", [dict, argparse.Namespace])
def test_pixels_that_a_training_scripts_arguments_say_are_folded_in(tmp_path: Path, kind: Any) -> None:
    tensors = load_file(exported(tmp_path, VIT, "timm") / "model.safetensors")
    hints, where = Hints(num_heads=2, grid_side=4), tmp_path / "w.pth"
    torch.save({"state_dict": tensors, "args": kind(mean=tuple(MEAN), std=tuple(DEVIATION))}, where)
    said = open_any(str(where), hints)
    torch.save({"state_dict": tensors, "args": kind(mean=None, std=None)}, where)
    given = open_any(str(where), replace(hints, pixels="imagenet"))
    assert assumed_of(said) == assumed_of(given) == ("gelu exact", "layer_norm_epsilon 1e-06")
    assert torch.equal(said.tensor("embed.patch.weight"), given.tensor("embed.patch.weight"))
    assert "pixels of mean 0.5 0.5 0.5 and deviation 0.5 0.5 0.5" in assumed_of(open_any(str(where), hints))


def test_a_resampled_export_is_what_transformers_resamples(transformers: ModuleType, tmp_path: Path) -> None:
    """Compared with transformers' own resampling of the export that is not resampled."""
    folder, images_BHW3 = exported(tmp_path, VIT, "hugging_face"), IMAGES[:, :24, :24]
    other = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    config, tensor = changed(open_any(str(folder), Hints()), Change(image_size=24, resample="bicubic"))
    save_as("hugging_face", tmp_path / "24", config=config, labels=LABELS, tensor=tensor)
    at_24 = transformers.ViTForImageClassification.from_pretrained(tmp_path / "24").eval()
    ours = filled_model(open_any(str(tmp_path / "24"), Hints()))
    assert difference(ours, lambda x: other(x, interpolate_pos_encoding=True).logits, images_BHW3) < 2e-5
    assert difference(ours, lambda x: at_24(x).logits, images_BHW3) < 2e-5


@pytest.mark.long
@pytest.mark.parametrize("written", ["timm", "hugging_face", "vision_transformer", "big_vision"])
def test_a_whole_b16_goes_out_and_comes_back(
    timm: ModuleType, transformers: ModuleType, tmp_path: Path, written: Format
) -> None:
    """The paper's own size, by name, exported to another library and imported again."""
    model, path = gentle_model(ModelConfig(name="vit_b16", num_classes=50)), out(tmp_path, written)
    save_as(written, path, config=model.config, labels=(), tensor=tensors_of(model))
    images = random_images(224, 224)
    weights = open_any(str(path), Hints(model="vit_b16"))
    assert weights.config == model.config
    assert difference(model, lambda _: filled_model(weights)(images), images) < 2e-5
    if written == "hugging_face":
        other = transformers.ViTForImageClassification.from_pretrained(path).eval()
        assert difference(model, lambda x: other(x).logits, images) < 2e-5
    elif written == "timm":
        assert difference(model, timm.create_model(f"local-dir:{path}", pretrained=True).eval(), images) < 2e-5


@pytest.mark.parametrize("written", ["hugging_face", "vision_transformer", "big_vision"])
def test_layer_scale_is_folded_where_a_format_has_none(
    tmp_path: Path, written: Format, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        weights = open_any(str(exported(tmp_path, SCALED, written)), Hints())
    assert "LayerScale is folded into the layers before it" in caplog.text
    assert weights.config == VIT
    assert_same_logits(weights, random_model(SCALED))


NPZ = ("vision_transformer", "big_vision")


def test_pixels_of_a_format_that_has_them_go_with_it(tmp_path: Path) -> None:
    folder = exported(tmp_path, VIT, "hugging_face")
    assert (folder / "preprocessor_config.json").is_file()
    save_as("timm", folder, config=VIT, labels=LABELS, tensor=tensors_of(random_model(VIT)))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_our_own_format_has_a_name_for_every_class(tmp_path: Path) -> None:
    save_as("patchline", tmp_path / "w", config=VIT, labels=(), tensor=tensors_of(random_model(VIT)))
    assert open_weights(str(tmp_path / "w")).labels == ("0", "1", "2")


def test_the_cropped_part_stays_as_large_a_part_at_another_size(tmp_path: Path) -> None:
    transform = EvaluationTransform(mode="central_crop", filter="bicubic", short_side=20)
    usage = Usage(transform=transform)
    save_as("timm", tmp_path / "timm", config=VIT, labels=(), tensor=tensors_of(random_model(VIT)), usage=usage)
    weights = open_for_use(str(tmp_path / "timm"))
    assert usage_at(weights, 16).transform == usage_for(str(tmp_path / "timm")).transform == transform
    assert usage_at(weights, 32).transform == replace(transform, short_side=40)

"""Conversion from any format to any other, at another image size and with another head; everything else is refused."""

import argparse
import json
import logging
from collections.abc import Callable
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
    MAP,
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


@pytest.mark.parametrize("written", [f for f in get_args(Format) if f != "patchline"])
@pytest.mark.parametrize("fields", [{"position": "relative"}, {"position_at": "layers_shared"}])
def test_positions_without_an_equivalent_are_refused(tmp_path: Path, written: Format, fields: dict[str, str]) -> None:
    with pytest.raises(UserError, match="which no other format has; allowed: --format patchline"):
        exported(tmp_path, replace(VIT, **fields), written)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("written", [f for f in get_args(Format) if f != "patchline"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(replace(BIT, name="bit_r18x1"), "has basic units with group norm .*, which", id="basic units"),
        pytest.param(replace(AVERAGE, attention="axial"), "has axial attention .model.attention., which", id="axial"),
        pytest.param(  # whose message would name --format timm, which refuses the axial attention
            replace(AVERAGE, attention="axial", qk_norm=True), "has axial attention", id="axial, and a part of timm's"
        ),
    ],
)
def test_models_without_an_equivalent_are_refused_by_name(
    tmp_path: Path, written: Format, config: ModelConfig, message: str
) -> None:
    with pytest.raises(UserError, match=f"{message} .*; allowed: --format patchline"):
        exported(tmp_path, config, written)
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("config", [VIT, AVERAGE, REPRESENTATION, HYBRID, BIT])
def test_a_new_head_is_zero_and_the_hidden_layer_goes_with_the_old(tmp_path: Path, config: ModelConfig) -> None:
    target, tensor = changed(weights_of(config, tmp_path), Change(new_head=True, num_classes=7))
    assert (target.num_classes, target.representation) == (7, False)
    assert not tensor("head.weight").any()
    assert tensor("head.weight").shape[0] == 7


def test_a_head_that_does_not_fit_is_dropped_only_when_asked(tmp_path: Path) -> None:
    weights = weights_of(VIT, tmp_path)
    with pytest.raises(UserError, match=r"head.weight is \[3, 12\], \[7, 12\] is asked for; .* give --new-head"):
        changed(weights, Change(num_classes=7))
    assert changed(weights, Change(num_classes=3))[0] == VIT


def test_without_a_head_one_must_be_asked_for(tmp_path: Path) -> None:
    state = {name: value for name, value in random_model(VIT).state_dict().items() if "head" not in name}
    save_file(state, tmp_path / "w.safetensors")
    weights = open_any(str(tmp_path / "w.safetensors"), HEADS)
    with pytest.raises(UserError, match=r"has no head .head.weight is not there.; give --new-head --num-classes K"):
        changed(weights, Change())
    with pytest.raises(UserError, match=r"head.weight is \[\], \[5, 12\] is asked for"):
        changed(weights, Change(num_classes=5))
    assert changed(weights, Change(new_head=True, num_classes=5))[0] == replace(VIT, num_classes=5)


def config_json(folder: Path, content: object) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda _: None, "no weights at .*; allowed: a file that ends in .npz", id="nothing"),
        pytest.param(lambda p: p.write_text("x"), "allowed: a file that ends in", id="no such kind"),
        pytest.param(lambda p: p.mkdir(), "no config.json in", id="an empty folder"),
        pytest.param(lambda p: config_json(p, "{"), "is no JSON", id="broken JSON"),
        pytest.param(lambda p: config_json(p, [1]), "is no JSON object", id="a list"),
        pytest.param(lambda p: config_json(p, {"model_type": "vit"}), "no tensors in", id="no tensors"),
        pytest.param(lambda p: config_json(p, {"model": {}, "format": 1}), "no weights at", id="ours without tensors"),
    ],
)
def test_what_is_no_weights_is_refused(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path / "w")
    with pytest.raises(UserError, match=message):
        open_any(str(tmp_path / "w"), Hints())


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    config_json(tmp_path / "w", {"model_type": "beit"})
    save_file({"a": torch.zeros(1)}, tmp_path / "w" / "model.safetensors")
    with pytest.raises(UserError, match="has the model_type 'beit'; allowed: 'vit', timm's"):
        open_any(str(tmp_path / "w"), Hints())
    with pytest.raises(UserError, match=r"are of no model known here .a, \.\.\."):
        open_any(str(tmp_path / "w" / "model.safetensors"), Hints())


def test_hugging_faces_tensors_need_their_config(tmp_path: Path) -> None:
    folder = exported(tmp_path, VIT, "hugging_face")
    with pytest.raises(
        UserError, match=r"has Hugging Face's tensors; their config\.json says the rest: give the folder"
    ):
        open_any(str(folder / "model.safetensors"), Hints())


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
    with pytest.raises(UserError, match=r"--pixels is 'clip' .*say mean 0.485 0.456 0.406 .*; leave out --pixels"):
        open_any(str(folder), replace(hints, pixels="clip"))


def test_a_bare_file_takes_the_pixels_that_are_given_or_named(tmp_path: Path) -> None:
    folder, hints = exported(tmp_path, VIT, "timm"), Hints(num_heads=2, grid_side=4)
    for name in ("deit_tiny.safetensors", "other.safetensors"):
        (tmp_path / name).write_bytes((folder / "model.safetensors").read_bytes())
    named, other = str(tmp_path / "deit_tiny.safetensors"), str(tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"is named like a model that takes pixels of mean 0.485 .*--pixels imagenet"):
        open_any(named, hints)
    said = "pixels of mean 0.5 0.5 0.5 and deviation 0.5 0.5 0.5"
    assert said in assumed_of(open_any(other, hints))
    given = open_any(named, replace(hints, pixels="imagenet"))
    assert assumed_of(given) == ("gelu exact", "layer_norm_epsilon 1e-06")
    assert not torch.equal(given.tensor("embed.patch.weight"), open_any(other, hints).tensor("embed.patch.weight"))
    description = json.loads((folder / "config.json").read_text())
    description["pretrained_cfg"] |= {"mean": MEAN, "std": DEVIATION}
    (folder / "config.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match=r"config.json beside .* says pixels of mean 0.485 .*; give the folder"):
        open_any(str(folder / "model.safetensors"), hints)


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
    torch.save({"state_dict": tensors, "args": kind(mean=None, model="deit_tiny_patch16_224")}, where)
    with pytest.raises(UserError, match=r"is of the model 'deit_tiny_patch16_224', .*; give --pixels imagenet to fold"):
        open_any(str(where), hints)


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


@pytest.mark.parametrize(
    ("config", "part", "formats"),
    [
        (replace(VIT, registers=2), "registers", ("timm",)),
        (replace(VIT, qk_norm=True), "norms of queries", ("timm",)),
        (replace(VIT, position="rope2d", num_heads=3), "rotary positions", ("timm",)),
        (MAP, "attention pooling", ("timm", "big_vision")),
        (REPRESENTATION, "a hidden layer before the head", NPZ),
        (AVERAGE, "no class token", (*NPZ, "timm")),
        (HYBRID, "a ResNet before its layers", ("vision_transformer", "timm")),
        (BIT, "no transformer", (*NPZ, "timm")),
    ],
    ids=["registers", "qk norm", "rotary", "attention pooling", "hidden layer", "average", "hybrid", "BiT"],
)
def test_parts_that_a_format_has_not_are_refused_by_name(
    tmp_path: Path, config: ModelConfig, part: str, formats: tuple[Format, ...]
) -> None:
    for written in sorted({*get_args(Format)} - {*formats, "patchline"}):
        message = f"the model has ({part}).*, which the format {written} does not have: give --format {formats[0]}"
        with pytest.raises(UserError, match=message):
            exported(tmp_path, config, written)
    assert list(tmp_path.iterdir()) == []


def test_our_own_folder_says_all(tmp_path: Path) -> None:
    where = weights_of(VIT, tmp_path).where
    with pytest.raises(UserError, match=r"of ours, whose config\.json says all; leave out --num-heads and --gelu$"):
        open_any(where, Hints(num_heads=2, gelu="tanh"))
    with pytest.raises(UserError, match=r"--model is 'vit_b16', the weights in .* are of 'vit'"):
        open_any(where, Hints(model="vit_b16"))


@pytest.mark.parametrize("written", ["vision_transformer", "big_vision"])
def test_npz_files_are_called_so(tmp_path: Path, written: Format) -> None:
    with pytest.raises(UserError, match=r"--out is .*; the format .* is a file that ends in \.npz"):
        save_as(written, tmp_path / "w", config=VIT, labels=(), tensor=tensors_of(random_model(VIT)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(Change(image_size=2), "--image-size is 2; allowed: multiples of 4", id="less than a patch"),
        pytest.param(
            Change(image_size=18),
            "--image-size is 18, not a multiple of the patch .4 px.; take 16 or 20$",
            id="no grid",
        ),
    ],
)
def test_changes_that_can_not_be(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(UserError, match=message):
        changed(weights_of(VIT, tmp_path), change)


def test_a_pooler_without_a_head_is_dropped_with_a_word(transformers: ModuleType, tmp_path: Path) -> None:
    """ViTModel's pooler is the hidden tanh layer of a missing head."""
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20, image_size=16, patch_size=4
    )
    transformers.ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"give --new-head --num-classes K .*.its hidden layer, .* is dropped then"):
        changed(open_any(str(tmp_path), Hints()), Change())


def test_pixels_of_a_format_that_has_them_go_with_it(tmp_path: Path) -> None:
    folder = exported(tmp_path, VIT, "hugging_face")
    assert (folder / "preprocessor_config.json").is_file()
    save_as("timm", folder, config=VIT, labels=LABELS, tensor=tensors_of(random_model(VIT)))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_our_own_format_has_a_name_for_every_class(tmp_path: Path) -> None:
    save_as("patchline", tmp_path / "w", config=VIT, labels=(), tensor=tensors_of(random_model(VIT)))
    assert open_weights(str(tmp_path / "w")).labels == ("0", "1", "2")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"new_head": True, "num_classes": 0}, "^num_classes is 0; allowed: 1 to 10,000,000", id="no class"
        ),
        pytest.param({"num_classes": -1}, "^num_classes is -1; allowed: 1 to", id="less than none"),
        pytest.param({"image_size": 0}, "^image_size is 0; allowed: 1 to 16,384, or none", id="no image"),
        pytest.param({"new_head": True, "num_classes": 10**12}, "^num_classes is 1000000000000; allowed", id="absurd"),
        pytest.param({"image_size": 10**9}, "^image_size is 1000000000; allowed", id="absurd pixels"),
    ],
)
def test_changes_that_cannot_be(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Change(**fields)  # type: ignore[arg-type]


def test_the_cropped_part_stays_as_large_a_part_at_another_size(tmp_path: Path) -> None:
    transform = EvaluationTransform(mode="central_crop", filter="bicubic", short_side=20)
    usage = Usage(transform=transform)
    save_as("timm", tmp_path / "timm", config=VIT, labels=(), tensor=tensors_of(random_model(VIT)), usage=usage)
    weights = open_for_use(str(tmp_path / "timm"))
    assert usage_at(weights, 16).transform == usage_for(str(tmp_path / "timm")).transform == transform
    assert usage_at(weights, 32).transform == replace(transform, short_side=40)

"""timm's folders: timm computes our logits from them, ours are read back bit for bit, other models are refused."""

import io
import json
import logging
import re
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from jobs.data import pack
from pipeline.data.transform import evaluation_view_of_pixels
from pipeline.models import ModelConfig
from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.open_file import open_tensor_file
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.conversion.timm import open_timm, save_timm
from pipeline.models.weights.folder import Weights, filled_model
from pipeline.shared_settings import EvaluationTransform, central_short_side
from shards.sources.digits import DigitsSource
from tests.pipeline.models.conversion.random_weights import (
    AVERAGE,
    AVERAGE_REGISTERS,
    DISTILLED,
    MAP,
    QK_NORM,
    REGISTERS,
    ROTARY,
    SCALED,
    TINY,
    VIT,
    assert_same_tensors,
    assumed_of,
    random_model,
    tensors_of,
)
from tests.pipeline.models.parity import difference, random_images, theirs_of
from tests.pipeline.models.parity import random_model as gentle_model
from tests.rigs.processes import patchline
from tests.rigs.training import FinishedRuns

LABELS = ("cat", "dog", "Füchsin")
EVA02 = replace(ROTARY, position="learned_rope2d", rotary_temperature=10_000.0, rotary_grid=3)
OF_TODAY = {
    "a distillation token": DISTILLED,
    "a distillation token and all that goes with it": replace(DISTILLED, qk_norm=True, layer_scale=0.1, gelu="exact"),
    "quick GELU": replace(VIT, gelu="quick"),
    "norm of the mean": replace(AVERAGE, last_norm="pooled"),
    "no last norm": replace(VIT, last_norm="none"),
    "learned and rotary positions, stretched": replace(EVA02, registers=2),
    "places from 1, norm of the mean": replace(EVA02, rotary_places="from_one", pooling="average", last_norm="pooled"),
    "places of a fixed length, no last norm": replace(ROTARY, rotary_places="centred", last_norm="none"),
}
SMALL: dict[str, Any] = {"depth": 1, "width": 24, "mlp_width": 48, "num_heads": 2, "num_classes": 3, "image_size": 64}


def opened(folder: Path, hints: Hints | None = None) -> Weights:
    description = json.loads((folder / "config.json").read_text())
    return open_timm(open_tensor_file(folder / "model.safetensors"), description, hints or Hints(num_heads=2))


def saved(folder: Path, config: ModelConfig = VIT) -> Path:
    save_timm(folder, config=config, labels=LABELS, tensor=tensors_of(random_model(config)))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(VIT, id="ViT, the paper's GELU"),
        pytest.param(ModelConfig(**TINY | {"gelu": "exact"}), id="exact GELU"),
        pytest.param(AVERAGE, id="average"),
        pytest.param(SCALED, id="LayerScale"),
        pytest.param(REGISTERS, id="registers"),
        pytest.param(MAP, id="attention pooling"),
        pytest.param(ROTARY, id="rotary positions"),
        pytest.param(
            replace(ROTARY, layer_scale=0.1, registers=2, pooling="average", qk_norm=True),
            id="rotary positions with all that goes with them",
        ),
        pytest.param(replace(ROTARY, pooling="attention"), id="rotary positions and attention pooling"),
        pytest.param(replace(MAP, registers=2), id="attention pooling, registers"),
        pytest.param(QK_NORM, id="norms of queries and keys"),
        pytest.param(AVERAGE_REGISTERS, id="registers, no class token"),
        *(pytest.param(config, id=words) for words, config in OF_TODAY.items()),
        pytest.param(ModelConfig(name="vit_ti16", depth=1, image_size=32, num_classes=3), id="Ti/16"),
        pytest.param(ModelConfig(name="r26_vit_s32", **SMALL, resnet_epsilons="timm"), id="hybrid"),
        pytest.param(
            ModelConfig(name="r50_vit_b16", **SMALL, resnet_epsilons="timm"), id="hybrid R50", marks=pytest.mark.long
        ),
        pytest.param(
            ModelConfig(name="r50_vit_l32", **SMALL, resnet_epsilons="timm"), id="hybrid /32", marks=pytest.mark.long
        ),
        pytest.param(
            ModelConfig(name="r_vit_ti16", **SMALL, resnet_epsilons="timm"), id="a hybrid with the root alone"
        ),
        pytest.param(
            ModelConfig(name="bit_r50x1", num_classes=3, resnet_epsilons="timm"), id="BiT", marks=pytest.mark.long
        ),
    ],
)
def test_timm_itself_gives_our_logits(timm: ModuleType, tmp_path: Path, config: ModelConfig) -> None:
    model = gentle_model(config)
    if not config.is_bit:  # whose many features are loud enough
        torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(3))
    save_timm(tmp_path, config=config, labels=LABELS, tensor=tensors_of(model))
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    side = min(config.image_size, 64)
    assert difference(model, other, random_images(side, side)) < 2e-5
    assert list(other.pretrained_cfg["label_names"]) == list(LABELS)


@pytest.mark.parametrize(
    ("transform", "crop", "least"),
    [
        pytest.param(EvaluationTransform(antialias=True), ("squash", 1.0, "bilinear"), 50, id="resize, same pixels"),
        # Pillow always antialiases, and timm rounds the long side and the place of the crop by one pixel elsewhere.
        pytest.param(EvaluationTransform(), ("squash", 1.0, "bilinear"), 40, id="resize"),
        pytest.param(
            EvaluationTransform(filter="area"),
            *(("squash", 1.0, "box"), 45),
            id="resize by areas",
            marks=pytest.mark.long,  # as in the central crop, and in test_hugging_face.py
        ),
        pytest.param(
            EvaluationTransform(mode="central_crop", filter="area"), ("center", 96 / 110, "box"), 43, id="central crop"
        ),
        pytest.param(
            EvaluationTransform(mode="central_crop", antialias=True, short_side=131),
            ("center", 96 / 131, "bilinear"),
            43,
            id="central crop of another short side",
        ),
        pytest.param(
            EvaluationTransform(mode="central_crop", short_side=96, filter="bicubic"),
            ("center", 1.0, "bicubic"),
            45,
            id="DeiT III's",
            marks=pytest.mark.long,
        ),
        pytest.param(
            EvaluationTransform(mode="fewshot", antialias=True), ("squash", 96 / 110, "bilinear"), 45, id="few-shot"
        ),
    ],
)
def test_timms_own_evaluation_prepares_images_as_ours(
    timm: ModuleType,
    test_data: Path,
    tmp_path: Path,
    transform: EvaluationTransform,
    crop: tuple[str, float, str],
    least: int,
) -> None:
    """timm reads the export's configuration and makes its transform; `least`: of 50 photographs with one top-1."""
    model = gentle_model(ModelConfig(name="vit_ti16", depth=2, num_classes=10, image_size=96))
    torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(3))
    save_timm(tmp_path, config=model.config, labels=(), tensor=tensors_of(model), transform=transform)
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    settings = timm.data.resolve_data_config({}, model=other)
    assert (settings["crop_mode"], settings["interpolation"]) == (crop[0], crop[2])
    assert settings["crop_pct"] == pytest.approx(crop[1], rel=1e-9)
    read = opened(tmp_path, Hints()).usage.transform
    assert replace(read, short_side=0) == replace(transform, antialias=transform.filter == "bilinear", short_side=0)
    assert central_short_side(read, 96) == central_short_side(transform, 96)
    their_transform, num_same = timm.data.create_transform(**settings), 0
    for path in sorted((test_data / "imagenet-sample").iterdir())[:50]:
        image = Image.open(path).convert("RGB")
        ours = np.empty((96, 96, 3), np.uint8)
        evaluation_view_of_pixels(np.asarray(image), transform, out=ours)
        theirs_3HW = their_transform(image)
        if least == 50:
            torch.testing.assert_close(theirs_3HW.permute(1, 2, 0), torch.from_numpy(ours) / 127.5 - 1)
        with torch.no_grad():
            num_same += int(model(torch.from_numpy(ours)[None]).argmax() == other(theirs_3HW[None]).argmax())
    assert num_same >= least


def test_our_export_is_timms_state_dict(timm: ModuleType, tmp_path: Path) -> None:
    """timm's model, created by name, loads exactly these tensors."""
    model = gentle_model(ModelConfig(name="vit_s16", depth=2, num_classes=5, gelu="exact"))
    save_timm(tmp_path, config=model.config, labels=(), tensor=tensors_of(model))
    other = timm.create_model("vit_small_patch16_224", depth=2, num_classes=5)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert difference(model, other.eval(), random_images(224, 224)) < 2e-5


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(VIT, id="token"),
        pytest.param(AVERAGE, id="average"),
        pytest.param(SCALED, id="LayerScale"),
        pytest.param(REGISTERS, id="registers"),
        pytest.param(AVERAGE_REGISTERS, id="registers, no class token"),
        *(pytest.param(config, id=words) for words, config in OF_TODAY.items()),
        pytest.param(QK_NORM, id="norms of queries and keys"),
        pytest.param(MAP, id="attention pooling"),
        pytest.param(ROTARY, id="rotary positions"),
        pytest.param(
            replace(ROTARY, layer_scale=0.1, registers=2, pooling="average", qk_norm=True),
            id="rotary positions with all that goes with them",
        ),
    ],
)
def test_a_round_trip_changes_no_bit(tmp_path: Path, config: ModelConfig) -> None:
    weights = opened(saved(tmp_path, config), Hints(num_heads=config.size.num_heads))
    assert (weights.config, weights.labels) == (config, LABELS)
    assert_same_tensors(weights, random_model(config))


@pytest.mark.parametrize(
    ("declared", "expected", "is_said"),
    [
        ({"crop_pct": 0.8, "interpolation": "lanczos", "crop_mode": "center"}, EvaluationTransform(), True),
        ({"crop_pct": 0.8, "interpolation": "bicubic", "crop_mode": "border"}, EvaluationTransform(), True),
        ({"interpolation": "random"}, EvaluationTransform(), True),
        ({}, EvaluationTransform(), False),
        ({"crop_mode": None}, EvaluationTransform(), False),
        ({"crop_pct": 0.8}, EvaluationTransform(mode="central_crop", filter="bicubic", short_side=20), False),
        (
            {"interpolation": "bilinear"},
            EvaluationTransform(mode="central_crop", antialias=True, short_side=18),
            False,
        ),
    ],
    ids=str,
)
def test_a_preparation_that_ours_cannot_do_is_said(
    tmp_path: Path,
    declared: dict[str, Any],
    expected: EvaluationTransform,
    is_said: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    description = json.loads((saved(tmp_path) / "config.json").read_text())
    others = {key: value for key, value in description["pretrained_cfg"].items() if "crop" not in key}
    del others["interpolation"]
    (tmp_path / "config.json").write_text(json.dumps(description | {"pretrained_cfg": others | declared}))
    weights = opened(tmp_path)
    assert weights.usage.transform == expected
    default = "transform resize, bilinear and without a crop"
    assert assumed_of(weights) == (f"{default} (the file: {declared})",) * is_said


def test_a_state_dict_alone_is_timms_usual(tmp_path: Path) -> None:
    """Exact GELU unless told otherwise. PyTorch files may hold the tensors in a dict."""
    tensors = load_file(saved(tmp_path) / "model.safetensors")
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "w.pth")
    file = open_tensor_file(tmp_path / "w.pth")
    assert open_timm(file, {}, Hints(num_heads=2, grid_side=4)).config.gelu == "exact"
    weights = open_timm(file, {}, Hints(num_heads=2, gelu="tanh", grid_side=4))
    assert weights.config == VIT
    assert_same_tensors(weights, random_model(VIT))


def test_layer_scale_has_another_name_in_the_files_of_deit_3(tmp_path: Path) -> None:
    """gamma_1, which timm also renames. Such a file does not say the initial value, which no trained model has."""
    tensors = load_file(saved(tmp_path, SCALED) / "model.safetensors")
    renamed = {re.sub(r"ls(\d)\.gamma", r"gamma_\1", name): value for name, value in tensors.items()}
    assert "blocks.1.gamma_2" in renamed
    torch.save({"model": renamed}, tmp_path / "w.pth")
    file, hints = open_tensor_file(tmp_path / "w.pth"), Hints(num_heads=2, gelu="tanh", grid_side=4)
    weights = open_timm(file, {}, hints)
    assert weights.config == replace(SCALED, layer_scale=1e-5)
    assert_same_tensors(weights, random_model(SCALED))


def test_a_table_without_a_row_for_the_class_token(tmp_path: Path) -> None:
    """timm's no_embed_class, as in big_vision's models."""
    tensors = load_file(saved(tmp_path) / "model.safetensors")
    tensors["pos_embed"] = tensors["pos_embed"][:, 1:].clone()
    save_file(tensors, tmp_path / "w.safetensors")
    weights = open_timm(open_tensor_file(tmp_path / "w.safetensors"), {}, Hints(num_heads=2, grid_side=4))
    table = weights.tensor("embed.position")
    assert not table[:, 0].any()
    assert torch.equal(table[:, 1:], tensors["pos_embed"])


def test_other_epsilons_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        saved(tmp_path, ModelConfig(name="r50_vit_b16", **SMALL))
    assert "timm's ResNets have other epsilons" in caplog.text


def test_a_published_model_with_rotary_positions_is_known_by_its_name(timm: ModuleType) -> None:
    """timm's own model, of which config.json gives no arguments."""
    sizes: dict[str, Any] = {"depth": 1, "embed_dim": 24, "num_heads": 3, "img_size": 48}
    other = timm.create_model("vit_base_patch16_rope_224", num_classes=3, **sizes).eval()
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    file = TensorFile(
        where="w",
        shapes={name: tuple(value.shape) for name, value in other.state_dict().items()},
        read=lambda name: other.state_dict()[name],
    )
    description: dict[str, Any] = {"architecture": "vit_base_patch16_rope_224.naver_in1k"}
    description |= {"pretrained_cfg": {"input_size": [3, 48, 48]}}
    weights = open_timm(file, description, Hints(num_heads=3))
    assert (weights.config.position, weights.config.image_size) == ("rope2d", 48)
    images = random_images(48, 48)
    with torch.no_grad():
        torch.testing.assert_close(filled_model(weights)(images), other(theirs_of(images)), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("token", "arguments"),
    [
        pytest.param(True, {}, id="rows for all tokens"),
        pytest.param(True, {"no_embed_class": True}, id="rows for patches alone, as in DINOv2 with registers"),
        pytest.param(False, {}, id="rows for registers, without a class token"),
        pytest.param(False, {"no_embed_class": True}, id="no class token, rows for patches alone"),
    ],
)
@pytest.mark.parametrize("is_bare", [False, True], ids=["folder", "file"])
def test_registers_of_timms_own_models(
    timm: ModuleType, tmp_path: Path, token: bool, arguments: dict[str, Any], is_bare: bool
) -> None:
    """What the position table has for registers is added to them."""
    sizes: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2}
    sizes |= {"mlp_ratio": 2, "reg_tokens": 3, "init_values": 0.1, "class_token": token, **arguments}
    sizes |= {} if token else {"global_pool": "avg", "fc_norm": False}
    other = timm.create_model("vit_base_patch16_224", num_classes=3, **sizes).eval()
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_file(other.state_dict(), tmp_path / "model.safetensors")
    description = {} if is_bare else {"architecture": "vit_base_patch16_224", "model_args": sizes}
    weights = open_timm(open_tensor_file(tmp_path / "model.safetensors"), description, Hints(num_heads=2, grid_side=4))
    assert (weights.config.registers, weights.config.layer_scale) == (3, 1e-5 if is_bare else 0.1)
    images = random_images(16, 16)
    ours = filled_model(weights)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), other(theirs_of(images)), rtol=0, atol=2e-5)


@pytest.mark.long
@pytest.mark.slow
def test_timm_scores_a_run_as_we_do_to_the_sample(
    timm: ModuleType, tmp_path: Path, finished_runs: FinishedRuns
) -> None:
    """A trained run on all 359 test digits: of each label, the same images are said to be of each class."""
    run_dir, data = finished_runs.get(1), str(tmp_path / "test")
    assert pack.run(pack.PackJob(out=data, source=DigitsSource(split="test"), split="test")) == 0
    own = ("--weights", str(run_dir / "weights"), "--data.url", data, "--run-dir", str(tmp_path / "own"))
    assert patchline("evaluate", *own, "--device", "cpu").code == 0
    assert patchline("export", str(run_dir / "weights"), "--format=timm", f"--out={tmp_path / 'timm'}").code == 0
    other = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    confusion: Counter[tuple[int, int]] = Counter()
    with tarfile.open(next((tmp_path / "test").rglob("*.tar"))) as tar:
        members = {Path(one.name): tar.extractfile(one).read() for one in tar if one.isfile()}  # type: ignore[union-attr]
    for name, content in members.items():
        if name.suffix == ".png":
            pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"), dtype=np.float32)
            image_13HW = torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1)[None]
            label = int(members[name.with_suffix(".cls")])
            confusion[label, int(other(image_13HW).argmax())] += 1
    assert confusion.total() == 359
    found = json.loads((tmp_path / "own" / "classes.json").read_text())
    assert {(label, said): count for label, said, count in found["confusion"]} == confusion

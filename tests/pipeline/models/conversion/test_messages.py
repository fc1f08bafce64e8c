"""What conversion says when it refuses, each message once: weights of other libraries, and files that hold none."""

import argparse
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.models import ModelConfig
from pipeline.models.config import BIT_RESNETS
from pipeline.models.conversion.config import Change, Format, Hints
from pipeline.models.conversion.convert import changed, save_as
from pipeline.models.conversion.layout import (
    AS_IS,
    TRANSPOSED,
    OurView,
    TensorMapping,
    chunks,
    read_layout,
    write_layout,
)
from pipeline.models.conversion.npz import normalised, open_npz, save_npz, with_table
from pipeline.models.conversion.open_any import open_any, open_plain
from pipeline.models.conversion.open_file import open_safetensors_file, open_sharded, open_tensor_file, open_torch_file
from pipeline.models.conversion.pixel_range import PIXELS, folded, of_processor, of_timm
from pipeline.models.conversion.sizes import bit_config, pair_of, side_of
from pipeline.models.conversion.tensor_file import FILE_ERRORS, TensorFile, readable
from pipeline.models.conversion.timm import model_in, open_timm
from pipeline.models.conversion.zip_file import open_npz_file, open_zip, write_npz
from pipeline.models.weights.folder import PIXELS_FILE
from tests.pipeline.models.conversion.random_weights import (
    AVERAGE,
    BIT,
    DISTILLED,
    HYBRID,
    MAP,
    REPRESENTATION,
    ROTARY,
    TINY,
    VIT,
    arrays_in,
    random_model,
    tensors_of,
)
from tests.pipeline.models.conversion.test_convert import DEVIATION, HEADS, MEAN, exported, weights_of
from tests.pipeline.models.conversion.test_dino_files import of_dinov3
from tests.pipeline.models.conversion.test_dino_files import opened as opened_dino
from tests.pipeline.models.conversion.test_hugging_face import opened as opened_hugging_face
from tests.pipeline.models.conversion.test_hugging_face import saved as saved_hugging_face
from tests.pipeline.models.conversion.test_layout import TABLE
from tests.pipeline.models.conversion.test_npz import NO_HINTS, stacked
from tests.pipeline.models.conversion.test_npz import saved as saved_npz
from tests.pipeline.models.conversion.test_npz import written as written_npz
from tests.pipeline.models.conversion.test_open_file import OTHERS, TORCH_VALUES, Trap, sharded
from tests.pipeline.models.conversion.test_open_file import VALUES as VALUES_OPEN_FILE
from tests.pipeline.models.conversion.test_pixel_range import OURS
from tests.pipeline.models.conversion.test_pixel_range import VIT as VIT_PIXEL_RANGE
from tests.pipeline.models.conversion.test_sizes import TI, USUAL, config_of
from tests.pipeline.models.conversion.test_tensor_file import VALUES as VALUES_TENSOR_FILE
from tests.pipeline.models.conversion.test_timm import opened as opened_timm
from tests.pipeline.models.conversion.test_timm import saved as saved_timm
from tests.pipeline.models.conversion.test_timm_config import GAP, flat, shapes_of_tiny
from tests.pipeline.models.conversion.test_timm_config import opened as opened_timm_config
from tests.pipeline.models.conversion.test_timm_config import written as written_timm_config
from tests.pipeline.models.conversion.test_zip_file import VALUES as VALUES_ZIP_FILE
from tests.pipeline.models.conversion.test_zip_file import archive, member, plain
from tests.pipeline.models.parity import imported
from tests.rigs.messages import Row, row, table

OTHER_FORMATS: tuple[Format, ...] = ("vision_transformer", "big_vision", "timm", "hugging_face")
NPZ: tuple[Format, ...] = ("vision_transformer", "big_vision")
AXIAL_NORMED = replace(AVERAGE, attention="axial", qk_norm=True)
DINOV3 = replace(VIT, position="rope2d", num_heads=3, layer_norm_epsilon=1e-5)
OF_DINOV3: dict[Format, str] = {
    "timm": "norms with an epsilon of 1e-05 (model.layer_norm_epsilon)",
    "hugging_face": "rotary positions (model.position)",
}
BASIC_UNITS = (
    "basic units with group norm and standardised weights (timm's resnetv2_18 and resnetv2_34 have batch norm)"
)
NOWHERE = {
    "SwiGLU (model.mlp)": replace(VIT, mlp="swiglu"),
    "norms inside of attention or MLPs (model.inner_norms)": replace(VIT, inner_norms="mlp"),
    "a norm before its layers (model.first_norm) and a bias of its patches": replace(VIT, first_norm=True),
    "RMSNorms (model.norm)": replace(VIT, norm="rmsnorm"),
    "a norm of its patches (model.patch_norm)": replace(VIT, patch_norm=True),
    "relative positions": replace(VIT, position="relative"),
    "positions at every layer": replace(VIT, position_at="layers_shared"),
    BASIC_UNITS: replace(BIT, name="bit_r18x1"),
    "axial attention (model.attention)": replace(AVERAGE, attention="axial"),
}
ROTATIONS: tuple[dict[str, Any], ...] = (
    {"rope_type": "mixed"},
    {"rope_grid_offset": 0.5},
    {"ref_feat_shape": [16, 14]},
    {"use_abs_pos_emb": True},
)
NUM_PATCHES = "a whole number of 1 or more, the rows of its position table"
ELSEWHERE: dict[str, tuple[ModelConfig, tuple[Format, ...]]] = {
    "a last norm of the mean, or none (model.last_norm)": (replace(VIT, last_norm="none"), ("timm",)),
    "registers": (replace(VIT, registers=2), ("timm",)),
    "a distillation token (model.distillation_token)": (DISTILLED, ("timm", "hugging_face")),
    "norms of queries and keys (model.qk_norm)": (replace(VIT, qk_norm=True), ("timm",)),
    "norms with an epsilon of 1e-12 (model.layer_norm_epsilon)": (
        replace(VIT, layer_norm_epsilon=1e-12),
        (*NPZ, "hugging_face"),
    ),
    "rotary positions (model.position)": (replace(VIT, position="rope2d", num_heads=3), ("timm",)),
    "attention pooling (model.pooling)": (MAP, ("timm", "big_vision")),
    "a hidden layer before the head (model.representation, which --new-head drops)": (REPRESENTATION, NPZ),
    "no class token (model.pooling)": (AVERAGE, (*NPZ, "timm")),
    "a ResNet before its layers": (HYBRID, ("vision_transformer", "timm")),
    "no transformer": (BIT, (*NPZ, "timm")),
}

NO_SIZES: tuple[object, ...] = (True, "48", 0, -3, [48], [48, True], [1, 2, 3], 48.0, {}, [0, 4])


def bomb(path: Path, num_bytes: int) -> Path:
    """An .npz of zeros, a thousandth of its content: its sizes are true."""
    header = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118)
    header += f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({num_bytes // 4},)}}".ljust(117).encode() + b"\n"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("embedding/kernel.npy", "w") as member,
    ):
        member.write(header)
        for _ in range(num_bytes >> 20):
            member.write(bytes(1 << 20))
    return path


class Other:
    """An object of no known type."""


def config_json(folder: Path, content: object) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))


def other_classes(folder: Path) -> None:
    weights = weights_of(VIT, folder)
    changed(weights, Change(num_classes=7))


def no_head(folder: Path) -> None:
    state = {name: value for name, value in random_model(VIT).state_dict().items() if "head" not in name}
    save_file(state, folder / "w.safetensors")
    weights = open_any(str(folder / "w.safetensors"), HEADS)
    changed(weights, Change())


def classes_without_a_head(folder: Path) -> None:
    state = {name: value for name, value in random_model(VIT).state_dict().items() if "head" not in name}
    save_file(state, folder / "w.safetensors")
    weights = open_any(str(folder / "w.safetensors"), HEADS)
    changed(weights, Change(num_classes=5))


def opening_what(folder: Path, make: Callable[[Path], object]) -> None:
    make(folder / "w")
    open_any(str(folder / "w"), Hints())


def folder_of_another_model(folder: Path) -> None:
    config_json(folder / "w", {"model_type": "beit"})
    save_file({"a": torch.zeros(1)}, folder / "w" / "model.safetensors")
    open_any(str(folder / "w"), Hints())


def file_of_another_model(folder: Path) -> None:
    config_json(folder / "w", {"model_type": "beit"})
    save_file({"a": torch.zeros(1)}, folder / "w" / "model.safetensors")
    open_any(str(folder / "w" / "model.safetensors"), Hints())


def hugging_face_tensors_alone(tmp_path: Path) -> None:
    folder = exported(tmp_path, VIT, "hugging_face")
    open_any(str(folder / "model.safetensors"), Hints())


def file_with_a_name_of_other_pixels(tmp_path: Path) -> None:
    folder, hints = exported(tmp_path, VIT, "timm"), Hints(num_heads=2, grid_side=4)
    for name in ("deit_tiny.safetensors", "other.safetensors"):
        (tmp_path / name).write_bytes((folder / "model.safetensors").read_bytes())
    named, _other = str(tmp_path / "deit_tiny.safetensors"), str(tmp_path / "other.safetensors")
    open_any(named, hints)


def satellite_file(tmp_path: Path) -> None:
    folder = exported(tmp_path, VIT, "timm")
    path = tmp_path / "dinov3_vitl16_pretrain_sat493m-eadcf0ff.safetensors"
    path.write_bytes((folder / "model.safetensors").read_bytes())
    open_any(str(path), Hints(num_heads=2, grid_side=4))


def file_beside_a_config_of_other_pixels(tmp_path: Path) -> None:
    folder, hints = exported(tmp_path, VIT, "timm"), Hints(num_heads=2, grid_side=4)
    for name in ("deit_tiny.safetensors", "other.safetensors"):
        (tmp_path / name).write_bytes((folder / "model.safetensors").read_bytes())
    description = json.loads((folder / "config.json").read_text())
    description["pretrained_cfg"] |= {"mean": MEAN, "std": DEVIATION}
    (folder / "config.json").write_text(json.dumps(description))
    open_any(str(folder / "model.safetensors"), hints)


def pixels_of_a_script(folder: Path, kind: Any) -> None:
    tensors = load_file(exported(folder, VIT, "timm") / "model.safetensors")
    hints, where = Hints(num_heads=2, grid_side=4), folder / "w.pth"
    torch.save({"state_dict": tensors, "args": kind(mean=tuple(MEAN), std=tuple(DEVIATION))}, where)
    torch.save({"state_dict": tensors, "args": kind(mean=None, std=None)}, where)
    torch.save({"state_dict": tensors, "args": kind(mean=None, model="deit_tiny_patch16_224")}, where)
    open_any(str(where), hints)


def hints_for_our_folder(folder: Path) -> None:
    where = weights_of(VIT, folder).where
    open_any(where, Hints(num_heads=2, gelu="tanh"))


def another_name_for_our_folder(folder: Path) -> None:
    where = weights_of(VIT, folder).where
    open_any(where, Hints(model="vit_b16"))


def npz_file_called_otherwise(folder: Path, written: Format) -> None:
    save_as(written, folder / "w", config=VIT, labels=(), tensor=tensors_of(random_model(VIT)))


def changed_to(folder: Path, change: Change, config: ModelConfig = VIT) -> None:
    changed(weights_of(config, folder), change)


def pooler_without_a_head(folder: Path) -> None:
    transformers = imported("transformers")
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20, image_size=16, patch_size=4
    )
    transformers.ViTModel(config).save_pretrained(folder)
    changed(open_any(str(folder), Hints()), Change())


def change_of(_: Path, fields: dict[str, int]) -> None:
    Change(**fields)  # type: ignore[arg-type]


def export_refused(folder: Path, config: ModelConfig, written: Format) -> None:
    """Exports a model to a format that cannot hold it, which must leave nothing behind."""
    try:
        exported(folder, config, written)
    finally:
        assert list(folder.iterdir()) == []


def other_pixels_than_declared(folder: Path, library: Format) -> None:
    where = exported(folder, VIT, library)
    entries: dict[str, object]
    name, entries = "config.json", {"pretrained_cfg": {"mean": MEAN, "std": DEVIATION}}
    if library == "hugging_face":
        name, entries = "preprocessor_config.json", {"image_mean": MEAN, "image_std": DEVIATION}
    (where / name).write_text(json.dumps(json.loads((where / name).read_text()) | entries))
    open_any(str(where), Hints(num_heads=2 if library == "timm" else None, pixels="clip"))


def hugging_face_config(folder: Path, change: dict[str, Any]) -> None:
    description = json.loads((saved_hugging_face(folder) / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(description))
    opened_hugging_face(folder)


def hugging_face_tensor_of_another_width(folder: Path) -> None:
    name = "vit.encoder.layer.1.attention.attention.key.weight"
    tensors = load_file(saved_hugging_face(folder) / "model.safetensors") | {name: torch.zeros(14, 12)}
    save_file(tensors, folder / "model.safetensors")
    opened_hugging_face(folder)


def grid_that_looks_square(folder: Path) -> None:
    transformers = imported("transformers")
    config = transformers.ViTConfig(
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=20,
        image_size=(24, 32),
        patch_size=4,
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    opened_hugging_face(folder)


def class_ids_from_one(folder: Path) -> None:
    description = json.loads((saved_hugging_face(folder) / "config.json").read_text())
    description["id2label"] = {"1": "cat", "2": "dog", "3": "fox"}
    (folder / "config.json").write_text(json.dumps(description))
    opened_hugging_face(folder)


def values_not_finite(folder: Path) -> None:
    name = "vit.encoder.layer.1.attention.attention.key.weight"
    tensors = load_file(saved_hugging_face(folder) / "model.safetensors")
    tensors[name][0, :3] = torch.tensor([float("nan"), float("inf"), 0.0])
    save_file(tensors, folder / "model.safetensors")
    opened_hugging_face(folder).tensor("blocks.1.attention.qkv.weight")


def epsilon_of_hugging_face(folder: Path, epsilon: object) -> None:
    description = json.loads((saved_hugging_face(folder) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(description | {"layer_norm_eps": epsilon}))
    opened_hugging_face(folder)


def class_name(folder: Path, name: object) -> None:
    description = json.loads((saved_hugging_face(folder) / "config.json").read_text())
    description["id2label"]["1"] = name
    (folder / "config.json").write_text(json.dumps(description))
    opened_hugging_face(folder)


def tensor_of_a_layer_in_between(_: Path) -> None:
    shapes = {"cls": (1, 1, 4), "layer01/fc/kernel": (4, 6), "layer03/fc/kernel": (4, 6), "layer03/ln.bias": (4,)}
    view = OurView(file=TensorFile(where="w", shapes=shapes, read=lambda _: torch.zeros(1)), table=TABLE)
    view.shape("blocks.1.dense.weight", 2)


def another_layout(folder: Path) -> None:
    layout = {
        "w": TensorMapping(names=("kernel",), transform=TRANSPOSED),
        "b": TensorMapping(names=("p", "q"), transform=chunks(2)),
    }
    state = {"w": torch.randn(2, 3), "b": torch.randn(4)}
    write_npz(folder / "w.npz", write_layout(layout, lambda name: state[name]))
    file, _shapes = open_tensor_file(folder / "w.npz"), {"w": (2, 3), "b": (4,)}
    other = layout | {"b": TensorMapping(names=("p",), transform=AS_IS)}
    read_layout(file, other, {"w": (5, 3), "b": (2,)}, advice="Ask")


def file_without_positions(folder: Path, config: ModelConfig) -> None:
    arrays = arrays_in(written_npz(folder, config, "vision_transformer"))
    del arrays["Transformer/posembed_input/pos_embedding"]
    open_npz(saved_npz(folder / "none.npz", arrays), NO_HINTS)


def pickled_object_beside_the_model(folder: Path) -> None:
    arrays = {f"opt/target/{name}": a for name, a in arrays_in(written_npz(folder, VIT, "vision_transformer")).items()}
    open_npz(saved_npz(folder / "p.npz", arrays | {"note": np.array([{}], dtype=object)}), NO_HINTS)


def text_in_the_place_of_a_tensor(folder: Path) -> None:
    arrays = arrays_in(written_npz(folder, VIT, "vision_transformer")) | {"cls": np.full((1, 1, 12), "a")}
    weights = open_npz(saved_npz(folder / "w.npz", arrays), NO_HINTS)
    weights.tensor("embed.class_token")


def file_of_another_width(folder: Path) -> None:
    path = written_npz(
        folder, ModelConfig(**TINY | {"num_heads": 3, "patch": 16, "image_size": 64}), "vision_transformer"
    )
    open_npz(path, Hints(model="vit_ti16"))


def stack_of(folder: Path, value: Any) -> None:
    path = stacked(folder / "w.npz")
    open_npz(stacked(path, LayerNorm_0__scale=value), Hints())


def stacks_without_end(_: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {f"Transformer/encoderblock/{number}": (1000, 1) for number in range(101)}
    shapes |= {"embedding/kernel": (4, 4, 3, 12)}
    file = TensorFile(where="w.npz", shapes=shapes, read=lambda _: torch.zeros(1))
    normalised(file)


def width_without_sines(_: Path, width: int) -> None:
    file = TensorFile(where="w", shapes={"embedding/kernel": (16, 16, 3, width)}, read=lambda _: torch.zeros(0))
    with_table(file)


def npz_of_a_root_alone(folder: Path) -> None:
    save_npz(folder / "w.npz", config=BIT, tensor=tensors_of(random_model(BIT)), dialect="big_vision")
    arrays = {name: array for name, array in arrays_in(folder / "w.npz").items() if "unit" not in name}
    np.savez(folder / "root.npz", **arrays)  # type: ignore[arg-type]
    open_npz(folder / "root.npz", Hints())


def our_tensors_with(folder: Path, change: dict[str, torch.Tensor]) -> None:
    save_file(random_model(VIT).state_dict() | change, folder / "w.safetensors")
    open_plain(open_tensor_file(folder / "w.safetensors"), Hints(num_heads=2))


def root_alone(folder: Path) -> None:
    save_file({"conv_root.weight": torch.zeros(64, 3, 7, 7)}, folder / "w.safetensors")
    open_plain(open_tensor_file(folder / "w.safetensors"), Hints())


def writing_nan(folder: Path) -> None:
    write_npz(folder / "w.npz", [("a", torch.ones(3)), ("b", torch.tensor([1.0, float("nan")]))])


def writing_over_a_folder(folder: Path) -> None:
    (folder / "w.npz").mkdir()
    write_npz(folder / "w.npz", VALUES_OPEN_FILE.items())


def writing_below_a_file(folder: Path) -> None:
    (folder / "file").write_text("")
    write_npz(folder / "file" / "w.npz", VALUES_OPEN_FILE.items())


def reading(folder: Path, name: str, write: Callable[[Path], object]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        write(folder / name)
        try:
            open_tensor_file(folder / name)
        finally:
            assert not (folder / "trapped").exists()


def reading_a_broken_member(folder: Path) -> None:
    write_npz(folder / "w.npz", [("a", torch.zeros(1000))])
    data = bytearray((folder / "w.npz").read_bytes())
    data[2000] ^= 1
    (folder / "w.npz").write_bytes(bytes(data))
    file = open_tensor_file(folder / "w.npz")
    file.read("a")


def index_of(folder: Path, where: Mapping[str, object]) -> None:
    open_sharded(sharded(folder, where))


def index_with(folder: Path, content: str) -> None:
    (folder / "i.json").write_text(content)
    open_sharded(folder / "i.json")


def cut_off_after_it_was_opened(folder: Path) -> None:
    save_file({"a": torch.ones(200)}, folder / "w.safetensors")
    file = open_safetensors_file(folder / "w.safetensors")
    (folder / "w.safetensors").write_bytes(b"abc")
    file.read("a")


def cut_off_torch_file(folder: Path, legacy: bool, share: float) -> None:
    path = folder / "w.pth"
    torch.save(TORCH_VALUES, path, _use_new_zipfile_serialization=not legacy)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    open_torch_file(path)


def object_beside_the_tensors(folder: Path) -> None:
    torch.save({"model": TORCH_VALUES, "args": Other()}, folder / "w.pth")
    open_torch_file(folder / "w.pth")


def raw_and_averaged(folder: Path, raw: str, average: str) -> None:
    torch.save({raw: TORCH_VALUES, average: OTHERS, "epoch": 3}, folder / "w.pth")
    open_torch_file(folder / "w.pth")


def averaged_that_are_empty(folder: Path, raw: str, average: str) -> None:
    torch.save({raw: TORCH_VALUES, average: OTHERS, "epoch": 3}, folder / "w.pth")
    torch.save({raw: TORCH_VALUES, average: {}}, folder / "w.pth")
    open_torch_file(folder / "w.pth", take="averaged")


def averaged_called(folder: Path, averaged: dict[str, Any]) -> None:
    optimizer = {"optimizer": {"state": {"a": torch.zeros(7)}}}
    torch.save({"model": TORCH_VALUES, **averaged, **optimizer}, folder / "w.pth")
    open_torch_file(folder / "w.pth")


def averaged_inside_the_model(folder: Path) -> None:
    torch.save({"model": {"state_dict": TORCH_VALUES, "ema": OTHERS}}, folder / "w.pth")
    open_torch_file(folder / "w.pth")


def two_raw_weights(folder: Path) -> None:
    torch.save({"state_dict": TORCH_VALUES, "model": TORCH_VALUES}, folder / "w.pth")
    open_torch_file(folder / "w.pth")


def choice_in_a_torch_file(folder: Path) -> None:
    torch.save(TORCH_VALUES, folder / "w.pth")
    open_torch_file(folder / "w.pth", take="averaged")


def choice_in_a_safetensors_file(folder: Path) -> None:
    torch.save(TORCH_VALUES, folder / "w.pth")
    save_file(TORCH_VALUES, folder / "w.safetensors")
    open_tensor_file(folder / "w.safetensors", take="raw")


def torch_tensor(folder: Path, value: torch.Tensor) -> None:
    torch.save({"a": value}, folder / "w.pth")
    open_torch_file(folder / "w.pth")


def quantised(folder: Path, suffix: str, kind: torch.dtype) -> None:
    path, tensors = folder / f"w.{suffix}", {"a": torch.ones(3, dtype=kind), "b": torch.ones(4)}
    if suffix == "npz":
        np.savez(path, a=tensors["a"].numpy(), b=tensors["b"].numpy())
    else:
        torch.save(tensors, path) if suffix == "pth" else save_file(tensors, path)
    file = open_tensor_file(path)
    file.read("a")


def pixels_of_a_processor(folder: Path, change: dict[str, Any]) -> None:
    (folder / PIXELS_FILE).write_text(json.dumps(OURS | change))
    of_processor(folder)


def pixels_of_timm(_: Path, mean: list[float], deviation: list[float] | None) -> None:
    of_timm({"mean": mean, "std": deviation}, where="w")


def pixels_of_a_resnet(_: Path) -> None:
    folded(lambda _: torch.zeros(1), replace(VIT_PIXEL_RANGE, name="r50_vit_b16"), PIXELS["imagenet"], where="w")


def sizes_of(_: Path, change: dict[str, Any], hints: Hints) -> None:
    config_of(replace(TI, **change), hints)


def bit_called_otherwise(_: Path) -> None:
    bit_config(BIT_RESNETS["bit_r50x1"], num_classes=3, where="w.npz", usual=USUAL, hints=Hints(model="vit_b16"))


def gelu_of_a_bit(_: Path) -> None:
    bit_config(BIT_RESNETS["bit_r50x1"], num_classes=3, where="w.npz", usual=USUAL, hints=Hints(gelu="tanh"))


def grid_of(_: Path, rows: int, change: dict[str, Any]) -> None:
    side_of(rows, num_class_tokens=1, where="w", name="pos", **change)


def absurd_sizes(_: Path, change: dict[str, Any]) -> None:
    config_of(replace(TI, **change))


def size_declared_as(_: Path, value: Any) -> None:
    pair_of(value, key="image_size", where="w")


def reader_that_raises(_: Path, kind: type[Exception]) -> None:
    with readable("w"):
        raise kind("broken")


def too_little_memory(_: Path) -> None:
    with readable("w", size="[3] of float32"):
        raise MemoryError


def two_models(folder: Path) -> None:
    names = ("student.patch_embed.proj.weight", "teacher.patch_embed.proj.weight")
    save_file({name: torch.zeros(1) for name in names}, folder / "w.safetensors")
    open_tensor_file(folder / "w.safetensors")


def two_of_one_name(folder: Path) -> None:
    save_file({"model.a": torch.zeros(1), "net.a": torch.ones(1)}, folder / "w.safetensors")
    open_tensor_file(folder / "w.safetensors")


def tensor_of_an_npz(folder: Path, name: str, num_dims: int) -> None:
    write_npz(folder / "w.npz", VALUES_TENSOR_FILE.items())
    open_tensor_file(folder / "w.npz").shape(name, num_dims)


def timm_crop(folder: Path, share: Any) -> None:
    description = json.loads((saved_timm(folder) / "config.json").read_text())
    description["pretrained_cfg"] |= {"crop_pct": share, "interpolation": "bicubic"}
    open_timm(open_tensor_file(folder / "model.safetensors"), description, Hints(num_heads=2))


def timm_evaluation(folder: Path, change: dict[str, Any]) -> None:
    description = json.loads((saved_timm(folder) / "config.json").read_text())
    description["pretrained_cfg"] |= change
    open_timm(open_tensor_file(folder / "model.safetensors"), description, Hints(num_heads=2))


def exported_to_timm(folder: Path, config: ModelConfig) -> None:
    try:
        saved_timm(folder / "out", config)
    finally:
        assert not (folder / "out").exists()


def timm_tensor_more(folder: Path, name: str) -> None:
    tensors = load_file(saved_timm(folder) / "model.safetensors") | {name: torch.zeros(12)}
    save_file(tensors, folder / "model.safetensors")
    opened_timm(folder)


def timm_tensor_less(folder: Path, name: str) -> None:
    tensors = load_file(saved_timm(folder) / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    opened_timm(folder)


def timm_keys_of_several_heads(folder: Path) -> None:
    tensors = load_file(saved_timm(folder) / "model.safetensors")
    of_qkv = tensors.pop("blocks.0.attn.qkv.weight")
    tensors |= {
        f"blocks.0.attn.{each}_proj.weight": of_qkv[:rows].clone() for each, rows in (("q", 12), ("k", 6), ("v", 6))
    }
    save_file(tensors, folder / "model.safetensors")
    opened_timm(folder)


def timm_config(folder: Path, change: dict[str, Any]) -> None:
    description = json.loads((saved_timm(folder) / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(description))
    opened_timm(folder)


def pooling_of_registers(folder: Path) -> None:
    path = saved_timm(folder, replace(MAP, registers=2)) / "model.safetensors"
    description = json.loads((folder / "config.json").read_text())
    description["model_args"]["pool_include_prefix"] = True
    open_timm(open_tensor_file(path), description, Hints())


def rotary_config(folder: Path, change: dict[str, Any]) -> None:
    path = saved_timm(folder, replace(ROTARY, layer_scale=0.1)) / "model.safetensors"
    description = json.loads((folder / "config.json").read_text())
    assert description["architecture"] == "vit_base_patch16_rope_224"
    open_timm(open_tensor_file(path), description | change, Hints(num_heads=3))


def tower_config(folder: Path, description: dict[str, Any]) -> None:
    path = saved_hugging_face(folder) / "config.json"
    path.write_text(json.dumps(description))
    open_any(str(folder), Hints())


def other_periods(folder: Path) -> None:
    opened_dino(folder, of_dinov3() | {"rope_embed.periods": torch.arange(1.0, 5.0)})


def rotary_without_a_config(folder: Path) -> None:
    path = saved_timm(folder, replace(ROTARY, layer_scale=0.1)) / "model.safetensors"
    open_timm(open_tensor_file(path), {}, Hints(num_heads=3))


def basic_units_of_timm(_: Path) -> None:
    names = ("stem.conv.weight", "stages.0.blocks.0.conv1.weight", "stages.0.blocks.0.conv2.weight")
    file = TensorFile(where="r18", shapes=dict.fromkeys(names, (64, 64, 3, 3)), read=lambda _: torch.zeros(1))
    open_timm(file, {}, Hints())


def heads_unknown(folder: Path) -> None:
    tensors = saved_timm(folder) / "model.safetensors"
    open_timm(open_tensor_file(tensors), {}, Hints())


def moco_v3(folder: Path, size: str) -> None:
    timm = imported("timm")
    model = timm.create_model(f"vit_{size}_patch16_224", num_classes=3, num_heads=12, depth=1, img_size=32)
    torch.save({"state_dict": model.state_dict(), "arch": f"vit_{size}"}, folder / "w.pth.tar")
    open_any(str(folder / "w.pth.tar"), Hints())


def file_named(folder: Path, name: str) -> None:
    timm = imported("timm")
    model = timm.create_model(GAP, num_classes=3, depth=1, img_size=32).eval()
    save_file(model.state_dict(), folder / name)
    (folder / "vit_base_patch16_gap_2240.safetensors").write_bytes((folder / name).read_bytes())
    open_any(str(folder / name), Hints(model="vit_b16"))


def bare_file_beside_its_config(folder: Path) -> None:
    model = imported("timm").create_model(GAP, num_classes=3, depth=1, img_size=32)
    where = written_timm_config(folder / "w", model, {"architecture": GAP, "model_args": {"img_size": 32}})
    open_any(f"{where}/model.safetensors", Hints())


def named_but_wider(folder: Path) -> None:
    timm = imported("timm")
    sizes = {"embed_dim": 768, "depth": 1, "num_heads": 8, "mlp_ratio": 3, "img_size": 32}
    model = timm.create_model("vit_small_patch16_224", num_classes=3, **sizes).eval()
    torch.save({"state_dict": model.state_dict(), "args": {"model": "vit_small_patch16_224"}}, folder / "w.pth")
    open_any(str(folder / "w.pth"), Hints())


def other_architecture(_: Path, name: str) -> None:
    timm = imported("timm")
    with torch.device("meta"):
        model = timm.create_model(name, depth=1)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    model_in(TensorFile(where="w", shapes=shapes, read=lambda _: torch.zeros(1)), {"architecture": name}, Hints())


def norms_behind(folder: Path, is_bare: bool) -> None:
    timm = imported("timm")
    name = "vit_base_patch16_rpn_224"
    arguments = {"fc_norm": False, "qkv_bias": True, "depth": 1, "img_size": 32, "init_values": None}
    model = timm.create_model(name, num_classes=3, **arguments).eval()
    if is_bare:
        torch.save({"state_dict": model.state_dict(), "args": {"model": name}}, folder / "w.pth")
    else:
        written_timm_config(folder / "w.pth", model, {"architecture": name, "model_args": arguments})
    open_any(str(folder / "w.pth"), Hints(grid_side=2))


def table_of_rows(_: Path, rows: int) -> None:
    model_in(shapes_of_tiny(rows), {}, Hints())


def flat_config(folder: Path, changes: dict[str, Any]) -> None:
    opened_timm_config(flat(folder, **changes))


def directory_of_a_gigabyte(folder: Path) -> None:
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 1 << 30, 0, 0)
    path = folder / "w.npz"
    with path.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 30)
        file.write(end)
    open_zip(path)


def members_without_end(folder: Path) -> None:
    with zipfile.ZipFile(folder / "w.npz", "w") as archive:
        for number in range(100_001):
            archive.writestr(zipfile.ZipInfo(str(number)), b"")
    open_zip(folder / "w.npz")


def compressed_torch_file(folder: Path) -> None:
    torch.save({"a": torch.zeros(1 << 20)}, folder / "w.pth")
    with zipfile.ZipFile(folder / "w.pth") as stored, zipfile.ZipFile(folder / "z.pth", "w") as again:
        for entry in stored.infolist():
            again.writestr(entry.filename, stored.read(entry), zipfile.ZIP_DEFLATED)
    open_torch_file(folder / "z.pth")


def header_of_gigabytes(folder: Path) -> None:
    with zipfile.ZipFile(folder / "w.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 31) + bytes(60 << 20))
    open_npz_file(folder / "w.npz")


def member_stored_twice(folder: Path) -> None:
    with zipfile.ZipFile(folder / "w.npz", "w") as archive:
        archive.writestr("a.npy", b"")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("a.npy", b"")
    open_zip(folder / "w.npz")


def array_that_changes(folder: Path) -> None:
    np.savez(folder / "w.npz", a=np.ones(4, np.float32))
    file = open_npz_file(folder / "w.npz")
    np.savez(folder / "w.npz", a=np.ones(9, np.float32))
    file.read("a")


def pipe_called(folder: Path, name: str) -> None:
    os.mkfifo(folder / name)
    (open_npz_file if name == "w.npz" else open_torch_file)(folder / name)


def array_declared_as(folder: Path, shape: tuple[int, ...]) -> None:
    path = archive(folder / "w.npz", plain() | {"c.npy": member(VALUES_ZIP_FILE["c"], shape)})
    open_npz_file(path)


def directory_that_lies(folder: Path) -> None:
    path = archive(folder / "w.npz", plain() | {"c.npy": member(VALUES_ZIP_FILE["c"], (10**11,))})
    data = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        was = file.getinfo("c.npy").file_size
    directory = data.rindex(b"c.npy") - 46
    claimed = (4 * 10**9).to_bytes(4, "little")
    assert data[directory + 24 : directory + 28] == was.to_bytes(4, "little")
    path.write_bytes(data[: directory + 24] + claimed + data[directory + 28 :])
    open_npz_file(path)


def archive_with(folder: Path, name: str, content: bytes) -> None:
    path = archive(folder / "w.npz", plain() | {name: content})
    open_npz_file(path)


def other_compression(folder: Path) -> None:
    path = archive(folder / "w.npz", plain(), zipfile.ZIP_LZMA)
    open_npz_file(path)


def encrypted_member(folder: Path) -> None:
    path = archive(folder / "w.npz", plain(), zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02")
    data[at + 8] |= 1
    local = data.rindex(b"PK\x03\x04")
    data[local + 6] |= 1
    path.write_bytes(bytes(data))
    open_npz_file(path)


def folder_called_npz(folder: Path) -> None:
    (folder / "w.npz").mkdir()
    open_npz_file(folder / "w.npz")


def file_gone_after_it_was_opened(folder: Path) -> None:
    (folder / "w.npz").mkdir()
    path = archive(folder / "v.npz", plain())
    file = open_npz_file(path)
    path.unlink()
    file.read("c")


def pipe_in_the_place_of_an_opened_archive(folder: Path) -> None:
    path = archive(folder / "a.npz", plain())
    file = open_npz_file(path)
    path.unlink()
    os.mkfifo(path)  # reading it would wait for ever
    file.read("c")


@table(
    # Changes and formats
    row("a head that does not fit", other_classes).says(
        "the head in 'DIR/w' does not fit: head.weight is [3, 12], [7, 12] is asked for; head.bias is [3], [7] is "
        "asked for; give --new-head to drop it for one of zeros, or leave out --num-classes"
    ),
    row("no head", no_head).says(
        "'DIR/w.safetensors' has no head (head.weight is not there); give --new-head --num-classes K for one of zeros"
    ),
    row("no head, and classes are asked for", classes_without_a_head).says(
        "the head in 'DIR/w.safetensors' does not fit: head.weight is [], [5, 12] is asked for; head.bias is [], "
        "[5] is asked for; give --new-head to drop it for one of zeros, or leave out --num-classes"
    ),
    row("nothing", opening_what, lambda _: None).says(
        "no weights at 'DIR/w'; allowed: a file that ends in .npz, .safetensors, .bin, .pth, .pt, .ckpt, "
        ".pth.tar, or a folder with config.json and model.safetensors"
    ),
    row("no such kind", opening_what, lambda p: p.write_text("x")).says(
        "no weights at 'DIR/w'; allowed: a file that ends in .npz, .safetensors, .bin, .pth, .pt, .ckpt, "
        ".pth.tar, or a folder with config.json and model.safetensors"
    ),
    row("an empty folder", opening_what, lambda p: p.mkdir()).says(
        "no config.json in 'DIR/w'; give a finished run, a folder of ours, timm's or Hugging Face's, or a file"
    ),
    row("a run that is not finished", opening_what, lambda p: (p / "checkpoints").mkdir(parents=True)).says(
        "no weights at 'DIR/w': the run in 'DIR/w' is not finished, and weights are written at its end; run its "
        "command again to continue it, or take those of a checkpoint with patchline weights"
    ),
    row("broken JSON", opening_what, lambda p: config_json(p, "{")).says(
        "'DIR/w/config.json' is no JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char "
        "1)); fetch it again"
    ),
    row("a list", opening_what, lambda p: config_json(p, [1])).says(
        "'DIR/w/config.json' is no JSON object; fetch it again"
    ),
    row("no tensors", opening_what, lambda p: config_json(p, {"model_type": "vit"})).says(
        "no tensors in 'DIR/w'; allowed: model.safetensors, model.safetensors.index.json, pytorch_model.bin"
    ),
    row("ours without tensors", opening_what, lambda p: config_json(p, {"model": {}, "format": 1})).says(
        "no weights at 'DIR/w': it has no config.json with model.safetensors; give a finished run (RUN or "
        "RUN/weights), or weights that patchline import reads: a timm or Hugging Face folder, or a .npz, "
        ".safetensors or .pth file"
    ),
    row("a folder of another model", folder_of_another_model).says(
        "config.json in 'DIR/w' has the model_type 'beit'; allowed: vit, deit, dinov2, …, timm's (with an "
        "architecture) or our own"
    ),
    row("a file of another model", file_of_another_model).says(
        "the tensors in 'DIR/w/model.safetensors' are of no model known here (a, ...); allowed: ViT, hybrid and "
        "BiT in our names or timm's"
    ),
    row("Hugging Face's tensors alone", hugging_face_tensors_alone).says(
        "'DIR/hugging_face/model.safetensors' has Hugging Face's tensors; their config.json says the rest: give "
        "the folder of both"
    ),
    row("pixels of satellite images", satellite_file).says(
        "'DIR/dinov3_vitl16_pretrain_sat493m-eadcf0ff.safetensors' is named like DINOv3's weights for satellite "
        "images, which take pixels of their own, and the file does not say which; give timm's folder of this model, "
        "or Hugging Face's"
    ),
    row("pixels that only the file's name says", file_with_a_name_of_other_pixels).says(
        "FlagNeededError: 'DIR/deit_tiny.safetensors' is named like a model that takes pixels of mean 0.485 0.456 "
        "0.406 and deviation 0.229 0.224 0.225, which the file does not say; give --pixels imagenet to fold them "
        "into the patch embedding, or --pixels paper for mean and deviation 0.5"
    ),
    row("pixels that the config.json beside a file says", file_beside_a_config_of_other_pixels).says(
        "config.json beside 'DIR/timm/model.safetensors' says pixels of mean 0.485 0.456 0.406 and deviation "
        "0.229 0.224 0.225; give the folder, 'DIR/timm', so that they are folded into the patch embedding"
    ),
    *(
        row(
            f"pixels that a script's model usually takes, {kind}",
            pixels_of_a_script,
            kind,
        ).says(
            "FlagNeededError: 'DIR/w.pth' is of the model 'deit_tiny_patch16_224', by its script's arguments, which "
            "usually takes pixels of mean 0.485 0.456 0.406 and deviation 0.229 0.224 0.225; give --pixels imagenet "
            "to fold them into the patch embedding, or --pixels paper for mean and deviation 0.5"
        )
        for kind in (dict, argparse.Namespace)
    ),
    row("hints for a folder of ours", hints_for_our_folder).says(
        "'DIR/w' is a weights folder of ours, whose config.json says all; leave out --num-heads and --gelu"
    ),
    row("another model's name for a folder of ours", another_name_for_our_folder).says(
        "--model is 'vit_b16', the weights in 'DIR/w' are of 'vit'"
    ),
    *(
        row(f"an npz file that is not called so, {written}", npz_file_called_otherwise, written).says(
            "--out is 'DIR/w'; the format …vision… is a file that ends in .npz"
        )
        for written in ("vision_transformer", "big_vision")
    ),
    row("less than a patch", changed_to, Change(image_size=2)).says(
        "--image-size is 2; allowed: multiples of 4 (px), from 4 on"
    ),
    row("no grid", changed_to, Change(image_size=18)).says(
        "--image-size is 18, not a multiple of the patch (4 px); take 16 or 20"
    ),
    row("images that are not whole patches", changed_to, Change(patch=3)).says(
        "--patch is 3, which does not divide images of 16 px; take a size that does, or give --image-size 15 or 18, too"
    ),
    row("patches larger than the images", changed_to, Change(patch=20)).says(
        "--patch is 20, which does not divide images of 16 px; take a size that does, or give --image-size 20, too"
    ),
    row("both sizes, which do not fit", changed_to, Change(patch=8, image_size=20)).says(
        "--image-size is 20, not a multiple of the patch (8 px); take 16 or 24"
    ),
    *(
        row(f"{name} in patches of another size", changed_to, Change(patch=8), config).says(
            f"--patch is 8, but 'DIR/w' has {why}; allowed: Transformers without a ResNet that take grids of any size; "
            "leave out --patch"
        )
        for name, config, why in (
            (
                "a hybrid",
                HYBRID,
                "model.name 'vit', whose patches are not pixels of the image but cells of a ResNet",
            ),
            (
                "sines",
                ModelConfig(**TINY | {"position": "sincos2d"}),
                "model.position 'sincos2d', which counts patches, so that a place has another position with each size",
            ),
            (
                "positions at each layer",
                ModelConfig(**TINY | {"position_at": "layers"}),
                "model.position_at 'layers', whose tables have one size",
            ),
        )
    ),
    row("a pooler without a head", pooler_without_a_head).says(
        "'DIR/model.safetensors' has no head (head.weight is not there); give --new-head --num-classes K for one "
        "of zeros (its hidden layer, a pooler in Hugging Face's words, is dropped then)"
    ),
    row("no class", change_of, {"new_head": True, "num_classes": 0}).says(
        "num_classes is 0; allowed: 1 to 10,000,000, or none"
    ),
    row("less than none", change_of, {"num_classes": -1}).says("num_classes is -1; allowed: 1 to 10,000,000, or none"),
    row("no image", change_of, {"image_size": 0}).says("image_size is 0; allowed: 1 to 16,384, or none"),
    row("absurd", change_of, {"new_head": True, "num_classes": 10**12}).says(
        "num_classes is 1000000000000; allowed: 1 to 10,000,000, or none"
    ),
    row("absurd pixels", change_of, {"image_size": 10**9}).says(
        "image_size is 1000000000; allowed: 1 to 16,384, or none"
    ),
    *(
        row(f"other pixels than a folder of {library} declares", other_pixels_than_declared, library).says(
            "--pixels is 'clip' (mean 0.481455 0.457827 0.408211 and deviation 0.26863 0.261303 0.275777), the "
            f"files at 'DIR/{library}/model.safetensors' say mean 0.485 0.456 0.406 and deviation 0.229 0.224 0.225; "
            "leave out --pixels"
        )
        for library in ("timm", "hugging_face")
    ),
    *(
        row(f"{part}, as {written}", export_refused, config, written).says(
            f"the model has {part}, which no other format has; allowed: --format patchline"
        )
        for part, config in NOWHERE.items()
        for written in OTHER_FORMATS
    ),
    row("axial attention and a part of timm's", export_refused, AXIAL_NORMED, "timm").says(
        "the model has axial attention (model.attention), which no other format has; allowed: --format patchline"
    ),
    *(
        row(f"{part}, as {written}", export_refused, config, written).says(
            f"the model has {part}, which the format {written} does not have: give --format "
            f"{' or '.join(formats)}, or --format patchline"
        )
        for part, (config, formats) in ELSEWHERE.items()
        for written in OTHER_FORMATS
        if written not in formats
    ),
    *(
        row(f"DINOv3's epsilon and positions, as {written}", export_refused, DINOV3, written).says(
            f"the model has {part}, which the format {written} does not have, and no other format has all of the "
            "model's parts: give --format patchline"
        )
        for written, part in OF_DINOV3.items()
    ),
    # Hugging Face's folders
    row("ReLU", hugging_face_config, {"hidden_act": "relu"}).says(
        "hidden_act in 'DIR/model.safetensors' is 'relu'; allowed: gelu, gelu_pytorch_tanh, gelu_new, quick_gelu"
    ),
    row("no biases", hugging_face_config, {"qkv_bias": False}).says(
        "qkv_bias in 'DIR/model.safetensors' is false; the paper's attention has biases: give other weights"
    ),
    row("depth", hugging_face_config, {"num_hidden_layers": 3}).says(
        "config.json beside 'DIR/model.safetensors' says num_hidden_layers 3, the tensors are of 2 layers "
        "(vit.encoder.layer.1 is the last); give both files of one model"
    ),
    row("no number", hugging_face_config, {"num_attention_heads": "two"}).says(
        "config.json beside 'DIR/model.safetensors' has {'num_hidden_layers': 2, 'num_attention_heads': 'two'}, "
        "layer_norm_eps 1e-06; allowed: numbers above 0, and an epsilon below 1"
    ),
    row("a boolean", hugging_face_config, {"num_attention_heads": True}).says(
        "config.json beside 'DIR/model.safetensors' has {'num_hidden_layers': 2, 'num_attention_heads': True}, "
        "layer_norm_eps 1e-06; allowed: numbers above 0, and an epsilon below 1"
    ),
    row("no heads", hugging_face_config, {"num_attention_heads": 0}).says(
        "config.json beside 'DIR/model.safetensors' has {'num_hidden_layers': 2, 'num_attention_heads': 0}, "
        "layer_norm_eps 1e-06; allowed: numbers above 0, and an epsilon below 1"
    ),
    row("a boolean epsilon", hugging_face_config, {"layer_norm_eps": True}).says(
        "config.json beside 'DIR/model.safetensors' has {'num_hidden_layers': 2, 'num_attention_heads': 2}, "
        "layer_norm_eps True; allowed: numbers above 0, and an epsilon below 1"
    ),
    row("no epsilon", hugging_face_config, {"layer_norm_eps": float("nan")}).says(
        "config.json beside 'DIR/model.safetensors' has {'num_hidden_layers': 2, 'num_attention_heads': 2}, "
        "layer_norm_eps nan; allowed: numbers above 0, and an epsilon below 1"
    ),
    row("another image size", hugging_face_config, {"image_size": 224}).says(
        "FlagNeededError: vit.embeddings.position_embeddings in 'DIR/model.safetensors' has 17 rows, config.json "
        "or --grid-side says a grid of 56 x 56 and the class token, 3137 rows; give both files of one model, or "
        "write the image size of the tensors into config.json (--image-size then resamples them)"
    ),
    row("images that are not square", hugging_face_config, {"image_size": [8, 32]}).says(
        "vit.embeddings.position_embeddings in 'DIR/model.safetensors' has 17 rows, config.json says a grid of 2 "
        "x 8 patches (height, width); the models here take square images: give weights of those"
    ),
    row("another patch", hugging_face_config, {"patch_size": 8}).says(
        "config.json beside 'DIR/model.safetensors' says patch_size 8 x 8, the tensors "
        "(vit.embeddings.patch_embeddings.projection.weight) are of 4 x 4; give both files of one model"
    ),
    row("text for a size", hugging_face_config, {"image_size": "16"}).says(
        "config.json beside 'DIR/model.safetensors' says image_size '16'; allowed: a number of pixels of 1 or "
        "more, or two (height, width)"
    ),
    row("a tensor of another width", hugging_face_tensor_of_another_width).says(
        "the weights at 'DIR/model.safetensors' do not fit the model: "
        "vit.encoder.layer.1.attention.attention.key.weight is [14, 12], the model needs [12, 12]. config.json "
        "and the tensors must be of one ViT. Give the file of another model"
    ),
    row("a grid that only looks square", grid_that_looks_square).says(
        "vit.embeddings.position_embeddings in 'DIR/model.safetensors' has 49 rows, config.json says a grid of 6 "
        "x 8 patches (height, width); the models here take square images: give weights of those"
    ),
    row("ids of classes beyond the classifier", class_ids_from_one).says(
        "id2label in config.json beside 'DIR/model.safetensors' has the id '3'; the classifier has 3 classes, 0 "
        "to 2: correct it"
    ),
    row("what is not finite", values_not_finite).says(
        "InvalidDataError: vit.encoder.layer.1.attention.attention.key.weight in 'DIR/model.safetensors' has 2 "
        "values of 144 that are not finite (NaN or infinite, as float32); the file is damaged or its training "
        "failed: give other weights"
    ),
    *(
        row(f"epsilon, {epsilon}", epsilon_of_hugging_face, epsilon).says(
            "config.json beside 'DIR/model.safetensors' has {'num_hidden_layers': 2, 'num_attention_heads': 2}, "
            "layer_norm_eps …; allowed: numbers above 0, and an epsilon below 1"
        )
        for epsilon in (10**400, 1e30, 0, -1e-6, True, "1e-6", [1e-6])
    ),
    *(
        row(f"name of a class, {name}", class_name, name).says(
            "InvalidDataError: the name of class 1 in config.json beside 'DIR/model.safetensors' is …; allowed: a text"
        )
        for name in (0.5, None, ["cat"])
    ),
    # Names and shapes of tensors
    row("a layer in between is missing", tensor_of_a_layer_in_between).says(
        "'w' has no tensor layer02/fc/kernel, which its model needs; it has 4: cls, layer01/fc/kernel, "
        "layer03/fc/kernel, layer03/ln.bias, ...; give the file of a ViT, a hybrid or a BiT ResNet"
    ),
    row("another layout", another_layout).says(
        "the weights at 'DIR/w.npz' do not fit the model: kernel is [3, 2], the model needs [3, 5]; q [2] is not "
        "in the model. Ask"
    ),
    # .npz files
    row("ViT", file_without_positions, VIT).says(
        "'DIR/none.npz' has no position embeddings (Transformer/posembed_input/pos_embedding), which every model "
        "of vision_transformer has; allowed without are big_vision's, which computes them: fetch the file again"
    ),
    row("hybrid", file_without_positions, HYBRID).says(
        "'DIR/none.npz' has no position embeddings (Transformer/posembed_input/pos_embedding), which every model "
        "of vision_transformer has; allowed without are big_vision's, which computes them: fetch the file again"
    ),
    row("a pickled object beside the model", pickled_object_beside_the_model).says(
        "note in 'DIR/p.npz' is a pickled object, not numbers: reading it would run code from the file; save it "
        "again as arrays of numbers, or leave it out"
    ),
    row("a text in the place of a tensor", text_in_the_place_of_a_tensor).says(
        "cls [1, 1, 12] in 'DIR/w.npz' is of type <U1; allowed: numbers"
    ),
    row("another model, in the names used in the file", file_of_another_width).says(
        "the weights at 'DIR/vision_transformer.npz' do not fit the model: embedding/kernel is [16, 16, 3, 12], "
        "the model needs [16, 16, 3, 192]; embedding/bias is [12], the model needs [192]; cls is [1, 1, 12], the "
        "model needs [1, 1, 192]…is [12, 3, 4], the model needs [192, 3, 64]; and 191 more. Give the file of "
        "another model, or leave out --model vit_ti16"
    ),
    row("another depth", stack_of, np.zeros((3, 12), np.float32)).says(
        "Transformer/encoderblock/LayerNorm_0/scale in 'DIR/w.npz' is [3, 12], others are of 2 layers; a stack "
        "has one slice for each of the layers, of which 1000 are allowed: fetch the file again"
    ),
    row("no dimension", stack_of, np.zeros((), np.float32)).says(
        "Transformer/encoderblock/LayerNorm_0/scale in 'DIR/w.npz' is [], others are of 2 layers; a stack has one "
        "slice for each of the layers, of which 1000 are allowed: fetch the file again"
    ),
    row("no values", stack_of, np.zeros((10**9, 0), np.float32)).says(
        "Transformer/encoderblock/LayerNorm_0/scale in 'DIR/w.npz' is [1000000000, 0], others are of 2 layers; a "
        "stack has one slice for each of the layers, of which 1000 are allowed: fetch the file again"
    ),
    row(
        "stacks without end",
        stacks_without_end,
    ).says(
        "InvalidDataError: 'w.npz' has 101 tensors of 1,000 layers; allowed: 100,000 of all layers: fetch the "
        "file again"
    ),
    *(
        row(f"width without a table of sines, {width}", width_without_sines, width).says(
            "the file has no pos_embedding, and its width … has no table of sines; allowed: multiples of 4 from 8 on: "
            "give the file of a model with position embeddings"
        )
        for width in (4, 10)
    ),
    row("a root alone, in an npz", npz_of_a_root_alone).says(
        "'DIR/root.npz' has no stages after its root; give the file of a BiT ResNet"
    ),
    # Files in our own names
    row("width", our_tensors_with, {"norm.weight": torch.zeros(14)}).says(
        "the weights at 'DIR/w.safetensors' do not fit the model: norm.weight is [14], the model needs [12]. Give "
        "the file of another model, or leave out --num-heads 2"
    ),
    row("too many", our_tensors_with, {"blocks.0.extra": torch.zeros(2)}).says(
        "the weights at 'DIR/w.safetensors' do not fit the model: blocks.0.extra [2] is not in the model. Give "
        "the file of another model, or leave out --num-heads 2"
    ),
    row("grid", our_tensors_with, {"embed.position": torch.zeros(1, 19, 12)}).says(
        "embed.position in 'DIR/w.safetensors' has 19 rows, which is the grid of no square image; allowed: a "
        "square or a square and one more for the class token"
    ),
    row("a root alone", root_alone).says(
        "'DIR/w.safetensors' has no stages after its root; give the file of a BiT ResNet"
    ),
    # Files of each kind
    row("values to write that are not finite", writing_nan).says(
        "InvalidDataError: b for 'DIR/w.npz' has 1 values of 2 that are not finite (NaN or infinite, as float32); "
        "the file is damaged or its training failed: give other weights"
    ),
    row("a folder in the place of the file to write", writing_over_a_folder).says(
        "--out is 'DIR/w.npz', a folder; give the .npz file to write"
    ),
    row("a folder that cannot be made", writing_below_a_file).says(
        "'DIR/file/w.npz' cannot be written: File exists; give another --out, one this user may write to"
    ),
    row(
        "an object in an npz",
        reading,
        "w.npz",
        lambda path: np.savez(path, fine=np.ones(2), trap=np.array([Trap()], dtype=object)),
    ).says(
        "trap in 'DIR/w.npz' is a pickled object, not numbers: reading it would run code from the file; save it "
        "again as arrays of numbers, or leave it out"
    ),
    row("pickle as npz", reading, "w.npz", lambda path: path.write_bytes(pickle.dumps(Trap()))).says(
        "InvalidDataError: 'DIR/w.npz' is no .npz file, or is cut off (File is not a zip file); fetch it again"
    ),
    row("empty npz", reading, "w.npz", lambda path: path.write_bytes(b"")).says(
        "InvalidDataError: 'DIR/w.npz' is no .npz file, or is cut off (File is not a zip file); fetch it again"
    ),
    row("pth", reading, "w.pth", lambda path: path.write_bytes(pickle.dumps({"a": Trap()}))).says(
        "'DIR/w.pth' cannot be read as tensors alone (UnpicklingError); reading more would run code from the "
        "file; save its state dict, better as safetensors"
    ),
    row("pt", reading, "w.pt", lambda path: torch.save({"a": Trap()}, path)).says(
        "'DIR/w.pt' cannot be read as tensors alone (it also holds a getattr); reading more would run code from "
        "the file; save its state dict, better as safetensors"
    ),
    row("a list", reading, "w.pt", lambda path: torch.save([1, 2], path)).says(
        "'DIR/w.pt' holds a list; allowed: a state dict of tensors by name"
    ),
    row("safetensors", reading, "w.safetensors", lambda path: path.write_bytes(b"abc")).says(
        "InvalidDataError: 'DIR/w.safetensors' is no safetensors file: it cannot be read (its header declares "
        "6,513,249 bytes; allowed in a file of 3: 1 to -5); is it cut off? Fetch the file again"
    ),
    row("suffix", reading, "w.onnx", lambda path: path.write_bytes(b"abc")).says(
        "no weights at 'DIR/w.onnx'; allowed: files that end in .npz, .safetensors, .bin, .pth, .pt, .ckpt, .pth.tar"
    ),
    row("nothing there", reading, "gone.npz", lambda _: None).says(
        "no weights at 'DIR/gone.npz'; allowed: files that end in .npz, .safetensors, .bin, .pth, .pt, .ckpt, .pth.tar"
    ),
    row("values that are damaged", reading_a_broken_member).says(
        "InvalidDataError: a in 'DIR/w.npz' cannot be read (Bad CRC-32 for file 'a.npy'); is it cut off? Fetch "
        "the file again"
    ),
    row("above", index_of, {"a": "../one.safetensors"}).says(
        "a in 'DIR/model.safetensors.index.json' is in '../one.safetensors'; allowed: names of files beside it, "
        "without a folder"
    ),
    row("anywhere", index_of, {"a": "/etc/x.safetensors"}).says(
        "a in 'DIR/model.safetensors.index.json' is in '/etc/x.safetensors'; allowed: names of files beside it, "
        "without a folder"
    ),
    row("the folder above", index_of, {"a": ".."}).says(
        "a in 'DIR/model.safetensors.index.json' is in '..'; allowed: names of files beside it, without a folder"
    ),
    row("a number", index_of, {"a": 3}).says(
        "a in 'DIR/model.safetensors.index.json' is in 3; allowed: names of files beside it, without a folder"
    ),
    row("a piece that is not there", index_of, {"a": "three.safetensors"}).says(
        "no weights at 'DIR/three.safetensors'; fetch the file again"
    ),
    row("no such tensor", index_of, {"z": "one.safetensors"}).says(
        "z is in no piece: 'DIR/one.safetensors' has it not; fetch the folder again"
    ),
    *(
        row(f"an index with, {content}", index_with, content).says("'DIR/i.json' …s no …; fetch it again")
        for content in ("{", "[]", '{"weight_map": []}', "{}")
    ),
    row("a file cut off after it was opened", cut_off_after_it_was_opened).says(
        "InvalidDataError: a in 'DIR/w.safetensors' cannot be read (the file ends 800 bytes before the end of a); "
        "is it cut off? Fetch the file again"
    ),
    *(
        row(
            f"{share:.0%} of a torch file, {'before' if legacy else 'since'} 1.6", cut_off_torch_file, legacy, share
        ).says("…'DIR/w.pth' is cut off, or no file of PyTorch's (…); fetch it again")
        for legacy in (False, True)
        for share in (0, 0.01, 0.5, 0.97)
    ),
    row("an object beside the tensors", object_beside_the_tensors).says(
        "'DIR/w.pth' cannot be read as tensors alone (it also holds a "
        "tests.pipeline.models.conversion.test_messages.Other); reading more would run code from the file; save "
        "its state dict, better as safetensors"
    ),
    *(
        row(
            f"raw and averaged weights, {raw}, {average}",
            raw_and_averaged,
            raw,
            average,
        ).says(
            "FlagNeededError: 'DIR/w.pth' holds the raw weights (…) and their average over training (…); give --take "
            "raw or --take averaged"
        )
        for raw in ("state_dict", "model", "student")
        for average in ("state_dict_ema", "model_ema", "teacher")
    ),
    *(
        row(
            f"averaged weights that are empty, {raw}, {average}",
            averaged_that_are_empty,
            raw,
            average,
        ).says("'DIR/w.pth' holds no averaged weights; it has …; leave out --take")
        for raw in ("state_dict", "model", "student")
        for average in ("state_dict_ema", "model_ema", "teacher")
    ),
    row("ema_model", averaged_called, {"ema_model": OTHERS}).says(
        "FlagNeededError: 'DIR/w.pth' holds the raw weights (model) and their average over training (ema_model); "
        "give --take raw or --take averaged"
    ),
    row("model_ema_state_dict", averaged_called, {"model_ema_state_dict": OTHERS}).says(
        "FlagNeededError: 'DIR/w.pth' holds the raw weights (model) and their average over training "
        "(model_ema_state_dict); give --take raw or --take averaged"
    ),
    row("ema_state", averaged_called, {"ema_state": OTHERS}).says(
        "FlagNeededError: 'DIR/w.pth' holds the raw weights (model) and their average over training (ema_state); "
        "give --take raw or --take averaged"
    ),
    row("swa_state_dict", averaged_called, {"swa_state_dict": OTHERS}).says(
        "FlagNeededError: 'DIR/w.pth' holds the raw weights (model) and their average over training "
        "(swa_state_dict); give --take raw or --take averaged"
    ),
    row("averaged_model", averaged_called, {"averaged_model": OTHERS}).says(
        "FlagNeededError: 'DIR/w.pth' holds the raw weights (model) and their average over training "
        "(averaged_model); give --take raw or --take averaged"
    ),
    row("ema_network", averaged_called, {"ema_network": OTHERS}).says(
        "FlagNeededError: 'DIR/w.pth' holds the raw weights (model) and their average over training "
        "(ema_network); give --take raw or --take averaged"
    ),
    row(
        "a decay beside it",
        averaged_called,
        {"model_ema": {"decay": 0.9, "module": OTHERS}},
    ).says(
        "FlagNeededError: 'DIR/w.pth' holds the raw weights (model) and their average over training "
        "(model_ema.module); give --take raw or --take averaged"
    ),
    row("a prefix", averaged_called, {"ema": {"module.a": torch.zeros(5)}}).says(
        "FlagNeededError: 'DIR/w.pth' holds the raw weights (model) and their average over training (ema); give "
        "--take raw or --take averaged"
    ),
    row("averaged weights inside the model's entry", averaged_inside_the_model).says(
        "FlagNeededError: 'DIR/w.pth' holds the raw weights (model.state_dict) and their average over training "
        "(model.ema); give --take raw or --take averaged"
    ),
    row("two weights of one model", two_raw_weights).says(
        "'DIR/w.pth' holds several weights of one model, state_dict and model, and does not say which to take; "
        "save one of them alone"
    ),
    row("a choice of one, torch", choice_in_a_torch_file).says(
        "'DIR/w.pth' holds one set of weights and does not say which; leave out --take"
    ),
    row("a choice of one, safetensors", choice_in_a_safetensors_file).says(
        "'DIR/w.safetensors' holds one set of weights and does not say which; leave out --take"
    ),
    row("sparse", torch_tensor, torch.eye(3).to_sparse()).says(
        "a [3, 3] in 'DIR/w.pth' is sparse, quantised or nested; allowed: dense tensors: save it as one"
    ),
    row("meta", torch_tensor, torch.empty(3, device="meta")).says(
        "a [3] in 'DIR/w.pth' has no values (it is on the meta device); save the model with its values"
    ),
    row("one", torch_tensor, torch.zeros(1).expand(10**12)).says(
        "a [1000000000000] in 'DIR/w.pth' declares 4000000000000 bytes of torch.float32, where 4 are; save it "
        "contiguously"
    ),
    row("complex", torch_tensor, torch.zeros(3, dtype=torch.complex64)).says(
        "a [3] in 'DIR/w.pth' is of type torch.complex64; allowed: real numbers"
    ),
    *(
        row(
            f"quantised, {suffix}, {kind}",
            quantised,
            suffix,
            kind,
        ).says(
            "… in 'DIR/w.…' is of type …; allowed: floating-point numbers: weights of whole numbers are quantised, "
            "and their scale is not applied here; give the weights before quantisation"
        )
        for suffix in ("pth", "safetensors", "npz")
        for kind in (torch.int8, torch.int64)
    ),
    # Pixels
    row("{'do_normalize': False}", pixels_of_a_processor, {"do_normalize": False}).says(
        "'DIR/preprocessor_config.json' says do_normalize False; the models here take value / 255, normalised by "
        "a mean and a deviation: give weights trained so"
    ),
    row("{'do_rescale': False}", pixels_of_a_processor, {"do_rescale": False}).says(
        "'DIR/preprocessor_config.json' says do_rescale False; the models here take value / 255, normalised by a "
        "mean and a deviation: give weights trained so"
    ),
    row("{'rescale_factor': 1 / 127.5}", pixels_of_a_processor, {"rescale_factor": 1 / 127.5}).says(
        "'DIR/preprocessor_config.json' says rescale_factor 0.00784313725490196; the models here take value / "
        "255, normalised by a mean and a deviation: give weights trained so"
    ),
    row("{'do_flip_channel_order': True}", pixels_of_a_processor, {"do_flip_channel_order": True}).says(
        "'DIR/preprocessor_config.json' says do_flip_channel_order True; the models here take value / 255, "
        "normalised by a mean and a deviation: give weights trained so"
    ),
    row("{'image_mean': [0.485, 0.456]}", pixels_of_a_processor, {"image_mean": [0.485, 0.456]}).says(
        "'DIR/preprocessor_config.json' says pixels of mean [0.485, 0.456]; allowed: a number from 0 to 1, or three"
    ),
    row("{'image_std': None}", pixels_of_a_processor, {"image_std": None}).says(
        "'DIR/preprocessor_config.json' says pixels of deviation None; allowed: a number from 0.001 to 1, or three"
    ),
    row("{'image_std': [0.2, 0.2, 0]}", pixels_of_a_processor, {"image_std": [0.2, 0.2, 0]}).says(
        "'DIR/preprocessor_config.json' says pixels of deviation [0.2, 0.2, 0]; allowed: a number from 0.001 to "
        "1, or three"
    ),
    row(
        "{'image_mean': [123.675, 116.28, 103.53]}", pixels_of_a_processor, {"image_mean": [123.675, 116.28, 103.53]}
    ).says(
        "'DIR/preprocessor_config.json' says pixels of mean [123.675, 116.28, 103.53]; allowed: a number from 0 "
        "to 1, or three"
    ),
    row("timm's mean in bytes", pixels_of_timm, [123.7] * 3, [0.5] * 3).says(
        "'w' says pixels of mean [123.7, 123.7, 123.7]; allowed: a number from 0 to 1, or three"
    ),
    row("timm's mean in bytes, no deviation", pixels_of_timm, [123.7] * 3, None).says(
        "'w' says pixels of mean [123.7, 123.7, 123.7]; allowed: a number from 0 to 1, or three"
    ),
    row("timm's mean above 255", pixels_of_timm, [300] * 3, [58] * 3).says(
        "'w' says pixels of mean [300, 300, 300]; allowed: a number from 0 to 1, or three"
    ),
    row("pixels that a ResNet pads", pixels_of_a_resnet).says(
        "'w' takes pixels of mean 0.485 0.456 0.406 and deviation 0.229 0.224 0.225; the first convolution of a "
        "ResNet pads its input, so they cannot be folded into it, and the models here take mean and deviation "
        "0.5: give weights trained so"
    ),
    # Sizes
    row("heads", sizes_of, {"width": 20}, Hints()).says(
        "FlagNeededError: 'w.npz' does not say how many heads its attention of width 20 has; give --num-heads"
    ),
    row("BiT", sizes_of, {}, Hints(model="bit_r50x1")).says(
        "--model is 'bit_r50x1', the file is of a transformer; allowed: vit_b32, vit_b16, vit_l32, vit_l16, "
        "vit_h14, vit_ti16, vit_s16, vit_s32, vit_b8, vit_g14, vit_bigg14, vit_b32_half, r50_vit_b16, "
        "r50_vit_b32, r50_vit_l16, r50_vit_l32, r26_vit_s32, r_vit_ti16"
    ),
    row("two numbers of heads", sizes_of, {"num_heads": 3}, Hints(num_heads=4)).says(
        "--num-heads, 'w.npz' and --model say 4, 3, nothing heads; leave out --num-heads and --model where the "
        "file says it"
    ),
    row("not the model's heads", sizes_of, {"num_heads": 6}, Hints(model="vit_ti16")).says(
        "--num-heads, 'w.npz' and --model say nothing, 6, 3 heads; leave out --num-heads and --model where the "
        "file says it"
    ),
    row("no ResNet", sizes_of, {}, Hints(resnet_epsilons="timm")).says(
        "--resnet-epsilons is given, but 'w.npz' has no ResNet; leave it out"
    ),
    row("grid", sizes_of, {"num_positions": 199}, Hints()).says(
        "pos in 'w.npz' has 199 rows, which is the grid of no square image; allowed: a square or a square and one "
        "more for the class token"
    ),
    row("a row too many", sizes_of, {"class_token": False}, Hints()).says(
        "pos in 'w.npz' has 197 rows, which is the grid of no square image; allowed: a square"
    ),
    row("the name of a ViT for a BiT", bit_called_otherwise).says(
        "--model is 'vit_b16', the file is of a BiT ResNet; allowed: bit_r50x1, bit_r50x2, bit_r101x1, "
        "bit_r152x1, bit_r152x2, bit_r152x4, bit_r200x3, bit_r18x1, bit_r34x1"
    ),
    row("a BiT with a GELU", gelu_of_a_bit).says(
        "a BiT ResNet has no heads, GELU or layer norm; leave out --num-heads, --gelu and the like"
    ),
    row("not square", grid_of, 49, {"declared": (6, 8)}).says(
        "pos in 'w' has 49 rows, config.json says a grid of 6 x 8 patches (height, width); the models here take "
        "square images: give weights of those"
    ),
    row("of another size", grid_of, 50, {"declared": (6, 6)}).says(
        "FlagNeededError: pos in 'w' has 50 rows, config.json or --grid-side says a grid of 6 x 6 without the "
        "class token, 36 rows or a grid of 6 x 6 and the class token, 37 rows; give both files of one model, or "
        "write the image size of the tensors into config.json (--image-size then resamples them)"
    ),
    row("no row", grid_of, 37, {"declared": (6, 6), "class_row": False}).says(
        "FlagNeededError: pos in 'w' has 37 rows, config.json or --grid-side says a grid of 6 x 6 without the "
        "class token, 36 rows; give both files of one model, or write the image size of the tensors into "
        "config.json (--image-size then resamples them)"
    ),
    row("a row", grid_of, 36, {"declared": (6, 6), "class_row": True}).says(
        "FlagNeededError: pos in 'w' has 36 rows, config.json or --grid-side says a grid of 6 x 6 and the class "
        "token, 37 rows; give both files of one model, or write the image size of the tensors into config.json "
        "(--image-size then resamples them)"
    ),
    row("never guessed", grid_of, 36, {"class_row": True}).says(
        "pos in 'w' has 36 rows, which is the grid of no square image; allowed: a square and one more for the "
        "class token"
    ),
    row("classes", absurd_sizes, {"num_classes": 10**8}).says(
        "InvalidDataError: 'w.npz' is of no model that can be built: model.num_classes is 100000000; allowed: 0 "
        "(as many as the dataset has) to 10,000,000"
    ),
    row("layers", absurd_sizes, {"depth": 10**7}).says(
        "InvalidDataError: 'w.npz' is of no model that can be built: model.depth is 10000000; allowed: 1 to "
        "1,000, or none"
    ),
    row(
        "parameters",
        absurd_sizes,
        {"width": 65_536, "num_heads": 4, "depth": 900},
    ).says(
        "'w.npz' is of 15553074924554 parameters, more than any model; allowed: 100000000000 (config.json and the "
        "shapes say ModelConfig(name='vit', image_size=224, num_classes=10, patch=16, depth=900, width=65536, "
        "mlp_width=768, num_heads…"
    ),
    *(
        row(f"no size, {value}", size_declared_as, value).says(
            "config.json beside 'w' says image_size …; allowed: a number of pixels of 1 or more, or two (height, width)"
        )
        for value in NO_SIZES
    ),
    # Readers
    *(
        row(f"a reader that raises {kind.__name__}", reader_that_raises, kind).says(
            "InvalidDataError: w cannot be read (broken); is it cut off? Fetch the file again"
        )
        for kind in FILE_ERRORS
        if kind not in {OSError, MemoryError}
    ),
    row("a reader that raises OSError", reader_that_raises, OSError).says(
        "w cannot be read (broken); give a file that this user may read"
    ),
    row("too little memory", too_little_memory).says(
        "w [3] of float32 cannot be read: there is not enough memory; take a larger machine"
    ),
    row("two models in one file", two_models).says(
        "'DIR/w.safetensors' holds several models, student., teacher.; save one of them alone"
    ),
    row("two tensors that would have one name", two_of_one_name).says(
        "model.a and net.a in 'DIR/w.safetensors' would both be a; save one of them alone"
    ),
    row("'b' 1", tensor_of_an_npz, "b", 1).says(
        "'DIR/w.npz' has no tensor b, which its model needs; it has 3: a/b, c, empty, ...; give the file of a "
        "ViT, a hybrid or a BiT ResNet"
    ),
    row("'empty' 2", tensor_of_an_npz, "empty", 2).says(
        "empty in 'DIR/w.npz' is [0, 3]; it must have 2 dimensions, each of 1 or more; give the file of a ViT, a "
        "hybrid or a BiT ResNet"
    ),
    row("'c' 2", tensor_of_an_npz, "c", 2).says(
        "c in 'DIR/w.npz' is [4]; it must have 2 dimensions, each of 1 or more; give the file of a ViT, a hybrid "
        "or a BiT ResNet"
    ),
    # timm's folders
    *(
        row(f"a crop that is no share, {share}", timm_crop, share).says(
            "'DIR/model.safetensors' says crop_pct …; allowed: 0.1 to 1, the share of the resized image that its "
            "centre is"
        )
        for share in (0.05, 1.5, "0.9", True, float("nan"))
    ),
    *(
        row(f"{key} of another type", timm_evaluation, {key: value}).says(
            f"config.json beside 'DIR/model.safetensors' says {key} {value!r}; allowed: {allowed}, or another name of "
            "timm's, for which images are resized without a crop; correct it"
        )
        for key, value, allowed in (
            ("interpolation", ["bicubic"], "bilinear, bicubic, box"),
            ("crop_mode", {"center": 1}, "center, squash"),
        )
    ),
    row("rotary positions", exported_to_timm, replace(ROTARY, gelu="tanh", pooling="attention", registers=2)).says(
        "model.position is 'rope2d', and timm's models with rotary positions cannot have the tanh GELU "
        "(model.gelu) or registers that attention pooling leaves out; give --format patchline"
    ),
    row(
        "a distillation token and registers",
        exported_to_timm,
        replace(DISTILLED, registers=2, position="rope2d", num_heads=3, gelu="exact"),
    ).says(
        "model.distillation_token is on, and timm's models with a distillation token cannot have registers or position "
        "'rope2d'; give --format patchline"
    ),
    row("hybrid", exported_to_timm, HYBRID).says(
        "timm has no model with a ResNet of (1, 2) units and factor 1; allowed: (3, 4, 9) and 1, (3, 4, 6, 3) and "
        "1, (2, 2, 2, 2) and 1, () and 1; or export as vision_transformer"
    ),
    row("BiT", exported_to_timm, BIT).says(
        "timm has no model with a ResNet of (1, 2) units and factor 1; allowed: (3, 4, 6, 3) and 1, (3, 4, 6, 3) "
        "and 3, (3, 4, 23, 3) and 1, (3, 4, 23, 3) and 3, (3, 8, 36, 3) and 2, (3, 8, 36, 3) and 4; or export as "
        "vision_transformer"
    ),
    row("pre_logits", timm_tensor_more, "pre_logits.fc.weight").says(
        "pre_logits.fc.weight [12] in 'DIR/model.safetensors' is a hidden layer before the head, which timm "
        "itself ignores; give the .npz file of these weights, whose hidden layer is kept"
    ),
    row("two last norms", timm_tensor_more, "fc_norm.bias").says(
        "the weights at 'DIR/model.safetensors' do not fit the model: …fc_norm.bias [12] is not in the model…"
    ),
    row("LayerScale of one block alone", timm_tensor_more, "blocks.1.ls1.gamma").says(
        "the weights at 'DIR/model.safetensors' do not fit the model: blocks.1.ls1.gamma [12] is not in the "
        "model. Give the file of another model, or leave out --num-heads 2"
    ),
    *(
        row(f"without {name}", timm_tensor_less, name).says(
            f"the weights at 'DIR/model.safetensors' do not fit the model: {name} […] is not there. Give the file of "
            "another model, or leave out --num-heads 2"
        )
        for name in (
            "blocks.1.attn.qkv.bias",
            "blocks.1.attn.proj.bias",
            "blocks.1.mlp.fc2.bias",
            "blocks.1.norm1.bias",
        )
    ),
    row("keys that heads of unknown width share", timm_keys_of_several_heads).says(
        "blocks.0.attn.k_proj.weight [6, 12] in 'DIR/model.safetensors' has other sizes than "
        "blocks.0.attn.q_proj.weight [12, 12]: several heads share their keys (grouped-query attention), and no q_norm "
        "says how wide a head is"
    ),
    row("a distillation token without a second head", timm_tensor_more, "dist_token").says(
        "FlagNeededError: pos_embed in 'DIR/model.safetensors' has 17 rows, config.json or --grid-side says a grid of "
        "4 x 4 and the class and the distillation token, 18 rows; give both files of one model, or write the image "
        "size of the tensors into config.json (--image-size then resamples them)"
    ),
    row("CLIP", timm_tensor_more, "norm_pre.weight").says(
        "the weights at 'DIR/model.safetensors' do not fit the model: …norm_pre.bias …is not there. Give the file "
        "of another model, or leave out --num-heads 2"
    ),
    row("positions of the pooling", timm_tensor_more, "attn_pool.pos_embed").says(
        "the weights at 'DIR/model.safetensors' do not fit the model: attn_pool.pos_embed [12] is not in the "
        "model. Give the file of another model, or leave out --num-heads 2"
    ),
    row("norms of one block alone", timm_tensor_more, "blocks.1.attn.q_norm.weight").says(
        "the weights at 'DIR/model.safetensors' do not fit the model: blocks.1.attn.q_norm.weight [12] is not in "
        "the model. Give the file of another model, or leave out --num-heads 2"
    ),
    row("unknown", timm_tensor_more, "blocks.0.attn.rel_pos").says(
        "the weights at 'DIR/model.safetensors' do not fit the model: blocks.0.attn.rel_pos [12] is not in the "
        "model. Give the file of another model, or leave out --num-heads 2"
    ),
    row("SiLU", timm_config, {"model_args": {"act_layer": "silu"}}).says(
        "act_layer in 'DIR/model.safetensors' is 'silu'; allowed: gelu, gelu_tanh, quick_gelu"
    ),
    row("another image size", timm_config, {"model_args": {"img_size": 32, "num_heads": 2}}).says(
        "FlagNeededError: pos_embed in 'DIR/model.safetensors' has 17 rows, config.json or --grid-side says a "
        "grid of 8 x 8 without the class token, 64 rows or a grid of 8 x 8 and the class token, 65 rows; give "
        "both files of one model, or write the image size of the tensors into config.json (--image-size then "
        "resamples them)"
    ),
    row("not square", timm_config, {"model_args": {"img_size": [8, 32]}}).says(
        "pos_embed in 'DIR/model.safetensors' has 17 rows, config.json says a grid of 2 x 8 patches (height, "
        "width); the models here take square images: give weights of those"
    ),
    row("input_size", timm_config, {"model_args": {}, "pretrained_cfg": {"input_size": [3, 8, 32]}}).says(
        "pos_embed in 'DIR/model.safetensors' has 17 rows, config.json says a grid of 2 x 8 patches (height, "
        "width); the models here take square images: give weights of those"
    ),
    row("no_embed_class", timm_config, {"model_args": {"no_embed_class": True, "img_size": 16}}).says(
        "FlagNeededError: pos_embed in 'DIR/model.safetensors' has 17 rows, config.json or --grid-side says a "
        "grid of 4 x 4 without the class token, 16 rows; give both files of one model, or write the image size of "
        "the tensors into config.json (--image-size then resamples them)"
    ),
    row("no_embed_class, no size", timm_config, {"model_args": {"no_embed_class": True}, "pretrained_cfg": {}}).says(
        "pos_embed in 'DIR/model.safetensors' has 17 rows, which is the grid of no square image; allowed: a square"
    ),
    row("attention pooling over registers", pooling_of_registers).says(
        "the pooling of 'DIR/model.safetensors' reads the class token or registers beside the patches "
        "(pool_include_prefix, or attention pooling of timm's eva.py); pooling here reads the patches alone"
    ),
    row(
        "{'architecture': 'vit_base_patch16_rope_mixed_224', 'model_args': {}}",
        rotary_config,
        {"architecture": "vit_base_patch16_rope_mixed_224", "model_args": {}},
    ).says(
        "'DIR/model.safetensors' is of a model of timm's eva.py, vit_base_patch16_rope_mixed_224, whose positions may "
        "be rotary: give the folder whose config.json names an architecture of timm's, or has use_rot_pos_emb and what "
        "else its code sets in its model_args"
    ),
    *(
        row(f"rotary positions with {change}", rotary_config, {"model_args": change}).says(
            f"config.json beside 'DIR/model.safetensors' says rotary positions with other {next(iter(change))}; "
            "allowed: fixed frequencies (rope_type cat or dinov3), a grid_offset of 0 or 1, a square ref_feat_shape, "
            "and use_abs_pos_emb as the tensors have it"
        )
        for change in ROTATIONS
    ),
    *(
        row(f"a temperature of {value}", rotary_config, {"model_args": {"rope_temperature": value}}).says(
            f"config.json beside 'DIR/model.safetensors' says rope_temperature {value!r}; allowed: a finite number "
            "above 1; correct it"
        )
        for value in ("hot", None, [100.0], True, float("nan"), float("inf"), 1)
    ),
    *(
        row(f"{model_type}: {key} {value}", tower_config, {"model_type": model_type, key: value}).says(
            f"config.json beside 'DIR/model.safetensors' says {key} {value!r}; allowed: {allowed}; correct it"
        )
        for model_type, key, value, allowed in (
            ("dinov3_vit", "rope_theta", "hot", "a finite number above 1"),
            ("dinov3_vit", "rope_theta", [100.0], "a finite number above 1"),
            ("siglip2_vision_model", "num_patches", -1, NUM_PATCHES),
            ("siglip2_vision_model", "num_patches", "256", NUM_PATCHES),
        )
    ),
    row("rotary positions without a config.json", rotary_without_a_config).says(
        "'DIR/model.safetensors' has no pos_embed, as models with rotary positions (rope), and no config.json "
        "says which: give the folder with both"
    ),
    row("periods that are not DINOv3's", other_periods).says(
        "rope_embed.periods in 'DIR/w.pth' is [1.0, 2.0, 3.0, 4.0] in a model that is 32 wide; allowed: powers of 100 "
        "from 1 up, one for each four channels of a head, as in DINOv3; give other weights"
    ),
    row("timm's own basic units", basic_units_of_timm).says(
        "'r18' has basic units (resnetv2_18, resnetv2_34), which timm trains with batch norm and plain "
        "convolutions; the ResNets here have neither: give the file of a BiT ResNet (resnetv2_..._bit)"
    ),
    row("a number of heads that no file says", heads_unknown).says(
        "FlagNeededError: 'DIR/model.safetensors' does not say how many heads its attention of width 12 has; give "
        "--num-heads"
    ),
    # Which model of timm it is
    *(
        row(f"MoCo v3's pixels, {size}", moco_v3, size).says(
            "FlagNeededError: 'DIR/w.pth.tar' is of the model 'vit_…', by its script's arguments, which usually takes "
            "pixels of mean 0.485 0.456 0.406 and deviation 0.229 0.224 0.225; give --pixels imagenet to fold them "
            "into the patch embedding, or --pixels paper for mean and deviation 0.5"
        )
        for size in ("small", "base")
    ),
    *(
        row(f"heads that disagree with the file's name, {name}", file_named, name).says(
            "--num-heads, 'DIR/vit_base_patch16_gap_224….safetensors' and --model say nothing, 16, 12 heads; leave "
            "out --num-heads and --model where the file says it"
        )
        for name in (f"{GAP}.safetensors", f"{GAP}.in1k_ep300.safetensors", f"{GAP}_mine.safetensors")
    ),
    row("a bare file beside its config.json", bare_file_beside_its_config).says(
        "FlagNeededError: config.json beside 'DIR/w/model.safetensors' says num_heads 16; give the folder, "
        "'DIR/w', or --num-heads 12 if it is of another model"
    ),
    row(
        "the name of a narrower model",
        named_but_wider,
    ).says(
        "FlagNeededError: 'DIR/w.pth' is called 'vit_small_patch16_224', which is 384 wide with 6 heads, and its "
        "tensors are 768 wide; give --num-heads"
    ),
    row("batch norm", other_architecture, "vit_base_resnet50d_224").says(
        "patch_embed.backbone.conv1.0.weight [32, 3, 3, 3] in 'w' belongs to convolutions with batch norm in front of "
        "the blocks; the ResNets in front of blocks here have group norm and standardised weights"
    ),
    row("folder", norms_behind, False).says(
        "'DIR/w.pth/model.safetensors' is of 'vit_base_patch16_rpn_224', which normalises what attention and MLP "
        "return; blocks here normalise what attention and MLP read"
    ),
    row("file", norms_behind, True).says(
        "'DIR/w.pth' is of 'vit_base_patch16_rpn_224', which normalises what attention and MLP return; blocks here "
        "normalise what attention and MLP read"
    ),
    row("32 x 128 px, a row for the class token", table_of_rows, 17).says(
        "FlagNeededError: pos_embed in 'w' has 17 rows, which would be a square image of 64 px, an unusual size; "
        "the rows can as well be of a rectangular grid (1 x 17, 1 x 16, 2 x 8), which the file does not say; if "
        "the image was square, give --grid-side 4"
    ),
    row("32 x 64 px, which without such a row would be 3 x 3", table_of_rows, 9).says(
        "FlagNeededError: pos_embed in 'w' has 9 rows, which would be a square image of 48 px, an unusual size; "
        "the rows can as well be of a rectangular grid (1 x 9, 1 x 8, 2 x 4), which the file does not say; if the "
        "image was square, give --grid-side 3"
    ),
    row("48 x 80 px", table_of_rows, 16).says(
        "FlagNeededError: pos_embed in 'w' has 16 rows, which would be a square image of 64 px, an unusual size; "
        "the rows can as well be of a rectangular grid (1 x 16, 2 x 8, 1 x 15, 3 x 5), which the file does not "
        "say; if the image was square, give --grid-side 4"
    ),
    row("64 x 96 px", table_of_rows, 25).says(
        "FlagNeededError: pos_embed in 'w' has 25 rows, which would be a square image of 80 px, an unusual size; "
        "the rows can as well be of a rectangular grid (1 x 24, 2 x 12, 3 x 8, 4 x 6), which the file does not "
        "say; if the image was square, give --grid-side 5"
    ),
    row("224 x 256 px", table_of_rows, 225).says(
        "FlagNeededError: pos_embed in 'w' has 225 rows, which would be a square image of 240 px, an unusual "
        "size; the rows can as well be of a rectangular grid (4 x 56, 7 x 32, 8 x 28, 14 x 16), which the file "
        "does not say; if the image was square, give --grid-side 15"
    ),
    row("64 x 144 px", table_of_rows, 37).says(
        "FlagNeededError: pos_embed in 'w' has 37 rows, which would be a square image of 96 px, an unusual size; "
        "the rows can as well be of a rectangular grid (1 x 36, 2 x 18, 3 x 12, 4 x 9), which the file does not "
        "say; if the image was square, give --grid-side 6"
    ),
    row("size", flat_config, {"input_size": [3, 8, 32]}).says(
        "pos_embed in 'DIR/model.safetensors' has 17 rows, config.json says a grid of 2 x 8 patches (height, "
        "width); the models here take square images: give weights of those"
    ),
    # Damaged and hostile zip files
    row("weights do not shrink a thousand times", lambda folder: open_npz_file(bomb(folder / "w.npz", 128 << 20))).says(
        "InvalidDataError: 'DIR/w.npz' declares 134,217,856 bytes of values, out of 585,911; weights do not "
        "shrink so far: the file is damaged, or made to do damage: fetch it again"
    ),
    row("a directory of a gigabyte", directory_of_a_gigabyte).says(
        "InvalidDataError: 'DIR/w.npz' cannot be read (it declares 1,073,741,824 bytes at once; allowed: "
        "16,777,216); is it cut off? Fetch the file again"
    ),
    row("more members than any model has tensors", members_without_end).says(
        "InvalidDataError: 'DIR/w.npz' has 100,001 members; allowed: 100,000; fetch it again"
    ),
    row("a compressed torch file", compressed_torch_file).says(
        "InvalidDataError: w/data.pkl in 'DIR/z.pth' is compressed in a way that PyTorch does not write; allowed: "
        "torch.save"
    ),
    row("a header of gigabytes", header_of_gigabytes).says(
        "InvalidDataError: a in 'DIR/w.npz' cannot be read (its header declares 2,147,483,648 bytes; allowed: "
        "16,384); is it cut off? Fetch the file again"
    ),
    row("a member stored twice", member_stored_twice).says(
        "InvalidDataError: 'DIR/w.npz' has two members of one name; fetch the file again"
    ),
    row("an array that changes after it was opened", array_that_changes).says(
        "InvalidDataError: a in 'DIR/w.npz' cannot be read (it is [9] of float32 now: the file has changed); is "
        "it cut off? Fetch the file again"
    ),
    *(
        row(f"a pipe, {name}", pipe_called, name).says(
            "InvalidDataError: DIR/w.… is not a regular file; give a file, not a pipe or a device"
        )
        for name in ("w.npz", "w.pth")
    ),
    row("terabytes", array_declared_as, (64, 10**12)).says(
        "InvalidDataError: c in 'DIR/w.npz' declares [64, 1000000000000], 256000000000000 bytes of float32, where "
        "there are 16; the file is damaged, or made to do damage: fetch it again"
    ),
    row("more than can be counted", array_declared_as, (10**19,)).says(
        "InvalidDataError: c in 'DIR/w.npz' declares [10000000000000000000], 40000000000000000000 bytes of "
        "float32, where there are 16; the file is damaged, or made to do damage: fetch it again"
    ),
    row("one value", array_declared_as, (5,)).says(
        "InvalidDataError: c in 'DIR/w.npz' declares [5], 20 bytes of float32, where there are 16; the file is "
        "damaged, or made to do damage: fetch it again"
    ),
    row("too few", array_declared_as, (3,)).says(
        "InvalidDataError: c in 'DIR/w.npz' declares [3], 12 bytes of float32, where there are 16; the file is "
        "damaged, or made to do damage: fetch it again"
    ),
    row("negative", array_declared_as, (-1,)).says(
        "InvalidDataError: c in 'DIR/w.npz' declares [-1], -4 bytes of float32, where there are 16; the file is "
        "damaged, or made to do damage: fetch it again"
    ),
    row("twice negative", array_declared_as, (-2, -2)).says(
        "InvalidDataError: c in 'DIR/w.npz' declares [-2, -2], 16 bytes of float32, where there are 16; the file "
        "is damaged, or made to do damage: fetch it again"
    ),
    row("nothing, declared large", array_declared_as, (0, 10**12)).says(
        "InvalidDataError: c in 'DIR/w.npz' declares [0, 1000000000000], 0 bytes of float32, where there are 16; "
        "the file is damaged, or made to do damage: fetch it again"
    ),
    row("a directory that promises more than the file holds", directory_that_lies).says(
        "InvalidDataError: c.npy in 'DIR/w.npz' declares 4000000000 bytes out of 76, the whole file has 350; "
        "fetch it again"
    ),
    row("a text", archive_with, "README.txt", b"hello").says(
        "InvalidDataError: README.txt in 'DIR/w.npz' is no array (its name ends in no .npy); take it out of the file"
    ),
    row("the name of a tensor, without .npy", archive_with, "c", b"abc").says(
        "InvalidDataError: c in 'DIR/w.npz' is no array (its name ends in no .npy); take it out of the file"
    ),
    row("header", archive_with, "junk.npy", b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535).says(
        "InvalidDataError: junk in 'DIR/w.npz' cannot be read (its header declares 65,535 bytes; allowed: "
        "16,384); is it cut off? Fetch the file again"
    ),
    row("quote", archive_with, "junk.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': '''\n  ").says(
        "InvalidDataError: junk in 'DIR/w.npz' cannot be read (('EOF in multi-line string', (1, 10))); is it cut "
        "off? Fetch the file again"
    ),
    row("cut off", archive_with, "junk.npy", b"\x93NUM").says(
        "InvalidDataError: junk in 'DIR/w.npz' cannot be read (EOF: reading magic string, expected 8 bytes got "
        "4); is it cut off? Fetch the file again"
    ),
    row("another compression", other_compression).says(
        "InvalidDataError: a/b.npy in 'DIR/w.npz' is compressed in a way that NumPy does not write; allowed: "
        "np.savez and np.savez_compressed"
    ),
    row("an encrypted member", encrypted_member).says(
        "InvalidDataError: c in 'DIR/w.npz' cannot be read (File <ZipInfo filename='c.npy' filemode='?rw-------' "
        "file_size=144> is encrypted, password required for extraction); is it cut off? Fetch the file again"
    ),
    row("a folder called so", folder_called_npz).says(
        "'DIR/w.npz' cannot be read (Is a directory); give a file that this user may read"
    ),
    row("a file that is gone", file_gone_after_it_was_opened).says(
        "c in 'DIR/v.npz' cannot be read (No such file or directory); give a file that this user may read"
    ),
    row(
        "a pipe in the place of an opened archive",
        pipe_in_the_place_of_an_opened_archive,
    ).says("InvalidDataError: DIR/a.npz is not a regular file; give a file, not a pipe or a device"),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)

"""The shapes in a file: missing tensors and errors of the readers give one message."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.models.conversion.open_file import open_tensor_file
from pipeline.models.conversion.tensor_file import FILE_ERRORS, readable
from pipeline.models.conversion.zip_file import write_npz
from shards.errors import UserError

VALUES = {"a/b": torch.randn(2, 3), "c": torch.randn(4), "empty": torch.zeros(0, 3)}


@pytest.mark.parametrize("kind", FILE_ERRORS)
def test_every_error_of_a_reader_becomes_a_message(kind: type[Exception]) -> None:
    with pytest.raises(UserError, match=r"^w .*cannot be read"), readable("w"):
        raise kind("broken")


def test_a_lack_of_memory_is_said_with_the_size() -> None:
    message = r"w \[3\] of float32 cannot be read: there is not enough memory"
    with pytest.raises(UserError, match=message), readable("w", size="[3] of float32"):
        raise MemoryError


def test_renamed_keeps_what_is_named(tmp_path: Path) -> None:
    write_npz(tmp_path / "w.npz", VALUES.items())
    file = open_tensor_file(tmp_path / "w.npz").renamed({"new": "c"})
    assert dict(file.shapes) == {"new": (4,)}
    assert torch.equal(file.read("new"), VALUES["c"])


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("module.norm.weight", "module.head.bias"), id="DataParallel"),
        pytest.param(("_orig_mod.norm.weight", "_orig_mod.head.bias"), id="torch.compile"),
        pytest.param(("model.norm.weight", "model.head.bias"), id="Lightning"),
        pytest.param(("module._orig_mod.norm.weight", "module._orig_mod.head.bias"), id="both"),
        pytest.param(("backbone.norm.weight", "head.bias"), id="a head outside"),
        pytest.param(("net.backbone.norm.weight", "net.head.bias"), id="inside another"),
        pytest.param(("norm.weight", "head.bias"), id="none"),
    ],
)
def test_prefixes_of_training_scripts_are_left_out(names: tuple[str, ...], suffix: str, tmp_path: Path) -> None:
    values = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    path = tmp_path / f"w{suffix}"
    torch.save(values, path) if suffix == ".pth" else save_file(values, path)
    file = open_tensor_file(path)
    assert dict(file.shapes) == {"norm.weight": (2,), "head.bias": (2,)}
    assert [float(file.read(name)[0]) for name in ("norm.weight", "head.bias")] == [0.0, 1.0]


@pytest.mark.parametrize("prefix", ["vit.", "model.encoder.", "visual.trunk.", "_forward_module.student."])
def test_any_name_of_a_script_for_its_model_is_left_out(prefix: str, tmp_path: Path) -> None:
    names = (f"{prefix}patch_embed.proj.weight", f"{prefix}norm.weight", "head.bias")
    save_file({name: torch.full((1,), float(number)) for number, name in enumerate(names)}, tmp_path / "w.safetensors")
    file = open_tensor_file(tmp_path / "w.safetensors")
    bare = ("patch_embed.proj.weight", "norm.weight", "head.bias")
    assert [float(file.read(name)) for name in bare] == [0.0, 1.0, 2.0]


def test_two_models_in_one_file_are_refused(tmp_path: Path) -> None:
    names = ("student.patch_embed.proj.weight", "teacher.patch_embed.proj.weight")
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"holds several models, student\., teacher\.; save one of them alone"):
        open_tensor_file(tmp_path / "w.safetensors")


@pytest.mark.parametrize("name", ["last.ckpt", "model_best.pth.tar"])
def test_suffixes_of_training_scripts(name: str, tmp_path: Path) -> None:
    torch.save({"state_dict": {"model.a": torch.ones(1)}}, tmp_path / name)
    assert dict(open_tensor_file(tmp_path / name).shapes) == {"a": (1,)}


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    save_file({"model.a": torch.zeros(1), "net.a": torch.ones(1)}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"model\.a and net\.a in .* would both be a; save one of them alone"):
        open_tensor_file(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("name", "num_dims", "message"),
    [
        ("b", 1, "has no tensor b, which its model needs; it has 3: a/b, c"),
        ("empty", 2, r"empty in .* is \[0, 3\]; it must have 2 dimensions, each of 1 or more"),
        ("c", 2, r"c in .* is \[4\]; it must have 2"),
    ],
)
def test_a_tensor_that_must_be_there(tmp_path: Path, name: str, num_dims: int, message: str) -> None:
    write_npz(tmp_path / "w.npz", VALUES.items())
    with pytest.raises(UserError, match=message):
        open_tensor_file(tmp_path / "w.npz").shape(name, num_dims)

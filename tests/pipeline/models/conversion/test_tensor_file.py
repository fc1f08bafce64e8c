"""The shapes in a file: missing tensors and errors of the readers give one message."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.models.conversion.open_file import open_tensor_file
from pipeline.models.conversion.zip_file import write_npz

VALUES = {"a/b": torch.randn(2, 3), "c": torch.randn(4), "empty": torch.zeros(0, 3)}


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


@pytest.mark.parametrize("name", ["last.ckpt", "model_best.pth.tar"])
def test_suffixes_of_training_scripts(name: str, tmp_path: Path) -> None:
    torch.save({"state_dict": {"model.a": torch.ones(1)}}, tmp_path / name)
    assert dict(open_tensor_file(tmp_path / name).shapes) == {"a": (1,)}

"""Files of every format hold the same tensors; only dense tensors are read, and other content is refused."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path, PosixPath
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.open_any import open_any
from pipeline.models.conversion.open_file import open_sharded, open_tensor_file, open_torch_file
from pipeline.models.conversion.zip_file import write_npz
from pipeline.models.weights.folder import filled_model
from shards.errors import InvalidDataError, UserError
from tests.pipeline.models.parity import difference, random_images

VALUES = {"a/b": torch.randn(2, 3), "c": torch.randn(4)}
TORCH_VALUES = {"a": torch.randn(2, 3), "b": torch.randn(4)}
OTHERS = {"a": torch.randn(5)}


def write_numpys(path: Path) -> None:
    arrays: dict[str, Any] = {name: value.numpy() for name, value in VALUES.items()}
    np.savez(path, **arrays)


def write_wrapped(path: Path) -> None:
    torch.save({"state_dict": VALUES, "step": 3}, path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        pytest.param("w.npz", lambda path: write_npz(path, VALUES.items()), id="npz"),
        pytest.param("n.npz", write_numpys, id="numpy's"),
        pytest.param("w.safetensors", lambda path: save_file(VALUES, path), id="safetensors"),
        pytest.param("w.pth", write_wrapped, id="torch, in a dict"),
        pytest.param("w.bin", lambda path: torch.save(VALUES, path), id="torch"),
    ],
)
def test_shapes_and_values(tmp_path: Path, name: str, write: Callable[[Path], object]) -> None:
    write(tmp_path / name)
    file = open_tensor_file(tmp_path / name)
    assert dict(file.shapes) == {"a/b": (2, 3), "c": (4,)}
    for key, value in VALUES.items():
        assert torch.equal(file.read(key), value)


def test_all_values_come_as_float32(tmp_path: Path) -> None:
    save_file(
        {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2, dtype=torch.float64)}, tmp_path / "w.safetensors"
    )
    file = open_tensor_file(tmp_path / "w.safetensors")
    assert {file.read(name).dtype for name in "ab"} == {torch.float32}


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        write_npz(tmp_path / name, VALUES.items())
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    def broken() -> object:
        yield "a", torch.ones(3)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write_npz(tmp_path / "w.npz", broken())  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_values_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError):
        write_npz(tmp_path / "w.npz", [("a", torch.ones(3)), ("b", torch.tensor([1.0, float("nan")]))])
    assert not list(tmp_path.iterdir())


class Trap:
    """An object that shows whether it was unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (Path.touch, (str(Path("trapped")),))


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_the_prefix_of_parallel_training_is_taken_off(tmp_path: Path, suffix: str) -> None:
    values = {f"module.{name}": value for name, value in VALUES.items()}
    path = tmp_path / f"w.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(values, path)
    file = open_tensor_file(path)
    assert dict(file.shapes) == {"a/b": (2, 3), "c": (4,)}
    assert torch.equal(file.read("c"), VALUES["c"])


def sharded(folder: Path, where: Mapping[str, object] | None = None) -> Path:
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / "one.safetensors")
    save_file({"c": torch.ones(4)}, folder / "two.safetensors")
    named = where or {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    return folder / "model.safetensors.index.json"


def test_the_pieces_are_one_file(tmp_path: Path) -> None:
    file = open_sharded(sharded(tmp_path))
    assert dict(file.shapes) == {"a": (2,), "b": (3,), "c": (4,)}
    assert torch.equal(file.read("c"), torch.ones(4))


def test_what_transformers_saves_in_pieces_comes_in(transformers: ModuleType, tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20, image_size=16, patch_size=4
    )
    other = transformers.ViTForImageClassification(config).eval()
    torch.nn.init.normal_(other.classifier.weight)
    other.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = filled_model(open_any(str(tmp_path), Hints()))
    assert difference(ours, lambda x: other(x).logits, random_images(16, 16)) < 2e-5


def test_a_scripts_arguments_beside_the_tensors_are_left_out(tmp_path: Path) -> None:
    """As in the files of timm, DeiT and MAE."""
    arguments = argparse.Namespace(lr=1.0, output=PosixPath("out"), opt_betas=None)
    for wrapper in ("model", "state_dict"):
        torch.save({wrapper: TORCH_VALUES, "args": arguments, "arch": "vit", "epoch": 3}, tmp_path / "w.pth")
        assert dict(open_torch_file(tmp_path / "w.pth").shapes) == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize("raw", ["state_dict", "model", "student"])
@pytest.mark.parametrize("average", ["state_dict_ema", "model_ema", "teacher"])
def test_raw_or_averaged_weights_are_the_users_choice(raw: str, average: str, tmp_path: Path) -> None:
    torch.save({raw: TORCH_VALUES, average: OTHERS, "epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(UserError):
        open_torch_file(tmp_path / "w.pth")
    assert dict(open_torch_file(tmp_path / "w.pth", take="raw").shapes) == {"a": (2, 3), "b": (4,)}
    assert dict(open_torch_file(tmp_path / "w.pth", take="averaged").shapes) == {"a": (5,)}


@pytest.mark.parametrize(
    "averaged",
    [
        pytest.param({"ema_model": OTHERS}, id="ema_model"),
        pytest.param({"model_ema_state_dict": OTHERS}, id="model_ema_state_dict"),
        pytest.param({"ema_state": OTHERS}, id="ema_state"),
        pytest.param({"swa_state_dict": OTHERS}, id="swa_state_dict"),
        pytest.param({"averaged_model": OTHERS}, id="averaged_model"),
        pytest.param({"ema_network": OTHERS}, id="ema_network"),
        pytest.param({"model_ema": {"decay": 0.9, "module": OTHERS}}, id="a decay beside it"),
        pytest.param({"ema": {"module.a": torch.zeros(5)}}, id="a prefix"),
    ],
)
def test_averaged_weights_are_seen_whatever_they_are_called(averaged: dict[str, Any], tmp_path: Path) -> None:
    optimizer = {"optimizer": {"state": {"a": torch.zeros(7)}}}
    torch.save({"model": TORCH_VALUES, **averaged, **optimizer}, tmp_path / "w.pth")
    with pytest.raises(UserError):
        open_torch_file(tmp_path / "w.pth")
    assert dict(open_torch_file(tmp_path / "w.pth", take="raw").shapes) == {"a": (2, 3), "b": (4,)}
    assert list(open_torch_file(tmp_path / "w.pth", take="averaged").shapes.values()) == [(5,)]


def test_weights_that_lie_side_by_side_are_found_too(tmp_path: Path) -> None:
    torch.save({"model": {"state_dict": TORCH_VALUES, "ema": OTHERS}}, tmp_path / "w.pth")
    with pytest.raises(UserError):
        open_torch_file(tmp_path / "w.pth")
    assert dict(open_torch_file(tmp_path / "w.pth", take="averaged").shapes) == {"a": (5,)}


def test_of_two_weights_of_one_model_none_is_guessed(tmp_path: Path) -> None:
    torch.save({"state_dict": TORCH_VALUES, "model": TORCH_VALUES}, tmp_path / "w.pth")
    with pytest.raises(UserError):
        open_torch_file(tmp_path / "w.pth")
    torch.save({"state_dict": TORCH_VALUES, "discriminator": {"c": torch.zeros(2)}}, tmp_path / "w.pth")
    assert dict(open_torch_file(tmp_path / "w.pth").shapes) == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize("name", ["args", "hyper_parameters", "config"])
@pytest.mark.parametrize("kind", [dict, argparse.Namespace])
def test_arguments_of_the_training_script_are_kept(tmp_path: Path, name: str, kind: Any) -> None:
    torch.save({"state_dict": TORCH_VALUES, name: kind(mean=[0.5, 0.4, 0.3], arch="vit")}, tmp_path / "w.pth")
    found = open_tensor_file(tmp_path / "w.pth")
    assert dict(found.shapes) == {"a": (2, 3), "b": (4,)}
    assert dict(found.arguments) == {"mean": [0.5, 0.4, 0.3], "arch": "vit"}


@pytest.mark.parametrize("suffix", ["pth", "safetensors", "npz"])
@pytest.mark.parametrize("kind", [torch.int8, torch.int64])
def test_whole_numbers_are_quantised_weights_without_their_scale(
    tmp_path: Path, suffix: str, kind: torch.dtype
) -> None:
    """They were imported as if 127 were a weight."""
    path, tensors = tmp_path / f"w.{suffix}", {"a": torch.ones(3, dtype=kind), "b": torch.ones(4)}
    if suffix == "npz":
        np.savez(path, a=tensors["a"].numpy(), b=tensors["b"].numpy())
    else:
        torch.save(tensors, path) if suffix == "pth" else save_file(tensors, path)
    file = open_tensor_file(path)
    assert torch.equal(file.read("b"), torch.ones(4))


def test_the_counter_of_averaged_models_is_no_weight(tmp_path: Path) -> None:
    averaged = {f"module.{name}": value for name, value in TORCH_VALUES.items()} | {"n_averaged": torch.tensor(3)}
    torch.save({"model": TORCH_VALUES, "swa_state_dict": averaged}, tmp_path / "w.pth")
    assert dict(open_tensor_file(tmp_path / "w.pth", take="averaged").shapes) == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "none"])
def test_tensors_are_found_in_what_training_scripts_write(tmp_path: Path, wrapper: str) -> None:
    content: dict[str, Any] = {wrapper: TORCH_VALUES, "epoch": 3} if wrapper != "none" else TORCH_VALUES
    torch.save(content, tmp_path / "w.pth")
    assert dict(open_torch_file(tmp_path / "w.pth").shapes) == {"a": (2, 3), "b": (4,)}

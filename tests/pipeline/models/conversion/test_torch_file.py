"""PyTorch's files: only dense tensors with all of their values are read; other content is reported."""

import argparse
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipeline.models.conversion.open_file import open_tensor_file
from pipeline.models.conversion.torch_file import open_torch_file
from shards.errors import UserError

VALUES = {"a": torch.randn(2, 3), "b": torch.randn(4)}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "the format before 1.6"])
def test_a_file_that_is_cut_off_says_so(tmp_path: Path, legacy: bool) -> None:
    torch.save(VALUES, tmp_path / "w.pth", _use_new_zipfile_serialization=not legacy)
    data = (tmp_path / "w.pth").read_bytes()
    for length in (0, 10, len(data) // 2, len(data) - 30):
        (tmp_path / "w.pth").write_bytes(data[:length])
        with pytest.raises(UserError, match=r"w\.pth' is cut off, or no file of PyTorch's"):
            open_torch_file(tmp_path / "w.pth")


def test_a_scripts_arguments_beside_the_tensors_are_left_out(tmp_path: Path) -> None:
    """As in the files of timm, DeiT and MAE."""
    arguments = argparse.Namespace(lr=1.0, output=PosixPath("out"), opt_betas=None)
    for wrapper in ("model", "state_dict"):
        torch.save({wrapper: VALUES, "args": arguments, "arch": "vit", "epoch": 3}, tmp_path / "w.pth")
        assert dict(open_torch_file(tmp_path / "w.pth").shapes) == {"a": (2, 3), "b": (4,)}


class Other:
    """An object of no known type."""


def test_other_objects_are_refused(tmp_path: Path) -> None:
    torch.save({"model": VALUES, "args": Other()}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"it also holds a [\w.]+\.Other\); reading more would run code from the file"):
        open_torch_file(tmp_path / "w.pth")


OTHERS = {"a": torch.randn(5)}


@pytest.mark.parametrize("raw", ["state_dict", "model", "student"])
@pytest.mark.parametrize("average", ["state_dict_ema", "model_ema", "teacher"])
def test_raw_or_averaged_weights_are_the_users_choice(raw: str, average: str, tmp_path: Path) -> None:
    torch.save({raw: VALUES, average: OTHERS, "epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=rf"raw weights \({raw}\) and their average .*\({average}\); give --take raw"):
        open_torch_file(tmp_path / "w.pth")
    assert dict(open_torch_file(tmp_path / "w.pth", take="raw").shapes) == {"a": (2, 3), "b": (4,)}
    assert dict(open_torch_file(tmp_path / "w.pth", take="averaged").shapes) == {"a": (5,)}
    torch.save({raw: VALUES, average: {}}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"holds no averaged weights; it has .*; leave out --take"):
        open_torch_file(tmp_path / "w.pth", take="averaged")


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
    torch.save({"model": VALUES, **averaged, **optimizer}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"raw weights \(model\) and their average .*; give --take raw or --take av"):
        open_torch_file(tmp_path / "w.pth")
    assert dict(open_torch_file(tmp_path / "w.pth", take="raw").shapes) == {"a": (2, 3), "b": (4,)}
    assert list(open_torch_file(tmp_path / "w.pth", take="averaged").shapes.values()) == [(5,)]


def test_weights_that_lie_side_by_side_are_found_too(tmp_path: Path) -> None:
    torch.save({"model": {"state_dict": VALUES, "ema": OTHERS}}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"raw weights \(model.state_dict\) and their average .*\(model.ema\)"):
        open_torch_file(tmp_path / "w.pth")
    assert dict(open_torch_file(tmp_path / "w.pth", take="averaged").shapes) == {"a": (5,)}


def test_of_two_weights_of_one_model_none_is_guessed(tmp_path: Path) -> None:
    torch.save({"state_dict": VALUES, "model": VALUES}, tmp_path / "w.pth")
    several = r"several weights of one model, state_dict and model, .* save one of them alone"
    with pytest.raises(UserError, match=several):
        open_torch_file(tmp_path / "w.pth")
    torch.save({"state_dict": VALUES, "discriminator": {"c": torch.zeros(2)}}, tmp_path / "w.pth")
    assert dict(open_torch_file(tmp_path / "w.pth").shapes) == {"a": (2, 3), "b": (4,)}


def test_a_choice_where_there_is_none_is_refused(tmp_path: Path) -> None:
    torch.save(VALUES, tmp_path / "w.pth")
    with pytest.raises(UserError, match="holds one set of weights and does not say which; leave out --take"):
        open_torch_file(tmp_path / "w.pth", take="averaged")
    save_file(VALUES, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="holds one set of weights and does not say which; leave out --take"):
        open_tensor_file(tmp_path / "w.safetensors", take="raw")


@pytest.mark.parametrize("name", ["args", "hyper_parameters", "config"])
@pytest.mark.parametrize("kind", [dict, argparse.Namespace])
def test_arguments_of_the_training_script_are_kept(tmp_path: Path, name: str, kind: Any) -> None:
    torch.save({"state_dict": VALUES, name: kind(mean=[0.5, 0.4, 0.3], arch="vit")}, tmp_path / "w.pth")
    found = open_tensor_file(tmp_path / "w.pth")
    assert dict(found.shapes) == {"a": (2, 3), "b": (4,)}
    assert dict(found.arguments) == {"mean": [0.5, 0.4, 0.3], "arch": "vit"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param(torch.eye(3).to_sparse(), r"a \[3, 3\] in .* is sparse", id="sparse"),
        pytest.param(torch.empty(3, device="meta"), r"a \[3\] in .* has no values", id="meta"),
        pytest.param(
            torch.zeros(1).expand(10**12), r"a \[1000000000000\] in .* 4000000000000 bytes .* 4 are", id="one"
        ),
        pytest.param(torch.zeros(3, dtype=torch.complex64), r"a \[3\] in .* is of type torch.complex64", id="complex"),
    ],
)
def test_tensors_that_are_not_dense_numbers_are_refused(tmp_path: Path, value: torch.Tensor, message: str) -> None:
    torch.save({"a": value}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=message):
        open_torch_file(tmp_path / "w.pth")


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
    with pytest.raises(UserError, match=r"a .*in .* is of type .*int\d+; allowed: floating-point numbers"):
        file.read("a")


def test_the_counter_of_averaged_models_is_no_weight(tmp_path: Path) -> None:
    averaged = {f"module.{name}": value for name, value in VALUES.items()} | {"n_averaged": torch.tensor(3)}
    torch.save({"model": VALUES, "swa_state_dict": averaged}, tmp_path / "w.pth")
    assert dict(open_tensor_file(tmp_path / "w.pth", take="averaged").shapes) == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "none"])
def test_tensors_are_found_in_what_training_scripts_write(tmp_path: Path, wrapper: str) -> None:
    content: dict[str, Any] = {wrapper: VALUES, "epoch": 3} if wrapper != "none" else VALUES
    torch.save(content, tmp_path / "w.pth")
    assert dict(open_torch_file(tmp_path / "w.pth").shapes) == {"a": (2, 3), "b": (4,)}

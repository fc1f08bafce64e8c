"""PyTorch's files: only dense tensors with all of their values are read; other content is reported."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_other_objects_beside_the_tensors_show_the_conversion(tmp_path: Path) -> None:
    """Like the files of DeiT and MAE, which also hold the training script's arguments."""
    torch.save({"model": VALUES, "args": argparse.Namespace(lr=1)}, tmp_path / "w.pth")
    with pytest.raises(
        UserError, match=r"also holds an? argparse\.Namespace.*runs no code.*weights_only=True"
    ) as caught:
        open_torch_file(tmp_path / "w.pth")
    command = str(caught.value).split("python -c ")[1].strip('"')
    subprocess.run([sys.executable, "-c", command], check=True)
    assert dict(open_torch_file(tmp_path / "w.tensors.pth").shapes) == {"a": (2, 3), "b": (4,)}


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


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "none"])
def test_tensors_are_found_in_what_training_scripts_write(tmp_path: Path, wrapper: str) -> None:
    content: dict[str, Any] = {wrapper: VALUES, "epoch": 3} if wrapper != "none" else VALUES
    torch.save(content, tmp_path / "w.pth")
    assert dict(open_torch_file(tmp_path / "w.pth").shapes) == {"a": (2, 3), "b": (4,)}

"""Hostile and damaged .npz files: what they declare is compared with what they contain before anything is read."""

import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.models.conversion.open_file import open_torch_file
from pipeline.models.conversion.zip_file import open_npz_file, write_npz
from shards.errors import UserError

VALUES: dict[str, Any] = {"a/b": np.ones((2, 3), np.float32), "c": np.ones(4, np.float32)}


def test_small_models_of_zeros_may_shrink(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "w.npz", a=np.zeros(1 << 20, np.float32))
    assert open_npz_file(tmp_path / "w.npz").shapes == {"a": (1 << 20,)}


def test_small_torch_files_of_zeros_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "w.pth")
    assert open_torch_file(tmp_path / "w.pth").shapes == {"a": (1 << 20,)}


def test_columns_first_is_read_as_rows_first(tmp_path: Path) -> None:
    value = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    np.savez(tmp_path / "w.npz", a=value)
    assert torch.equal(open_npz_file(tmp_path / "w.npz").read("a"), torch.arange(6.0).reshape(2, 3))


def member(value: Any, shape: tuple[int, ...] | None = None) -> bytes:
    """An array in .npy format; `shape` replaces the shape in its header."""
    buffer = io.BytesIO()
    if shape is None:
        np.lib.format.write_array(buffer, value)
    else:
        np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": shape})
        buffer.write(value.tobytes())
    return buffer.getvalue()


def archive(path: Path, members: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def plain() -> dict[str, bytes]:
    return {f"{name}.npy": member(value) for name, value in VALUES.items()}


@pytest.mark.parametrize("compress", [False, True])
def test_any_broken_byte_is_a_message(tmp_path: Path, compress: bool) -> None:
    """Damage at every byte of a small file, in structure and values, gives a UserError or the same values."""
    path = tmp_path / "w.npz"
    (np.savez_compressed if compress else np.savez)(path, **VALUES)
    whole, spoiled = path.read_bytes(), tmp_path / "s.npz"
    num_refused = 0
    for at in range(0, len(whole), 3):
        for bit in (1, 64):
            spoiled.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            try:
                file = open_npz_file(spoiled)
                for name in file.shapes:
                    file.read(name)
            except UserError:
                num_refused += 1
    assert num_refused > 20


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = archive(tmp_path / "w.npz", plain())
    path.chmod(0)
    with pytest.raises(UserError, match=r"cannot be read .Permission denied"):
        open_npz_file(path)


def test_types_that_are_numbers_are_read(tmp_path: Path) -> None:
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16).view(torch.int16).numpy().view("V2")
    np.savez(tmp_path / "w.npz", half=half, big=np.array([1.0, 2.0], ">f4"), none=np.zeros((2, 0)), one=np.array(3))
    file = open_npz_file(tmp_path / "w.npz")
    assert torch.equal(file.read("half"), torch.tensor([1.5, -2.0]))
    assert torch.equal(file.read("big"), torch.tensor([1.0, 2.0]))
    assert (file.shapes["none"], file.shapes["one"]) == ((2, 0), ())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_npz(tmp_path / "w.npz", [("x", torch.randn(3, 2))])
    assert dict(open_npz_file(tmp_path / "w.npz").shapes) == {"x": (3, 2)}

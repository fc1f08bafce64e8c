"""Zip archives that declare more than a file of weights can hold."""

import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.models.conversion.npz_file import open_npz_file
from pipeline.models.conversion.torch_file import open_torch_file
from pipeline.models.conversion.zip_file import open_zip
from shards.errors import InvalidDataError, UserError


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


def test_weights_do_not_shrink_a_thousand_times(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match=r"declares 134,217,856 bytes of values, out of .* made to do damage"):
        open_npz_file(bomb(tmp_path / "w.npz", 128 << 20))


def test_small_models_of_zeros_may_shrink(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "w.npz", a=np.zeros(1 << 20, np.float32))
    assert open_npz_file(tmp_path / "w.npz").shapes == {"a": (1 << 20,)}


def test_a_directory_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    """The end of the archive declares the size of the directory; a sparse file has as many bytes."""
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 1 << 30, 0, 0)
    path = tmp_path / "w.npz"
    with path.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 30)
        file.write(end)
    with pytest.raises(UserError, match=r"declares 1,073,741,824 bytes at once; allowed: 16,777,216"):
        open_zip(path)


def test_more_members_than_any_model_has_tensors(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        for number in range(100_001):
            archive.writestr(zipfile.ZipInfo(str(number)), b"")
    with pytest.raises(InvalidDataError, match=r"has 100,001 members; allowed: 100,000"):
        open_zip(tmp_path / "w.npz")


def test_members_of_torch_are_stored_not_compressed(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "w.pth")
    with zipfile.ZipFile(tmp_path / "w.pth") as stored, zipfile.ZipFile(tmp_path / "z.pth", "w") as again:
        for entry in stored.infolist():
            again.writestr(entry.filename, stored.read(entry), zipfile.ZIP_DEFLATED)
    assert open_torch_file(tmp_path / "w.pth").shapes == {"a": (1 << 20,)}
    with pytest.raises(InvalidDataError, match=r"is compressed in a way that PyTorch does not write; .* torch.save"):
        open_torch_file(tmp_path / "z.pth")


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    """Version 2 of an array's header has a length of four bytes, and zeros shrink."""
    with zipfile.ZipFile(tmp_path / "w.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 31) + bytes(60 << 20))
    with pytest.raises(InvalidDataError, match=r"a in .* header declares 2,147,483,648 bytes; allowed: 16,384"):
        open_npz_file(tmp_path / "w.npz")


def test_a_member_stored_twice(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("a.npy", b"")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("a.npy", b"")
    with pytest.raises(InvalidDataError, match="two members of one name"):
        open_zip(tmp_path / "w.npz")


def test_an_array_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", a=np.ones(4, np.float32))
    file = open_npz_file(tmp_path / "w.npz")
    np.savez(tmp_path / "w.npz", a=np.ones(9, np.float32))
    with pytest.raises(InvalidDataError, match=r"a in .* \(it is \[9\] of float32 now: the file has changed"):
        file.read("a")


def test_columns_first_is_read_as_rows_first(tmp_path: Path) -> None:
    value = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    np.savez(tmp_path / "w.npz", a=value)
    assert torch.equal(open_npz_file(tmp_path / "w.npz").read("a"), torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("name", ["w.npz", "w.pth"])
def test_a_pipe_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InvalidDataError, match="not a regular file"):
        (open_npz_file if name == "w.npz" else open_torch_file)(tmp_path / name)

"""Hostile and damaged .npz files: what they declare is compared with what they contain before anything is read."""

import io
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.models.conversion.open_file import open_torch_file
from pipeline.models.conversion.zip_file import open_npz_file, open_zip, write_npz
from shards.errors import InvalidDataError, UserError

VALUES: dict[str, Any] = {"a/b": np.ones((2, 3), np.float32), "c": np.ones(4, np.float32)}


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


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        pytest.param((64, 10**12), r"\[64, 1000000000000\], 256000000000000 bytes", id="terabytes"),
        pytest.param((10**19,), r"\[10000000000000000000\]", id="more than can be counted"),
        pytest.param((5,), r"\[5\], 20 bytes .* there are 16", id="one value"),
        pytest.param((3,), r"\[3\], 12 bytes .* there are 16", id="too few"),
        pytest.param((-1,), r"\[-1\]", id="negative"),
        pytest.param((-2, -2), r"\[-2, -2\]", id="twice negative"),
        pytest.param((0, 10**12), r"\[0, 1000000000000\], 0 bytes", id="nothing, declared large"),
    ],
)
def test_a_size_that_is_not_there_is_named(tmp_path: Path, shape: tuple[int, ...], said: str) -> None:
    path = archive(tmp_path / "w.npz", plain() | {"c.npy": member(VALUES["c"], shape)})
    with pytest.raises(UserError, match=rf"c in .* {said}"):
        open_npz_file(path)


def test_a_directory_that_promises_more_than_the_file_can_hold(tmp_path: Path) -> None:
    """The sizes in the zip's directory are claims, too."""
    path = archive(tmp_path / "w.npz", plain() | {"c.npy": member(VALUES["c"], (10**11,))})
    data = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        was = file.getinfo("c.npy").file_size
    directory = data.rindex(b"c.npy") - 46
    claimed = (4 * 10**9).to_bytes(4, "little")
    assert data[directory + 24 : directory + 28] == was.to_bytes(4, "little")
    path.write_bytes(data[: directory + 24] + claimed + data[directory + 28 :])
    with pytest.raises(UserError, match=r"c\.npy in .* 4000000000 bytes out of"):
        open_npz_file(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("README.txt", b"hello", r"README\.txt in .* is no array", id="a text"),
        pytest.param("c", b"abc", "c in .* is no array", id="the name of a tensor, without .npy"),
        pytest.param("junk.npy", b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535, "junk in .* cannot be read", id="header"),
        pytest.param(
            "junk.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': '''\n  ", "junk in .* cannot be read", id="quote"
        ),
        pytest.param("junk.npy", b"\x93NUM", "junk in .* cannot be read", id="cut off"),
    ],
)
def test_members_that_are_no_arrays_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = archive(tmp_path / "w.npz", plain() | {name: content})
    with pytest.raises(UserError, match=message):
        open_npz_file(path)


def test_other_compressions_are_refused(tmp_path: Path) -> None:
    """NumPy writes stored and deflated members; other methods can promise any size."""
    path = archive(tmp_path / "w.npz", plain(), zipfile.ZIP_LZMA)
    with pytest.raises(UserError, match=r"a/b.npy in .* is compressed in a way that NumPy does not write"):
        open_npz_file(path)


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


def test_an_encrypted_member_is_named(tmp_path: Path) -> None:
    path = archive(tmp_path / "w.npz", plain(), zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02")
    data[at + 8] |= 1
    local = data.rindex(b"PK\x03\x04")
    data[local + 6] |= 1
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"c in .* cannot be read .*encrypted"):
        open_npz_file(path)


def test_a_folder_called_so_and_a_file_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "w.npz").mkdir()
    with pytest.raises(UserError, match=r"w\.npz' cannot be read .Is a directory"):
        open_npz_file(tmp_path / "w.npz")
    path = archive(tmp_path / "v.npz", plain())
    file = open_npz_file(path)
    path.unlink()
    with pytest.raises(UserError, match=r"c in .* cannot be read .No such file"):
        file.read("c")


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


def test_an_archive_that_is_replaced_after_it_was_opened_is_bounded_too(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz", plain())
    file = open_npz_file(path)
    path.unlink()
    os.mkfifo(path)  # reading it would wait for ever
    with pytest.raises(InvalidDataError, match="not a regular file"):
        file.read("c")

"""Safetensors files: headers that do not describe their file are refused; the library loads what is written here."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from pipeline.models.weights.safetensors import (
    MOST_HEADER_BYTES,
    MOST_TENSORS,
    header_length,
    open_safetensors,
    parts_of,
    refuse_absurd_tensors,
    refuse_not_finite,
)
from pipeline.models.weights.safetensors_head import FLOAT_BYTES, head_of
from shards.errors import InvalidDataError

Spoil = Callable[[dict[str, Any]], object]
F8 = (torch.float8_e4m3fn, torch.float8_e5m2)
TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, *F8),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
LARGEST = torch.finfo(torch.float32).max


def rewritten(path: Path, spoil: Spoil, *, behind: bytes = b"") -> Path:
    """A file of three tensors whose header was changed."""
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.zeros(0)}, path, metadata={"format": "pt"})
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    text = spoil(header)
    written = (text if isinstance(text, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + data[8 + length :] + behind)
    return path


def change(name: str, **entries: Any) -> Spoil:
    return lambda header: header[name].update(entries)


def test_every_type_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    values = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in TYPES}
    values |= {"one": torch.tensor(3.5), "none": torch.zeros(2, 0)}
    save_file(values, tmp_path / "w.safetensors", metadata={"x": "y"})
    file, expected = open_safetensors(tmp_path / "w.safetensors"), load_file(tmp_path / "w.safetensors")
    assert file.metadata == {"x": "y"}
    assert file.shapes == {name: tuple(value.shape) for name, value in expected.items()}
    for name, value in expected.items():
        assert file.read(name).dtype == value.dtype
        assert torch.equal(file.read(name).float(), value.float())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(lambda h: h.clear(), "its tensors end at byte .*, the file at", id="no tensors, but bytes"),
        pytest.param(lambda _: "[1]", r"its header is \[1\]; allowed: an object", id="a list"),
        pytest.param(lambda _: "{" * 200, "Expecting", id="no JSON"),
        pytest.param(lambda _: "[" * 200_000, "nested more than 64 deep", id="deep"),
        pytest.param(lambda h: json.dumps(h)[:-1] + ', "a": 1}', "'a' is named twice", id="a name twice"),
        pytest.param(lambda h: h.update(__metadata__={"x": 1}), "metadata is .*; allowed: texts", id="metadata"),
        pytest.param(lambda h: h.update(a=3), "'a' is 3; allowed: dtype, shape and data_offsets", id="no object"),
        pytest.param(lambda h: h["a"].__delitem__("dtype"), "'a' is .*; allowed: dtype, shape", id="no type"),
        pytest.param(change("a", dtype="F31"), "'a' is of the type 'F31'; allowed: F64", id="another type"),
        pytest.param(change("a", dtype=["F32"]), r"'a' is of the type \['F32'\]", id="a type that is a list"),
        pytest.param(change("a", shape=[2, 4]), "32 bytes, at the offsets .*, where 24 are", id="another shape"),
        pytest.param(change("a", shape=[-2, -3]), "'a' has the shape .*; allowed: whole numbers", id="negative"),
        pytest.param(change("a", shape=[2.0, 3]), "'a' has the shape", id="a float"),
        pytest.param(change("a", shape=[True, 6]), "'a' has the shape", id="a bool"),
        pytest.param(change("a", shape=[10**30, 1]), "'a' has the shape", id="more than can be counted"),
        pytest.param(change("a", shape=[2**62, 2**62]), "'a' is .* where 24 are", id="a product without end"),
        pytest.param(change("a", shape=[1] * 60 + [2, 3]), "'a' has the shape", id="62 dimensions"),
        pytest.param(change("c", shape=[0, 2**40]), "'?c.* declares the shape", id="nothing, declared large"),
        pytest.param(change("a", data_offsets=[24, 0]), "'a' is .* where -24 are", id="backwards"),
        pytest.param(change("a", data_offsets=[0]), "'a' has .* at .0.; allowed", id="one offset"),
        pytest.param(change("b", data_offsets=[8, 24]), "b begins at byte", id="overlap"),
        pytest.param(change("b", data_offsets=[1 << 40, (1 << 40) + 16]), "begins at byte", id="behind the end"),
        pytest.param(lambda h: h.pop("a"), "begins at byte|end at byte", id="a gap"),
        pytest.param(lambda h: h.update({"x\x1b[2J": h.pop("a")}), "a tensor called 'x.x1b", id="control characters"),
        pytest.param(lambda h: h.update({"x" * 2000: h.pop("a")}), "a tensor called 'xxx", id="a long name"),
        pytest.param(lambda h: h.update({"": h.pop("a")}), "a tensor called ''", id="no name"),
    ],
)
def test_headers_that_do_not_describe_their_file(tmp_path: Path, spoil: Spoil, message: str) -> None:
    path = rewritten(tmp_path / "w.safetensors", spoil)
    with pytest.raises((ValueError, InvalidDataError), match=message):
        open_safetensors(path)


def test_bytes_behind_the_last_tensor(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"its tensors end at byte .*, the file at"):
        open_safetensors(rewritten(tmp_path / "w", lambda _: None, behind=b"more"))


@pytest.mark.parametrize("declared", [0, 100, 2**63, MOST_HEADER_BYTES + 1])
def test_a_length_that_no_header_has(declared: int) -> None:
    with pytest.raises(ValueError, match=f"declares {declared:,} bytes; allowed in a file of 100: 1 to 92"):
        header_length(struct.pack("<Q", declared), num_bytes=100)


def test_headers_are_bounded_in_large_files_too() -> None:
    with pytest.raises(ValueError, match="1 to 16,777,216"):
        header_length(struct.pack("<Q", MOST_HEADER_BYTES + 1), num_bytes=1 << 40)


def test_any_broken_byte_of_a_header_is_a_message_or_another_name(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "w", lambda _: None)
    whole, num_refused = path.read_bytes(), 0
    for at in range(8 + struct.unpack("<Q", whole[:8])[0]):
        for bit in (1, 64, 128):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            try:
                file = open_safetensors(path)
                for name in file.shapes:
                    file.read(name)
            except (ValueError, InvalidDataError):
                num_refused += 1
    assert num_refused > 300


def test_a_file_that_becomes_shorter_is_no_crash(tmp_path: Path) -> None:
    """A mapped file would end the process with SIGBUS."""
    save_file({"a": torch.ones(100_000)}, tmp_path / "w")
    file = open_safetensors(tmp_path / "w")
    os.truncate(tmp_path / "w", 4096)
    with pytest.raises(EOFError, match=r"the file ends .* bytes before the end of a"):
        file.read("a")


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w")
    with pytest.raises(InvalidDataError, match="not a regular file"):
        open_safetensors(tmp_path / "w")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 500, 999])
def test_one_value_that_is_not_finite_is_enough(bad: float, at: int) -> None:
    value = torch.randn(10, 100)
    value.flatten()[at] = bad
    with pytest.raises(InvalidDataError, match=r"^w has 1 values of 1,000 that are not finite .* give other weights"):
        refuse_not_finite(value, "w")


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.full((1000,), LARGEST), id="a sum would overflow"),
        pytest.param(torch.tensor([LARGEST, -LARGEST, 1e-45]), id="the ends of the range"),
        pytest.param(torch.zeros(0, 3), id="nothing"),
        pytest.param(torch.tensor(2.0), id="one number"),
    ],
)
def test_what_is_finite_passes_as_it_is(value: torch.Tensor) -> None:
    assert refuse_not_finite(value, "w") is value


def test_more_tensors_than_any_model_has() -> None:
    with pytest.raises(InvalidDataError, match=r"'w' has 100,001 tensors; allowed: 100,000"):
        refuse_absurd_tensors("w", dict.fromkeys(map(str, range(MOST_TENSORS + 1)), (1,)))


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param({}, id="no tensor"),
        pytest.param({"a": (2, 3), 'e\u00e9 "b"': (5,), "last": (1, 1, 4, 2)}, id="several"),
        pytest.param({"empty": (0,), "scalar": (), "b": (3,)}, id="without elements, without axes"),
    ],
)
@pytest.mark.parametrize("metadata", [None, {"format": "pt", "a": "\u00e9"}])
def test_the_library_loads_what_is_written(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], metadata: dict[str, str] | None
) -> None:
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    head = head_of(shapes, metadata=metadata)
    data = b"".join(parts_of(head, tensors.values()))
    assert len(data) == head.num_bytes
    assert len(head.data) % 8 == 0
    found = load(data)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        begin = head.offsets[name]
        assert data[begin : begin + tensor.numel() * 4] == tensor.numpy().tobytes()
    (tmp_path / "x").write_bytes(data)
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert (file.metadata() or None) == metadata


def test_tensors_that_do_not_lie_in_one_piece_are_written_in_order() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    data = b"".join(parts_of(head_of({"a": (3, 2)}), [tensor]))
    assert torch.equal(load(data)["a"], tensor)


def test_tensors_lie_end_to_end_behind_an_aligned_head() -> None:
    head = head_of({"a": (2, 3), "scalar": (), "empty": (0, 4), "b": (5,)}, metadata={"format": "pt"})
    length = int.from_bytes(head.data[:8], "little")
    assert (len(head.data), length % 8) == (8 + length, 0)
    header = json.loads(head.data[8:])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert {name: entry["data_offsets"] for name, entry in header.items()} == {
        "a": [0, 24],
        "scalar": [24, 28],
        "empty": [28, 28],
        "b": [28, 48],
    }
    begins = {"a": 0, "scalar": 24, "empty": 28, "b": 28}
    assert head.offsets == {name: len(head.data) + begin for name, begin in begins.items()}
    assert head.num_bytes == len(head.data) + 12 * FLOAT_BYTES

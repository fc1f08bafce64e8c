"""Safetensors files: headers that do not describe their file are refused; the library loads what is written here."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from pipeline.models.weights.safetensors import (
    open_safetensors,
    parts_of,
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

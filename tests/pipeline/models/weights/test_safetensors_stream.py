"""Files written as a stream: the head is aligned, each tensor begins where it says, and the library loads them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

from pipeline.models.weights.safetensors import parts_of
from pipeline.models.weights.safetensors_head import FLOAT_BYTES, head_of


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

"""Files written as a stream: the library loads them, and each tensor begins where the head says."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

from pipeline.models.safetensors_head import head_of
from pipeline.models.safetensors_stream import parts_of


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

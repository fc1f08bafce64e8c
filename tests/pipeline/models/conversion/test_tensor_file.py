"""The shapes in a file: missing tensors and errors of the readers give one message."""

from pathlib import Path

import pytest
import torch

from pipeline.models.conversion.npz_file import write_npz
from pipeline.models.conversion.open_file import open_tensor_file
from pipeline.models.conversion.tensor_file import FILE_ERRORS, readable
from shards.errors import UserError

VALUES = {"a/b": torch.randn(2, 3), "c": torch.randn(4), "empty": torch.zeros(0, 3)}


@pytest.mark.parametrize("kind", FILE_ERRORS)
def test_every_error_of_a_reader_becomes_a_message(kind: type[Exception]) -> None:
    with pytest.raises(UserError, match=r"^w .*cannot be read"), readable("w"):
        raise kind("broken")


def test_a_lack_of_memory_is_said_with_the_size() -> None:
    message = r"w \[3\] of float32 cannot be read: there is not enough memory"
    with pytest.raises(UserError, match=message), readable("w", size="[3] of float32"):
        raise MemoryError


def test_renamed_keeps_what_is_named(tmp_path: Path) -> None:
    write_npz(tmp_path / "w.npz", VALUES.items())
    file = open_tensor_file(tmp_path / "w.npz").renamed({"new": "c"})
    assert dict(file.shapes) == {"new": (4,)}
    assert torch.equal(file.read("new"), VALUES["c"])


@pytest.mark.parametrize(
    ("name", "num_dims", "message"),
    [
        ("b", 1, "has no tensor b, which its model needs; it has 3: a/b, c"),
        ("empty", 2, r"empty in .* is \[0, 3\]; it must have 2 dimensions, each of 1 or more"),
        ("c", 2, r"c in .* is \[4\]; it must have 2"),
    ],
)
def test_a_tensor_that_must_be_there(tmp_path: Path, name: str, num_dims: int, message: str) -> None:
    write_npz(tmp_path / "w.npz", VALUES.items())
    with pytest.raises(UserError, match=message):
        open_tensor_file(tmp_path / "w.npz").shape(name, num_dims)

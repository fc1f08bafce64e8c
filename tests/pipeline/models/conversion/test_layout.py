"""Tensor mappings: what is split is joined again, bit for bit, and the shapes are those written down here."""

from pathlib import Path

import pytest
import torch

from pipeline.models.conversion.layout import (
    TensorMapping,
    as_is,
    convolution,
    patch_convolution,
    positions,
    read_layout,
    transposed,
    vector_of_four,
    without_class_row,
    write_layout,
)
from pipeline.models.conversion.open_file import open_tensor_file
from pipeline.models.conversion.zip_file import write_npz
from shards.errors import UserError


@pytest.mark.parametrize(
    ("place", "ours", "theirs"),
    [
        pytest.param(as_is("x"), (2, 3), (2, 3), id="as is"),
        pytest.param(transposed("x"), (2, 3), (3, 2), id="dense"),
        pytest.param(convolution("x"), (8, 3, 7, 5), (7, 5, 3, 8), id="convolution"),
        pytest.param(vector_of_four("x"), (6,), (1, 1, 1, 6), id="vector of four"),
        pytest.param(patch_convolution("x", 2), (5, 12), (5, 3, 2, 2), id="patches"),
        pytest.param(positions("x", class_row=True, class_token=True), (1, 5, 2), (1, 5, 2), id="with its row"),
        pytest.param(positions("x", class_row=False, class_token=False), (1, 4, 2), (1, 4, 2), id="no class token"),
    ],
)
def test_split_and_join_are_inverse(place: TensorMapping, ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    value = torch.randn(ours)
    (part,) = place.split(value)
    assert part.shape == theirs
    assert torch.equal(place.join((part,)), value)
    assert tuple(place.split(torch.empty(ours, device="meta"))[0].shape) == theirs


def test_patches_are_laid_out_as_in_a_convolution() -> None:
    """Ours: rows, columns, channels; theirs: channels, rows, columns."""
    value = torch.arange(12.0)[None]
    (part,) = patch_convolution("x", 2).split(value)
    assert part[0, 1].tolist() == [[1.0, 4.0], [7.0, 10.0]]


def test_a_row_that_is_not_there_is_zero_here() -> None:
    place = positions("x", class_row=False, class_token=True)
    part = torch.randn(1, 4, 2)
    joined = place.join((part,))
    assert not joined[:, 0].any()
    assert torch.equal(place.split(joined)[0], part)


@pytest.mark.parametrize("row", [torch.tensor([1.0, 2.0]), torch.zeros(2)], ids=["added", "nothing to add"])
def test_the_class_tokens_row_goes_into_the_token(row: torch.Tensor) -> None:
    table, token = torch.randn(1, 5, 2), torch.tensor([[[-0.0, 3.0]]])
    table[0, 0] = row
    state = {"embed.position": table, "embed.class_token": token, "norm.bias": torch.ones(2)}
    tensor = without_class_row(lambda name: state[name])
    assert not tensor("embed.position")[0, 0].any()
    assert torch.equal(tensor("embed.position")[0, 1:], table[0, 1:])
    assert torch.equal(tensor("embed.class_token"), token + row)
    assert bool(torch.signbit(tensor("embed.class_token")[0, 0, 0])) == (not row.any()), "no bit is changed for nothing"
    assert torch.equal(tensor("norm.bias"), torch.ones(2))


def test_a_layout_is_written_and_read(tmp_path: Path) -> None:
    both = TensorMapping(names=("p", "q"), split=lambda t: tuple(t.chunk(2)), join=torch.cat)
    layout, state = {"w": transposed("kernel"), "b": both}, {"w": torch.randn(2, 3), "b": torch.randn(4)}
    write_npz(tmp_path / "w.npz", write_layout(layout, lambda name: state[name]))
    file, shapes = open_tensor_file(tmp_path / "w.npz"), {"w": (2, 3), "b": (4,)}
    assert dict(file.shapes) == {"kernel": (3, 2), "p": (2,), "q": (2,)}
    tensor = read_layout(file, layout, shapes, advice="")
    assert all(torch.equal(tensor(name), value) and tensor(name).is_contiguous() for name, value in state.items())
    with pytest.raises(UserError, match=r"kernel is \[3, 2\], the model needs \[3, 5\]; q \[2\] is not in .* Ask"):
        read_layout(file, {"w": transposed("kernel"), "b": as_is("p")}, {"w": (5, 3), "b": (2,)}, advice="Ask")

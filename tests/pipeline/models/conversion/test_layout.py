"""Tensor mappings: what is split is joined again, bit for bit, and the shapes are those written down here."""

from pathlib import Path

import pytest
import torch

from pipeline.models.conversion.layout import (
    AS_IS,
    CONVOLUTION,
    FLAX_DENSE,
    LAYER,
    TENSOR,
    TRANSPOSED,
    VECTOR_OF_FOUR,
    OurView,
    Section,
    TensorMapping,
    Transform,
    chunks,
    layout_of,
    numbers_in,
    patch_convolution,
    positions,
    read_layout,
    without_class_row,
    write_layout,
)
from pipeline.models.conversion.open_file import open_tensor_file
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.conversion.zip_file import write_npz


@pytest.mark.parametrize(
    ("place", "ours", "theirs"),
    [
        pytest.param(AS_IS, (2, 3), (2, 3), id="as is"),
        pytest.param(TRANSPOSED, (2, 3), (3, 2), id="dense"),
        pytest.param(CONVOLUTION, (8, 3, 7, 5), (7, 5, 3, 8), id="convolution"),
        pytest.param(VECTOR_OF_FOUR, (6,), (1, 1, 1, 6), id="vector of four"),
        pytest.param(patch_convolution(2), (5, 12), (5, 3, 2, 2), id="patches"),
        pytest.param(positions(class_row=True, class_token=True), (1, 5, 2), (1, 5, 2), id="with its row"),
        pytest.param(positions(class_row=False, class_token=False), (1, 4, 2), (1, 4, 2), id="no class token"),
    ],
)
def test_split_and_join_are_inverse(place: Transform, ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    value = torch.randn(ours)
    (part,) = place.split(value)
    assert part.shape == theirs
    assert torch.equal(place.join((part,)), value)
    assert tuple(place.split(torch.empty(ours, device="meta"))[0].shape) == theirs


def test_patches_are_laid_out_as_in_a_convolution() -> None:
    """Ours: rows, columns, channels; theirs: channels, rows, columns."""
    value = torch.arange(12.0)[None]
    (part,) = patch_convolution(2).split(value)
    assert part[0, 1].tolist() == [[1.0, 4.0], [7.0, 10.0]]


def test_a_row_that_is_not_there_is_zero_here() -> None:
    place = positions(class_row=False, class_token=True)
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


TABLE = (
    Section(rows=(("embed.token", "cls", TENSOR), ("embed.missing", "none", TENSOR))),
    Section(
        ours="blocks.{}.",
        theirs="layer{:02d}/",
        first=1,
        rows=(
            ("qkv.", ("q.", "k."), {"weight": ("w", chunks(2))}),
            ("norm.", "ln.", LAYER),
            ("dense.", "fc/", FLAX_DENSE),
        ),
    ),
)
NAMES = ("blocks.1.dense.weight", "blocks.0.norm.bias", "blocks.0.qkv.weight", "embed.token", "of.ours")


def test_a_table_gives_the_names_of_the_tensors_that_a_model_has() -> None:
    """In the order of the table, blocks by their numbers; a name without a row is the same there."""
    layout = layout_of(TABLE, NAMES)
    assert {name: mapping.names for name, mapping in layout.items()} == {
        "embed.token": ("cls",),
        "blocks.0.qkv.weight": ("layer01/q.w", "layer01/k.w"),
        "blocks.0.norm.bias": ("layer01/ln.bias",),
        "blocks.1.dense.weight": ("layer02/fc/kernel",),
        "of.ours": ("of.ours",),
    }
    assert list(layout)[:2] == ["embed.token", "blocks.0.qkv.weight"]
    assert layout["blocks.1.dense.weight"].transform is TRANSPOSED


def test_a_file_is_seen_by_our_names() -> None:
    shapes = {"cls": (1, 1, 4), "layer01/fc/kernel": (4, 6), "layer03/fc/kernel": (4, 6), "layer03/ln.bias": (4,)}
    view = OurView(file=TensorFile(where="w", shapes=shapes, read=lambda _: torch.zeros(1)), table=TABLE)
    assert (view.has("embed.token"), view.has("embed.missing")) == (True, False)
    assert view.shape("blocks.0.dense.weight", 2) == (6, 4), "as ours is stored"
    assert view.numbers("blocks.{}.") == {(0,), (2,)}
    assert view.numbers("stages.{}.{}.") == set(), "no section, and no such names"


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("block{}/unit{:02d}/", {(1, 1), (1, 2), (2, 1)}),
        ("layer_{}/", {(0,), (1,)}),
        ("none_{}/", set()),
        ("", {()}),
    ],
)
def test_numbers_in_names(prefix: str, expected: set[tuple[int, ...]]) -> None:
    names = ["block1/unit1/x", "block1/unit02/x", "block2/unit1/x", "layer_0/x", "layer_1/y", "layer_1/x"]
    assert numbers_in(names, prefix) == expected


def test_a_layout_is_written_and_read(tmp_path: Path) -> None:
    layout = {
        "w": TensorMapping(names=("kernel",), transform=TRANSPOSED),
        "b": TensorMapping(names=("p", "q"), transform=chunks(2)),
    }
    state = {"w": torch.randn(2, 3), "b": torch.randn(4)}
    write_npz(tmp_path / "w.npz", write_layout(layout, lambda name: state[name]))
    file, shapes = open_tensor_file(tmp_path / "w.npz"), {"w": (2, 3), "b": (4,)}
    assert dict(file.shapes) == {"kernel": (3, 2), "p": (2,), "q": (2,)}
    tensor = read_layout(file, layout, shapes, advice="")
    assert all(torch.equal(tensor(name), value) and tensor(name).is_contiguous() for name, value in state.items())

"""Describes how our tensors appear in files of other libraries: under which names, in which shapes, fused or split.

Each format has a table. A row has our name, the file's name or names, and how the values are converted. Import, export
and the check of what a file must hold all follow the same table: the names of a model's parameters say which rows
apply, and shapes come from converting tensors on the meta device.

Shape letters: O channels out, I channels in, k kernel, D width, P patch, C channels, N tokens.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.weights.safetensors import Shapes, TensorByName, refuse_misfits, refuse_not_finite

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Transform:
    """Splits one of our tensors into tensors of a file, and joins it from them."""

    split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    join: Callable[[tuple[torch.Tensor, ...]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TensorMapping:
    """One of our tensors: its names in a file, and how it is converted."""

    names: tuple[str, ...]
    transform: Transform


Layout = Mapping[str, TensorMapping]
LayerTensors = Mapping[str, tuple[str, Transform]]
"""The tensors of a layer. Maps the end of our name to the end of the file's name and to the conversion of the
values."""
Row = tuple[str, str | tuple[str, ...], LayerTensors]
"""The beginning of our names, the beginning of the file's names (several, if one layer of ours is several layers
there), and the layer."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Rows whose names begin with `ours` here and with `theirs` in the file. In both, {} stands for the number of a
    block, or for the numbers of a stage and a unit; the file's numbers start at `first`, ours at 0."""

    rows: tuple[Row, ...]
    ours: str = ""
    theirs: str = ""
    first: int = 0


Table = tuple[Section, ...]


def one_to_one(write: Change, read: Change) -> Transform:
    """Returns the transform of a tensor that is one tensor in the file, too. `write` converts ours to theirs, and
    `read` is its inverse."""
    return Transform(split=lambda t: (write(t),), join=lambda pieces: read(pieces[0]))


AS_IS = one_to_one(lambda t: t, lambda t: t)
# A dense layer of JAX or TensorFlow: (in, out) for our (out, in).
TRANSPOSED = one_to_one(lambda t: t.T, lambda t: t.T)
# A convolution of JAX or TensorFlow: (k, k, I, O) for our (O, I, k, k).
CONVOLUTION = one_to_one(lambda t: t.permute(2, 3, 1, 0), lambda t: t.permute(3, 2, 0, 1))
# A vector that is stored as (1, 1, 1, C).
VECTOR_OF_FOUR = one_to_one(lambda t: t.reshape(1, 1, 1, -1), lambda t: t.flatten())
TENSOR: LayerTensors = {"": ("", AS_IS)}  # a tensor whose row has its full name
LAYER: LayerTensors = {"weight": ("weight", AS_IS), "bias": ("bias", AS_IS)}  # a layer with PyTorch's names
FLAX_NORM: LayerTensors = {"weight": ("scale", AS_IS), "bias": ("bias", AS_IS)}
FLAX_DENSE: LayerTensors = {"weight": ("kernel", TRANSPOSED), "bias": ("bias", AS_IS)}
FLAX_CONVOLUTION: LayerTensors = {"weight": ("kernel", CONVOLUTION)}


def chunks(number: int) -> Transform:
    """Returns the transform of a tensor (number * D, ...) that is `number` tensors (D, ...) in the file."""
    return Transform(split=lambda t: tuple(t.chunk(number)), join=torch.cat)


def patch_convolution(patch: int) -> Transform:
    """Returns the transform of our patch embedding, (D, P * P * C), to PyTorch's convolution, (D, C, P, P)."""
    return one_to_one(
        lambda t: t.reshape(t.shape[0], patch, patch, -1).permute(0, 3, 1, 2),
        lambda t: t.permute(0, 2, 3, 1).flatten(1),
    )


def positions(*, class_row: bool, class_token: bool) -> Transform:
    """Returns the transform of position embeddings (1, N, D). `class_row`: whether the class token has a row in the
    file, as it has here.

    If the file has no such row, our row is read as zeros. Before an export, our row is added to the class token itself
    (`without_class_row`).
    """
    if class_row or not class_token:
        return AS_IS
    return one_to_one(lambda t: t[:, 1:], lambda t: torch.cat([torch.zeros_like(t[:, :1]), t], dim=1))


def layout_of(table: Table, names: Iterable[str]) -> Layout:
    """Returns how the tensors with our `names` appear in a file, in the table's order. A name without a row is the same
    in the file, so that our own names need no rows."""
    names, layout = dict.fromkeys(names), dict[str, TensorMapping]()
    for section in table:
        for numbers in sorted(numbers_in(names, section.ours)):
            ours = section.ours.format(*numbers)
            theirs = section.theirs.format(*(number + section.first for number in numbers))
            for row_ours, row_theirs, layer in section.rows:
                begins = (row_theirs,) if isinstance(row_theirs, str) else row_theirs
                for end, (their_end, transform) in layer.items():
                    if (name := f"{ours}{row_ours}{end}") in names:
                        their_names = tuple(f"{theirs}{begin}{their_end}" for begin in begins)
                        layout[name] = TensorMapping(names=their_names, transform=transform)
    return layout | {name: TensorMapping(names=(name,), transform=AS_IS) for name in names if name not in layout}


def numbers_in(names: Iterable[str], prefix: str) -> set[tuple[int, ...]]:
    """Returns the different numbers that the names have where a section's prefix has {}. Returns one empty tuple for a
    prefix without {}."""
    if "{" not in prefix:
        return {()}
    pattern = re.compile(re.sub(r"\\\{.*?\\\}", r"(\\d+)", re.escape(prefix)))
    return {tuple(map(int, match.groups())) for name in names if (match := pattern.match(name))}


@dataclass(frozen=True, kw_only=True)
class OurView:
    """The shapes in a file of a known format, by our names."""

    file: TensorFile
    table: Table

    def theirs(self, name: str) -> str:
        """Returns the first of the names that our tensor has in the file."""
        return layout_of(self.table, (name,))[name].names[0]

    def has(self, name: str) -> bool:
        """Returns whether the file has our tensor."""
        return self.theirs(name) in self.file.shapes

    def shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        """Returns our shape of a required tensor, which has `num_dims` dimensions here. Raises UserError as
        `TensorFile.shape` does."""
        mapping = layout_of(self.table, (name,))[name]
        (one,) = mapping.transform.split(torch.empty((1,) * num_dims, device="meta"))
        there = torch.empty(self.file.shape(mapping.names[0], one.dim()), device="meta")
        return tuple(mapping.transform.join((there,)).shape)

    def numbers(self, ours: str) -> set[tuple[int, ...]]:
        """Returns the numbers, from 0, of the file's blocks or units in the section that begins with `ours` here."""
        found = next((section for section in self.table if section.ours == ours), Section(rows=(), theirs=ours))
        numbers = numbers_in(self.file.shapes, found.theirs)
        return {tuple(number - found.first for number in each) for each in numbers}


def read_layout(file: TensorFile, layout: Layout, shapes: Shapes, *, advice: str) -> TensorByName:
    """Returns a function that reads our tensors from a file. Raises UserError, with the file's own names, if tensors
    are missing, unexpected or of another shape. Reading a tensor raises InvalidDataError if it is not finite."""
    refuse_misfits(file.where, found=file.shapes, wanted=their_shapes(layout, shapes), advice=advice)

    def piece(theirs: str) -> torch.Tensor:
        return refuse_not_finite(file.read(theirs), f"{theirs} in {file.where!r}")

    def tensor(name: str) -> torch.Tensor:
        mapping = layout[name]
        return mapping.transform.join(tuple(piece(theirs) for theirs in mapping.names)).contiguous()

    return tensor


def their_shapes(layout: Layout, shapes: Shapes) -> Shapes:
    """Returns the names and shapes in the file, in the order of `write_layout`."""
    theirs: dict[str, tuple[int, ...]] = {}
    for name, mapping in layout.items():
        pieces = mapping.transform.split(torch.empty(shapes[name], device="meta"))
        theirs |= {their: tuple(piece.shape) for their, piece in zip(mapping.names, pieces, strict=True)}
    return theirs


def write_layout(layout: Layout, tensor: TensorByName) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the names and tensors of the file, and reads one of our tensors at a time."""
    for name, mapping in layout.items():
        pieces = mapping.transform.split(tensor(name).float())
        yield from zip(mapping.names, (piece.contiguous() for piece in pieces), strict=True)


def without_class_row(tensor: TensorByName) -> TensorByName:
    """Returns the tensors of the same model with the class token's position embedding added to the token itself and
    then set to zero."""

    def summed(name: str) -> torch.Tensor:
        value = tensor(name)
        if name == "embed.class_token":
            row_11D = tensor("embed.position")[:, :1]
            return value + row_11D if row_11D.any() else value  # adding zero would change -0.0 to 0.0
        if name == "embed.position":
            return torch.cat([torch.zeros_like(value[:, :1]), value[:, 1:]], dim=1)
        return value

    return summed

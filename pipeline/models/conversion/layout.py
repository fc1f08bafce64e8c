"""How our tensors appear in files of other libraries: under which names, in which shapes, fused or split.

A layout is a table from our name to a `TensorMapping`. Reading and writing both follow it, and so does the check of
what a file must hold: its shapes come from converting tensors on the meta device. Shape letters: O channels out,
I channels in, k kernel, D width, N tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.weights.safetensors import Shapes, TensorByName, refuse_misfits, refuse_not_finite

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TensorMapping:
    """One tensor of ours: its names in the other library, and how it is split into those and joined from them."""

    names: tuple[str, ...]
    split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    join: Callable[[tuple[torch.Tensor, ...]], torch.Tensor]


Layout = Mapping[str, TensorMapping]


def read_layout(file: TensorFile, layout: Layout, shapes: Shapes, *, advice: str) -> TensorByName:
    """Our tensors from a file. Raises UserError, with the file's own names, if tensors are missing, unexpected or of
    another shape, and when a tensor is read that is not finite."""
    refuse_misfits(file.where, found=file.shapes, wanted=their_shapes(layout, shapes), advice=advice)

    def piece(theirs: str) -> torch.Tensor:
        return refuse_not_finite(file.read(theirs), f"{theirs} in {file.where!r}")

    return lambda name: layout[name].join(tuple(piece(theirs) for theirs in layout[name].names)).contiguous()


def their_shapes(layout: Layout, shapes: Shapes) -> Shapes:
    """Their names and shapes, in the order of `write_layout`."""
    theirs: dict[str, tuple[int, ...]] = {}
    for name, mapping in layout.items():
        pieces = mapping.split(torch.empty(shapes[name], device="meta"))
        theirs |= {their: tuple(piece.shape) for their, piece in zip(mapping.names, pieces, strict=True)}
    return theirs


def write_layout(layout: Layout, tensor: TensorByName) -> Iterator[tuple[str, torch.Tensor]]:
    """Their names and tensors, one tensor at a time."""
    for name, mapping in layout.items():
        pieces = mapping.split(tensor(name).float())
        yield from zip(mapping.names, (piece.contiguous() for piece in pieces), strict=True)


def as_is(name: str) -> TensorMapping:
    """The same tensor under another name."""
    return changed(name, lambda t: t, lambda t: t)


def changed(name: str, write: Change, read: Change) -> TensorMapping:
    """One tensor there too; `write` converts ours to theirs, `read` is the inverse."""
    return TensorMapping(names=(name,), split=lambda t: (write(t),), join=lambda pieces: read(pieces[0]))


def transposed(name: str) -> TensorMapping:
    """A dense layer of JAX or TensorFlow: (in, out) for our (out, in)."""
    return changed(name, lambda t: t.T, lambda t: t.T)


def same(ours: str, theirs: str) -> dict[str, TensorMapping]:
    """Weight and bias of a layer under other names; both arguments end with the dot."""
    return {f"{ours}{kind}": as_is(f"{theirs}{kind}") for kind in ("weight", "bias")}


def convolution(name: str) -> TensorMapping:
    """A convolution of JAX or TensorFlow: (k, k, I, O) for our (O, I, k, k)."""
    return changed(name, lambda t: t.permute(2, 3, 1, 0), lambda t: t.permute(3, 2, 0, 1))


def vector_of_four(name: str) -> TensorMapping:
    """A vector that is stored as (1, 1, 1, C)."""
    return changed(name, lambda t: t.reshape(1, 1, 1, -1), lambda t: t.flatten())


def patch_convolution(name: str, patch: int) -> TensorMapping:
    """The patch embedding as PyTorch's convolution (D, C, P, P) for our (D, P * P * C)."""
    return changed(
        name,
        lambda t: t.reshape(t.shape[0], patch, patch, -1).permute(0, 3, 1, 2),
        lambda t: t.permute(0, 2, 3, 1).flatten(1),
    )


def positions(name: str, *, class_row: bool, class_token: bool) -> TensorMapping:
    """Position embeddings (1, N, D); `class_row`: the class token has a row of its own there, as it has here.

    Without a row there, ours is zeros: before an export, the row is added to the class token itself.
    """
    if class_row or not class_token:
        return as_is(name)
    return changed(name, lambda t: t[:, 1:], lambda t: torch.cat([torch.zeros_like(t[:, :1]), t], dim=1))


def without_class_row(tensor: TensorByName) -> TensorByName:
    """The same model with the class token's position embedding added to the token itself, and zero."""

    def summed(name: str) -> torch.Tensor:
        value = tensor(name)
        if name == "embed.class_token":
            row_11D = tensor("embed.position")[:, :1]
            return value + row_11D if row_11D.any() else value  # adding zero would change -0.0 to 0.0
        if name == "embed.position":
            return torch.cat([torch.zeros_like(value[:, :1]), value[:, 1:]], dim=1)
        return value

    return summed

"""Where our tensors are kept in the files of others: under which names, in which shape, fused or apart.

A layout is a plain table from our name to a `TensorMapping`. Both directions come from it, and so does what a file must
hold: the shapes are those that the conversion gives on the meta device. Shape letters: O channels out, I channels in,
k kernel, D width, N tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.weights import Shapes, TensorByName, refuse_misfits
from shards.errors import UserError

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TensorMapping:
    """One tensor of ours: the names it has elsewhere, and how it is split into those parts and joined from them."""

    names: tuple[str, ...]
    split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    join: Callable[[tuple[torch.Tensor, ...]], torch.Tensor]


Layout = Mapping[str, TensorMapping]


def read_layout(file: TensorFile, layout: Layout, shapes: Shapes, *, advice: str) -> TensorByName:
    """Our tensors from a file. UserError naming, as the file does, what is missing, too many or of another shape; and,
    once it is read, what is not finite."""
    refuse_misfits(file.where, found=file.shapes, wanted=their_shapes(layout, shapes), advice=advice)

    def part(theirs: str) -> torch.Tensor:
        return refuse_not_finite(file.read(theirs), f"{theirs} in {file.where!r}")

    return lambda name: layout[name].join(tuple(part(theirs) for theirs in layout[name].names)).contiguous()


def their_shapes(layout: Layout, shapes: Shapes) -> Shapes:
    """Their names and shapes, in the order of `write_layout`."""
    theirs: dict[str, tuple[int, ...]] = {}
    for name, place in layout.items():
        parts = place.split(torch.empty(shapes[name], device="meta"))
        theirs |= {their: tuple(part.shape) for their, part in zip(place.names, parts, strict=True)}
    return theirs


def refuse_not_finite(value: torch.Tensor, what: str) -> torch.Tensor:
    """The same tensor; UserError where it holds NaN or infinity."""
    num_bad = value.numel() - int(torch.isfinite(value).sum())
    if num_bad:
        raise UserError(
            f"{what} has {num_bad} values of {value.numel()} that are not finite (NaN or infinite); the file is "
            "damaged or its training failed: give other weights"
        )
    return value


def write_layout(layout: Layout, tensor: TensorByName) -> Iterator[tuple[str, torch.Tensor]]:
    """Their names and tensors, one after the other."""
    for name, place in layout.items():
        parts = place.split(tensor(name).float())
        yield from zip(place.names, (part.contiguous() for part in parts), strict=True)


def as_is(name: str) -> TensorMapping:
    """The same tensor under another name."""
    return changed(name, lambda t: t, lambda t: t)


def changed(name: str, write: Change, read: Change) -> TensorMapping:
    """One tensor there too; `write` makes theirs of ours, `read` is its inverse."""
    return TensorMapping(names=(name,), split=lambda t: (write(t),), join=lambda parts: read(parts[0]))


def transposed(name: str) -> TensorMapping:
    """A dense layer of JAX or TensorFlow: (in, out) for our (out, in)."""
    return changed(name, lambda t: t.T, lambda t: t.T)


def convolution(name: str) -> TensorMapping:
    """A convolution of JAX or TensorFlow: (k, k, I, O) for our (O, I, k, k)."""
    return changed(name, lambda t: t.permute(2, 3, 1, 0), lambda t: t.permute(3, 2, 0, 1))


def vector_of_four(name: str) -> TensorMapping:
    """A vector that is kept as (1, 1, 1, C)."""
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

    Where it has none there, it is a row of zeros here: export adds it to the class token first.
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
            return value + row_11D if row_11D.any() else value  # adding zero would turn a -0.0 around
        if name == "embed.position":
            return torch.cat([torch.zeros_like(value[:, :1]), value[:, 1:]], dim=1)
        return value

    return summed

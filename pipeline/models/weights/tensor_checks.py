"""Checks that every reader and writer of weights shares: which tensors are there, their shapes, and finite values."""

from collections.abc import Callable, Mapping

import torch

from shards.errors import InvalidDataError, UserError
from shards.schema.config_values import shown_value

TensorByName = Callable[[str], torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]
MOST_TENSORS, MOST_DIMENSIONS, MOST_NAME, MOST_LENGTH = 100_000, 16, 1_000, 1 << 31  # in any file


def refuse_absurd_tensors(where: str, shapes: Shapes) -> None:
    """InvalidDataError for more tensors, longer names or other shapes than any model's file has."""
    if len(shapes) > MOST_TENSORS:
        raise InvalidDataError(f"{where!r} has {len(shapes):,} tensors; allowed: {MOST_TENSORS:,}; fetch it again")
    for name, shape in shapes.items():
        if not 0 < len(name) <= MOST_NAME or not name.isprintable():
            raise InvalidDataError(
                f"{where!r} has a tensor called {shown_value(name)}; allowed: 1 to {MOST_NAME:,} printable characters; "
                "fetch it again"
            )
        are_lengths = all(type(length) is int and 0 <= length <= MOST_LENGTH for length in shape)
        if not are_lengths or len(shape) > MOST_DIMENSIONS:
            raise InvalidDataError(
                f"{name} in {where!r} declares the shape {shown_value(list(shape))}; allowed: up to {MOST_DIMENSIONS} "
                f"dimensions of 0 to {MOST_LENGTH:,}; the file is damaged, or made to do damage: fetch it again"
            )


def refuse_misfits(where: str, *, found: Shapes, wanted: Shapes, advice: str = "") -> None:
    """UserError with the tensors that have another shape, are missing or unexpected; `advice`: what to do about it."""
    missing = [f"{name} {list(wanted[name])} is not there" for name in wanted if name not in found]
    extra = [f"{name} {list(found[name])} is not in the model" for name in found if name not in wanted]
    shapes = [
        f"{name} is {list(found[name])}, the model needs {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if missing or extra or shapes:
        faults = shapes + missing + extra
        listed = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        default = "Give the model the sizes of the weights (--model.name, --model.width, ...), or other weights"
        raise UserError(f"the weights at {where!r} do not fit the model: {listed}. {advice or default}")


def refuse_not_finite(value: torch.Tensor, what: str) -> torch.Tensor:
    """The same tensor. Raises InvalidDataError if it holds NaN or infinity.

    One pass of `aminmax`, which hands on NaN; 70 times faster than `isfinite`, which counts only after it failed.
    """
    if value.numel() and not torch.stack(value.aminmax()).isfinite().all():
        num_bad = value.numel() - int(torch.isfinite(value).sum())
        raise InvalidDataError(
            f"{what} has {num_bad:,} values of {value.numel():,} that are not finite (NaN or infinite, as float32); the"
            " file is damaged or its training failed: give other weights"
        )
    return value

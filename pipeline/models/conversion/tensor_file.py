"""Named tensors in a file, whoever wrote it: the shape of each, and a way to read one. Nothing is unpickled.

Shapes come from headers, tensors are read one by one: a file of another model is refused before it is read.
"""

import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from safetensors import SafetensorError

from pipeline.models.weights import Shapes, TensorByName
from shards.errors import UserError

# What the readers of damaged, encrypted or hostile files raise: header and values alike.
FILE_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    SyntaxError,
    RuntimeError,  # NotImplementedError and RecursionError are such
    MemoryError,
    AssertionError,
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,
    SafetensorError,
)


@contextmanager
def readable(what: str, *, size: str = "") -> Iterator[None]:
    """Raises UserError for whatever goes wrong inside while `what` is read; `size`: its shape and bytes."""
    try:
        yield
    except MemoryError as error:
        raise UserError(f"{what} {size} cannot be read: there is not enough memory; take a larger machine") from error
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise UserError(f"{what} cannot be read ({reason}); give a file that this user may read") from error
    except FILE_ERRORS as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise UserError(f"{what} cannot be read ({reason}); is it cut off? Fetch the file again") from error


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """What is in a file: the shape of every tensor, and a function that reads one of them, float32."""

    where: str
    shapes: Shapes
    read: TensorByName

    def shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        """The shape of a tensor that must be there; UserError where it is not, is empty, or has other dimensions."""
        if name not in self.shapes:
            some = ", ".join(sorted(self.shapes)[:5])
            raise UserError(
                f"{self.where!r} has no tensor {name}, which its model needs; it has {len(self.shapes)}: {some}, ...; "
                "give the file of a ViT, a hybrid or a BiT ResNet"
            )
        if len(self.shapes[name]) != num_dims or min(self.shapes[name]) < 1:
            raise UserError(
                f"{name} in {self.where!r} is {list(self.shapes[name])}; it must have {num_dims} dimensions, each of 1 "
                "or more; give the file of a ViT, a hybrid or a BiT ResNet"
            )
        return self.shapes[name]

    def renamed(self, names: Mapping[str, str]) -> "TensorFile":
        """The same tensors under other names (new name -> the name here); those not named are left out."""
        shapes = {new: self.shapes[old] for new, old in names.items()}
        return TensorFile(where=self.where, shapes=shapes, read=lambda name: self.read(names[name]))

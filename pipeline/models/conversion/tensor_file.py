"""Named tensors in a file of any format, and the JSON file that describes them. Nothing is unpickled.

Shapes come from headers and tensors are read one by one, so that a file of another model is refused early.
"""

import re
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.models.weights.folder import MOST_DESCRIPTION_BYTES
from pipeline.models.weights.safetensors import Shapes, TensorByName
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_file
from shards.files.typed_json import parse_json

# Errors that libraries raise for damaged, encrypted or hostile files, in headers and values alike.
FILE_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    SyntaxError,
    RuntimeError,  # includes NotImplementedError and RecursionError
    MemoryError,
    AssertionError,
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,
)
# Prefixes of DataParallel, torch.compile and training scripts' modules, in any order.
_PREFIXES = re.compile(r"(?:(?:module|_orig_mod|model|backbone|net)\.)+(?=.)")


class FlagNeededError(UserError):
    """Raised if a file leaves open what only a flag of `patchline import` can say."""


def bare_name(name: str) -> str:
    """Returns the name of a tensor without the prefixes that training scripts add."""
    found = _PREFIXES.match(name)
    return name[found.end() :] if found else name


@contextmanager
def readable(what: str, *, size: str = "") -> Iterator[None]:
    """Turns the errors in FILE_ERRORS, if they occur while `what` is read, into UserError or InvalidDataError. `size`:
    the shape and type of `what`, for the message."""
    try:
        yield
    except MemoryError as error:
        raise UserError(f"{what} {size} cannot be read: there is not enough memory; take a larger machine") from error
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise UserError(f"{what} cannot be read ({reason})", todo="give a file that this user may read") from error
    except FILE_ERRORS as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise InvalidDataError(f"{what} cannot be read ({reason}); is it cut off? Fetch the file again") from error


def whole_numbers_error(what: str, kind: object) -> UserError:
    """Returns the error for a tensor of integers. Such weights are quantised, and their scale is in another tensor or
    missing."""
    return UserError(
        f"{what} is of type {kind}; allowed: floating-point numbers: weights of whole numbers are quantised, and their "
        "scale is not applied here; give the weights before quantisation"
    )


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """The content of a file: the shape of every tensor, and a function that reads a tensor as float32. `arguments` are
    the arguments of the training script, if the file has them."""

    where: str
    shapes: Shapes
    read: TensorByName
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        """Returns the shape of a required tensor. Raises UserError if it is missing, empty, or has another number of
        dimensions."""
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
        """Returns the file with only the tensors in `names` (new name -> present name), under their new names."""
        shapes = {new: self.shapes[old] for new, old in names.items()}
        return replace(self, shapes=shapes, read=lambda name: self.read(names[name]))


def json_object(path: Path) -> Mapping[str, Any]:
    """Returns the object in a JSON file. Raises UserError if it cannot be read, or holds something else."""
    try:
        with readable(repr(str(path))):
            content = parse_json(read_local_file(path, most_bytes=MOST_DESCRIPTION_BYTES))
    except UserError as error:
        if isinstance(error.__cause__, ValueError):
            raise UserError(f"{str(path)!r} is no JSON ({error.__cause__}); fetch it again") from error
        raise
    if not isinstance(content, dict):
        raise UserError(f"{str(path)!r} is no JSON object; fetch it again")
    return content

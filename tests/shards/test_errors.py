"""Errors that become exit codes must reach the command line, whatever library lies between."""

from dataclasses import dataclass

import pytest
from pydantic import TypeAdapter

from shards.errors import StorageError, UserError, WillNotSucceedError


@dataclass(frozen=True)
class Refusing:
    size: int

    def __post_init__(self) -> None:
        raise UserError(f"size is {self.size}")


@pytest.mark.parametrize("kind", [UserError, StorageError, WillNotSucceedError])
def test_they_are_none_of_the_kinds_that_libraries_catch(kind: type[Exception]) -> None:
    assert not issubclass(kind, ValueError | TypeError | OSError | AssertionError)


def test_a_refusal_passes_through_pydantic_unchanged() -> None:
    with pytest.raises(UserError, match="size is 3"):
        TypeAdapter(Refusing).validate_python({"size": 3})

"""Errors that become exit codes must reach the command line, whatever library lies between."""

import pickle
from dataclasses import dataclass

import pytest
from pydantic import TypeAdapter

from shards.errors import StorageError, TransientError, UnreachableError, UserError, WillNotSucceedError
from shards.storage.s3_client import BadAnswerError


@dataclass(frozen=True)
class Refusing:
    size: int

    def __post_init__(self) -> None:
        raise UserError(f"size is {self.size}")


KINDS = [UserError, UnreachableError, TransientError, StorageError, BadAnswerError, WillNotSucceedError]


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_none_of_the_kinds_that_libraries_catch(kind: type[Exception]) -> None:
    assert not issubclass(kind, ValueError | TypeError | OSError | AssertionError)


def test_a_refusal_passes_through_pydantic_unchanged() -> None:
    with pytest.raises(UserError, match="size is 3"):
        TypeAdapter(Refusing).validate_python({"size": 3})


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_of_one_family(kind: type[Exception]) -> None:
    assert sum(issubclass(kind, family) for family in (UserError, TransientError, WillNotSucceedError)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_they_come_whole_from_a_worker_process(kind: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(kind("s3://b/x is away")))  # noqa: S301  # as multiprocessing does
    assert (type(error), str(error)) == (kind, "s3://b/x is away")

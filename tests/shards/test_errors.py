"""Errors that become exit codes must reach the command line, whatever library lies between."""

import pickle
import traceback
from pathlib import Path

import pytest

from shards.dataset import open_dataset
from shards.errors import (
    ImageRefusedError,
    StorageError,
    TransientError,
    UnreachableError,
    UserError,
    WillNotSucceedError,
)
from shards.storage.objects import MissingObjectError
from shards.storage.s3_client import BadAnswerError
from tests.rigs.hostile import HOSTILE, assert_harmless

KINDS = [UserError, UnreachableError, TransientError, StorageError, BadAnswerError, WillNotSucceedError]


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_none_of_the_kinds_that_libraries_catch(kind: type[Exception]) -> None:
    assert not issubclass(kind, ValueError | TypeError | OSError | AssertionError)


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_of_one_family(kind: type[Exception]) -> None:
    assert sum(issubclass(kind, family) for family in (UserError, TransientError, WillNotSucceedError)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_they_come_whole_from_a_worker_process(kind: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(kind("s3://b/x is away")))  # noqa: S301  # as multiprocessing does
    assert (type(error), str(error)) == (kind, "s3://b/x is away")


@pytest.mark.parametrize("kind", [*KINDS, ImageRefusedError, MissingObjectError])
def test_their_text_holds_no_control_character(kind: type[Exception]) -> None:
    """A user's own loop prints them, and nothing else escapes what it prints."""
    said = str(kind(f"class {HOSTILE.replace(chr(10), ' ')} is unknown"))
    assert_harmless(said)
    assert "\\x1b" in said


def test_a_loop_of_ones_own_may_print_what_it_catches(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        open_dataset(f"{tmp_path}/\x1b]0;owned\x07")
    assert "\x1b" not in str(caught.value)
    assert not any("\x1b" in line for line in traceback.format_exception(caught.value))

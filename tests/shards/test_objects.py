"""Paths of objects, and the error for one that is not there."""

import pickle

import pytest

from shards.objects import MissingObjectError, checked_path


@pytest.mark.parametrize("path", ["a", "a/b.tar", "a b/ü.json", "..a/b..", "a/.hidden"])
def test_plain_relative_paths_are_taken_as_they_are(path: str) -> None:
    assert checked_path(path) == path


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "names nothing"),
        ("/etc/passwd", "absolute"),
        ("../x", "leads out"),
        ("a/../../x", "leads out by a detour"),
        ("a/./b", "second spelling of a/b"),
        ("a//b", "second spelling of a/b"),
        ("a\0b", "no file system has it"),
    ],
)
def test_paths_that_could_lead_out_are_refused(path: str, why: str) -> None:
    with pytest.raises(ValueError, match="not a plain relative path"):
        checked_path(path)


def test_missing_object_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(MissingObjectError("a/b", url="s3://x")))  # noqa: S301
    assert error.path == "a/b"

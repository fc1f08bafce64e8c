"""What only a folder has: temporary names, leftovers of killed writers, permissions."""

import errno
import os
from pathlib import Path

import pytest

from shards.errors import UserError
from shards.local import TEMPORARY_PREFIX, LocalStore


def test_leftovers_are_no_objects_and_can_be_discarded(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.write("a/x", b"1")
    leftover = tmp_path / "a" / f"{TEMPORARY_PREFIX}x.0011"
    leftover.write_bytes(b"half")
    assert list(store.list()) == ["a/x"]
    store.discard_unfinished()
    assert not leftover.exists()
    assert store.read("a/x") == b"1"


def test_a_file_in_the_way_of_a_folder_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="cannot write"):
        LocalStore(str(tmp_path / "file")).write("x", b"")


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        pytest.param("/proc/nope", "No such file", id="a file system that takes no folders"),
        pytest.param("name" * 100, "File name too long", id="a name that is too long"),
        pytest.param("loop/x", "Too many levels", id="a link to itself"),
    ],
)
def test_a_folder_that_can_not_be_made_is_the_users_mistake(tmp_path: Path, folder: str, why: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match=f"cannot write .*{folder}/x: {why}.*; use a folder"):
        LocalStore(str(tmp_path / folder)).write("x", b"")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_a_fault_that_may_pass_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        LocalStore(str(tmp_path / "a")).write("x", b"")


def test_a_folder_is_not_an_object(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.write("a/x", b"1")
    assert not store.exists("a")
    assert not LocalStore(str(tmp_path / "none")).exists("a/x")


def test_deleting_leaves_no_empty_folders(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "store"))
    store.write("a/b/one", b"1")
    store.write("a/two", b"2")
    store.delete("a/b/one")
    assert not (tmp_path / "store" / "a" / "b").exists()
    assert list(store.list()) == ["a/two"]
    store.delete("a/two")
    assert (tmp_path / "store").is_dir()  # the root stays
    assert not (tmp_path / "store" / "a").exists()
    store.delete("a/two")  # deleting what is gone is no error

"""What only a folder has: temporary names, leftovers of killed writers, permissions."""

import errno
import os
from functools import partial
from pathlib import Path

import pytest

from shards.errors import InvalidDataError, UserError
from shards.storage.local import TEMPORARY_PREFIX, LocalStore
from tests.rigs.vanishing import vanishes_when_listed


def test_leftovers_are_no_objects_and_can_be_discarded(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.write("a/x", b"1")
    leftover = tmp_path / "a" / f"{TEMPORARY_PREFIX}x.0123456789abcdef"
    leftover.write_bytes(b"half")
    assert list(store.list()) == ["a/x"]
    notes = tmp_path / "a" / f"{TEMPORARY_PREFIX}notes"
    notes.write_bytes(b"someone's own")
    store.discard_unfinished(lambda path: path == "b/x")
    assert leftover.exists()
    store.discard_unfinished(lambda path: path == "a/x")
    assert not leftover.exists()
    assert notes.exists()
    assert store.read("a/x") == b"1"


def test_a_folder_that_is_removed_meanwhile_has_no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{TEMPORARY_PREFIX}x.0123456789abcdef").touch()
    is_gone = vanishes_when_listed(monkeypatch, tmp_path / "a")
    LocalStore(str(tmp_path)).discard_unfinished()
    assert is_gone()
    assert list((tmp_path / "b").iterdir()) == []


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


@pytest.mark.parametrize(("name", "why"), [("a" * 300, "File name too long"), ("loop", "Too many levels of symbolic")])
def test_a_path_that_no_file_can_have_is_said(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    store = LocalStore(str(tmp_path))
    for read in (store.read, store.open_read, partial(store.read_range, first=0, end=1)):
        with pytest.raises(InvalidDataError, match=f"{name} cannot be opened: {why}"):
            read(name)


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


def test_names_that_are_no_unicode_are_listed_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    names = [b"a", b"\xc3\xa9", b"\xee\x80\x80", b"\xff"]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_bytes(name)
    store = LocalStore(str(tmp_path))
    assert [os.fsencode(path) for path in store.list()] == names
    assert [size for _, size in store.list_sizes()] == [1, 2, 3, 1]
    assert [store.read(path) for path in store.list()] == names


def test_only_files_are_listed_links_to_them_included(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "store"))
    store.write("a/x", b"1")
    (tmp_path / "store" / "empty").mkdir()
    os.mkfifo(tmp_path / "store" / "fifo")
    for name, target in (("dead", "nowhere"), ("itself", "itself"), ("link", "a"), ("linked", "a/x")):
        (tmp_path / "store" / name).symlink_to(target)
    assert list(store.list()) == ["a/x", "link/x", "linked"]
    assert list(store.list_sizes()) == [("a/x", 1), ("link/x", 1), ("linked", 1)]


def test_a_file_that_goes_while_listed_is_left_out(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    for name in ("a", "b", "c"):
        store.write(name, b"1")
    listing = store.list_sizes()
    assert next(listing) == ("a", 1)
    store.delete("b")
    assert list(listing) == [("c", 1)]

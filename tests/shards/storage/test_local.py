"""A folder as a store: whole files, disks that fail for a while, and links in circles."""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path

import pytest

from shards.errors import InvalidDataError, UserError
from shards.sources.found_files import find_files
from shards.sources.tree import list_images
from shards.storage.local import (
    MOST_DEPTH,
    MOST_WAYS,
    TEMPORARY_PREFIX,
    CountedFile,
    LocalStore,
    read_again,
    read_exactly,
)
from shards.storage.objects import MissingObjectError, Traffic, TrafficCounts
from shards.storage.ranges import ReusedMemory
from shards.storage.retries import ReadStoppedError, RetryConfig
from shards.store import open_store
from tests.rigs.vanishing import vanishes_when_listed

Walk = Callable[[Path], list[str]]


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


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RetryConfig(backoff_seconds=0.001, most_backoff_seconds=0.001)
    monkeypatch.setattr("shards.storage.local.RETRIES", config)


def failing(monkeypatch: pytest.MonkeyPatch, faults: Iterator[int]) -> None:
    """The next reads of a place in a file have these faults."""
    pread = os.pread

    def faulty(descriptor: int, count: int, offset: int) -> bytes:
        if fault := next(faults, 0):
            raise OSError(fault, os.strerror(fault))
        return pread(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", faulty)


@pytest.mark.parametrize("fault", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_for_a_while_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    store = LocalStore(str(tmp_path))
    store.write("x", b"0123456789")
    failing(monkeypatch, iter([fault, fault]))
    assert store.read_range("x", 2, 5) == b"234"
    counts = store.traffic.counts()
    assert (counts.requests, counts.bytes, counts.retries) == (1, 3, 2)


def test_memory_is_filled_whatever_a_read_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two bytes at a time, and a fault between them."""
    store = LocalStore(str(tmp_path))
    store.write("x", b"0123456789")
    preadv, faults = os.preadv, iter([0, errno.EIO, 0, 0, errno.ESTALE])

    def few(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fault := next(faults, 0):
            raise OSError(fault, os.strerror(fault))
        return preadv(descriptor, [buffers[0][:2]], offset)

    monkeypatch.setattr(os, "preadv", few)
    assert bytes(store.read_into("x", 1, 8, ReusedMemory().take)) == b"1234567"
    counts = store.traffic.counts()
    assert (counts.requests, counts.bytes, counts.retries) == (1, 7, 2)
    with pytest.raises(EOFError, match=r"bytes 4\.\.11 asked, it ends at 10"):
        store.read_into("x", 4, 12, ReusedMemory().take)


def test_the_fault_itself_is_raised_once_the_deadline_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RetryConfig(backoff_seconds=0.001, most_backoff_seconds=0.001, deadline_seconds=1.0)
    monkeypatch.setattr("shards.storage.local.RETRIES", config)
    store = LocalStore(str(tmp_path))
    store.write("x", b"0123456789")
    failing(monkeypatch, repeat(errno.EIO))
    with pytest.raises(OSError, match="Input/output error") as caught:
        store.read_range("x", 2, 5)
    assert caught.value.errno == errno.EIO
    assert store.traffic.counts().retries > 2


def test_other_faults_are_raised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(str(tmp_path))
    store.write("x", b"0123456789")
    failing(monkeypatch, iter([errno.EACCES]))
    with pytest.raises(PermissionError):
        store.read_range("x", 2, 5)
    assert store.traffic.counts().retries == 0


def test_waiting_for_a_disk_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.storage.local.RETRIES", RetryConfig(backoff_seconds=100.0))
    stop = threading.Event()

    def fail() -> bytes:
        stop.set()
        raise OSError(errno.EIO, "it fails")

    with pytest.raises(ReadStoppedError):
        read_again("x", fail, traffic=Traffic(), stop=stop)


def test_a_file_ends_where_it_ends(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    with CountedFile(tmp_path / "x") as file:
        assert read_exactly(file.fileno(), 8, 20) == b"89"
        assert read_exactly(file.fileno(), 20, 30) == b""


def test_every_way_to_read_is_counted(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.write("x", b"0123456789")
    assert store.read("x") == b"0123456789"
    assert store.traffic.counts().seconds > 0
    assert store.read_range("x", 2, 5) == b"234"
    for count in (3, -1):
        with store.open_read("x") as file:
            assert file.read(count) == b"0123456789"[: count if count > 0 else None]
    counts = store.traffic.counts()
    assert (counts.requests, counts.bytes) == (4, 10 + 3 + 10 + 10), "a stream fills its buffer"
    with pytest.raises(MissingObjectError):
        store.open_read("y")


def test_counters_of_ones_own(tmp_path: Path) -> None:
    store, own = LocalStore(str(tmp_path)), Traffic()
    store.write("x", b"0123456789")
    mine = store.with_traffic(own)
    assert mine == store
    mine.write("a/x", b"0123")
    assert mine.read("x") + mine.read("a/x") == b"01234567890123"
    assert store.traffic.counts() == TrafficCounts()
    assert (own.counts().requests, own.counts().bytes) == (2, 14)


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    (tmp_path / "ten").write_bytes(b"0123456789")
    assert store.read("ten", most_bytes=10) == b"0123456789"
    with pytest.raises(InvalidDataError, match="ten is larger than 9 bytes, the most that"):
        store.read("ten", most_bytes=9)


def test_a_file_that_does_not_say_its_size_is_read_up_to_its_end_or_bound() -> None:
    """Files of /proc have size 0."""
    whole = Path("/proc/self/smaps").read_bytes()
    assert LocalStore("/proc/self").read("status").startswith(b"Name:")
    with pytest.raises(InvalidDataError, match="smaps is larger than"):
        LocalStore("/proc/self").read("smaps", most_bytes=len(whole) // 2)


def of_store(root: Path) -> list[str]:
    return list(open_store(str(root)).list())


def of_images(root: Path) -> list[str]:
    return [path for path, _ in list_images(str(root))]


def of_pattern(root: Path) -> list[str]:
    found = find_files([f"{root}/**/*.jpg"], suffixes=(".jpg",))
    return [path.removeprefix(f"{root}/") for path in found]


WALKS = pytest.mark.parametrize("walk", [of_store, of_images, of_pattern])


@WALKS
def test_a_link_to_its_own_folder_is_not_followed(walk: Walk, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each was followed 40 times, until the system gave up."""
    (tmp_path / "x.jpg").touch()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "y.jpg").touch()
    for name, target in (("here", "."), ("a/up", ".."), ("a/here\x1b[2J", ".")):
        (tmp_path / name).symlink_to(target)
    with caplog.at_level(logging.WARNING):
        assert walk(tmp_path) == ["a/y.jpg", "x.jpg"]
    assert f"{tmp_path}/here" in caplog.text
    assert "leads back to a folder that contains it; it is not followed" in caplog.text
    assert "\x1b" not in caplog.text


@WALKS
def test_links_that_meet_again_and_again_do_not_multiply(walk: Walk, tmp_path: Path) -> None:
    """Of 40 folders, each has two links to the next: a trillion paths."""
    for number in range(40):
        (tmp_path / "all" / str(number)).mkdir(parents=True)
        for name in "ab" if number < 39 else "":
            (tmp_path / "all" / str(number) / name).symlink_to(f"../{number + 1}")
    (tmp_path / "all" / "39" / "x.jpg").touch()
    (tmp_path / "start").symlink_to("all/0")
    begin = time.process_time()
    assert len([path for path in walk(tmp_path) if path.startswith("start/")]) == 0, "reached first in all/"
    assert time.process_time() - begin < 20


@WALKS
def test_several_links_may_lead_to_one_folder(walk: Walk, tmp_path: Path) -> None:
    """As where two classes are one."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x.jpg").touch()
    root = tmp_path / "root"
    root.mkdir()
    for number in range(MOST_WAYS + 2):
        (root / f"{number:02d}").symlink_to(tmp_path / "real")
    assert walk(root) == [f"{number:02d}/x.jpg" for number in range(MOST_WAYS)]


@WALKS
def test_folders_are_nested_to_a_bound(walk: Walk, tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d"] * MOST_DEPTH)
    deep.mkdir(parents=True)
    (deep / "x.jpg").touch()
    assert walk(tmp_path) == ["d/" * MOST_DEPTH + "x.jpg"]
    (deep / "d").mkdir()
    with pytest.raises(UserError, match=f"nested more than {MOST_DEPTH} folders deep; allowed: {MOST_DEPTH}; move it"):
        walk(tmp_path)


def test_a_folder_that_is_removed_meanwhile_is_empty(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        open_store(str(tmp_path)).write(f"{name}/x", b"")
    found = open_store(str(tmp_path)).list()
    assert next(found) == "a/x"
    (tmp_path / "b" / "x").unlink()
    os.rmdir(tmp_path / "b")  # noqa: PTH106
    assert list(found) == ["c/x"]

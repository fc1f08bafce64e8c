"""Results come in order and in bounded memory, and pieces and files of an object have the object's bytes."""

import hashlib
import io
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.storage.ahead import Hold, Pieces, in_order, in_order_within, stored_pieces
from shards.storage.objects import StoreFile
from shards.storage.s3 import PieceFile
from shards.store import open_store

DATA = bytes(range(256)) * 4


@pytest.mark.parametrize(("threads", "window"), [(1, 1), (4, 1), (2, 8), (16, 3)])
def test_results_come_in_order(threads: int, window: int) -> None:
    assert list(in_order(lambda value: value * value, range(50), threads=threads, window=window)) == [
        value * value for value in range(50)
    ]


def test_no_items_give_no_results() -> None:
    assert list(in_order(str, [], threads=2, window=2)) == []


def test_an_error_is_a_value_in_its_place() -> None:
    found = list(in_order(lambda value: 12 // value, [3, 0, 4], threads=2, window=2))
    assert found[0] == 4
    assert isinstance(found[1], ZeroDivisionError)
    assert found[2] == 3


def test_an_interrupt_is_not_a_value() -> None:
    def interrupted(_: int) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(in_order(interrupted, [1], threads=1, window=1))


def test_no_more_than_a_window_is_drawn_ahead() -> None:
    drawn = 0

    def items() -> Iterator[int]:
        nonlocal drawn
        for value in range(100):
            drawn += 1
            yield value

    for taken, value in enumerate(in_order(lambda item: item, items(), threads=4, window=5)):
        assert value == taken
        assert drawn <= taken + 5


def test_items_are_under_way_together() -> None:
    """Four calls that wait for each other end only if they run at the same time."""
    together = threading.Barrier(4, timeout=60)
    assert len([x for x in in_order(lambda _: together.wait(), range(8), threads=4, window=4) if x is not None]) == 8


def test_an_early_end_starts_nothing_more_and_leaves_no_thread() -> None:
    begun: list[int] = []
    with closing(in_order(begun.append, range(1000), threads=1, window=4)) as results:
        next(results)
    assert len(begun) <= 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


def test_large_results_wait_until_there_is_room_for_them() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def read(number: int, hold: Hold) -> int:
        nonlocal now, most
        for part in range(1, 5):
            hold(25 * part)
        with lock:
            now += 1
            most = max(most, now)
        return number

    for expected, number in enumerate(in_order_within(read, range(40), threads=8, most_bytes=250)):
        assert number == expected
        time.sleep(0.002)
        with lock:
            now -= 1
    assert most <= 4  # two, the one that is wanted, and the one that was given last


def test_one_larger_than_all_room_comes_in_its_turn() -> None:
    def read(size: int, hold: Hold) -> int:
        hold(size)
        hold(size)
        return size

    sizes = [5, 1000, 5, 1000, 1000, 0]
    assert list(in_order_within(read, sizes, threads=3, most_bytes=10)) == sizes


def test_whoever_waits_for_room_is_let_go_at_an_early_end() -> None:
    def read(_: int, hold: Hold) -> None:
        hold(100)

    with closing(in_order_within(read, range(100), threads=4, most_bytes=10)) as results:
        next(results)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


class Asked:
    """DATA by range, and which ranges were asked for."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def read_range(self, first: int, end: int) -> bytes:
        self.ranges.append((first, end))
        return DATA[first:end]


@given(
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 300))),
    first=st.integers(0, 500),
    piece_bytes=st.integers(1, 200),
    ahead=st.sampled_from([0, 2]),
    is_hashed=st.booleans(),
)
def test_taken_bytes_are_those_of_the_object(
    moves: list[tuple[bool, int]], first: int, piece_bytes: int, ahead: int, is_hashed: bool
) -> None:
    end, position = 900, first
    digest = hashlib.sha256()
    pieces = Pieces(
        Asked().read_range, first, end, piece_bytes=piece_bytes, ahead=ahead, digest=digest if is_hashed else None
    )
    for is_taken, count in moves:
        assert pieces.position == position
        if is_taken:
            assert pieces.take(count) == DATA[position : min(position + count, end)]
        else:
            pieces.skip(count)
        position = min(position + count, end)
    pieces.skip(end)
    assert (pieces.position, pieces.take(1)) == (end, b"")
    if is_hashed:
        assert digest.digest() == hashlib.sha256(DATA[first:end]).digest()


def test_what_is_skipped_is_not_read() -> None:
    asked = Asked()
    pieces = Pieces(asked.read_range, 0, len(DATA), piece_bytes=64)
    assert pieces.take(10) == DATA[:10]
    pieces.skip(500)
    assert pieces.take(10) == DATA[510:520]
    assert asked.ranges == [(0, 64), (510, 574)]


def test_pieces_are_read_ahead() -> None:
    asked, is_ahead = Asked(), threading.Event()

    def read_range(first: int, end: int) -> bytes:
        data = asked.read_range(first, end)
        if first == 64:
            is_ahead.set()
        return data

    pieces = Pieces(read_range, 0, len(DATA), piece_bytes=64, ahead=3)
    assert pieces.take(10) == DATA[:10]
    assert is_ahead.wait(60), "the second piece is not read before it is taken"
    pieces.close()
    assert sorted(asked.ranges)[:2] == [(0, 64), (64, 128)]
    assert len(asked.ranges) <= 4


def test_an_error_of_reading_is_raised() -> None:
    def broken(first: int, end: int) -> bytes:
        if first:
            raise ConnectionError("gone")
        return DATA[first:end]

    for ahead in (0, 2):
        pieces = Pieces(broken, 0, len(DATA), piece_bytes=64, ahead=ahead)
        assert pieces.take(64) == DATA[:64]
        with pytest.raises(ConnectionError, match="gone"):
            pieces.take(1)


def test_an_object_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(DATA)
    assert stored_pieces(open_store(str(tmp_path)), "object", 3, 700).take(1000) == DATA[3:700]


def test_an_object_of_a_bucket(s3_bucket: str) -> None:
    store = open_store(f"s3://{s3_bucket}/some")
    store.write("object", DATA)
    assert stored_pieces(store, "object", 3, 700).take(1000) == DATA[3:700]


def test_a_stored_object_reads_and_seeks_like_a_file(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.write("x", b"0123456789")
    file, model = StoreFile(store, "x"), io.BytesIO(b"0123456789")
    for offset, whence, size in ((0, 0, 3), (2, 1, 2), (-4, 2, 2), (0, 1, -1), (5, 0, 100), (0, 2, 1)):
        assert file.seek(offset, whence) == model.seek(offset, whence)
        assert file.read(size) == model.read(size)
        assert file.tell() == model.tell()
    assert file.readable()
    assert file.seekable()


def test_pieces_are_one_file() -> None:
    pieces = (piece for piece in (b"", b"012", b"", b"3456789", b""))
    file = io.BufferedReader(PieceFile(pieces), 4)
    assert [file.read(2), file.read(7), file.read(5), file.read(5)] == [b"01", b"2345678", b"9", b""]


def test_closing_ends_the_generator_and_no_more_is_asked_than_needed() -> None:
    events = []

    def pieces() -> Generator[bytes, None, None]:
        try:
            for number in range(10):
                events.append(number)
                yield bytes(100)
        finally:
            events.append(-1)

    with PieceFile(pieces()) as file:
        assert file.read(150) == bytes(100)  # unbuffered: a piece at a time
        assert file.read(50) == bytes(50)
    assert events == [0, 1, -1]

"""Objects read in pieces, and as files: whatever is taken and skipped, the bytes are those of the object."""

import hashlib
import io
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.storage.pieces import Pieces, stored_pieces
from shards.storage.s3 import PieceFile
from shards.storage.store_file import StoreFile
from shards.store import open_store

DATA = bytes(range(256)) * 4


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

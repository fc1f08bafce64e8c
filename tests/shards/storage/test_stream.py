"""Pieces read as one file."""

import io
from collections.abc import Generator

from shards.storage.stream import PieceFile


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

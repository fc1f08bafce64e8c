"""TFRecords are read one by one; what is damaged is refused, and nothing is read or allocated that the file lacks."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shards.errors import ImageRefusedError
from shards.storage.pieces import Pieces, stored_pieces
from shards.store import open_store
from shards.tfds.crc32c import crc32c
from shards.tfds.records import DamagedShardError, read_records
from tests.rigs.prepared import framed, masked


def read(data: bytes, folder: Path, *, skip: int = 0, most_bytes: int = 1000) -> list[tuple[int, bytes | str]]:
    """Offset and data, or refusal, of every record."""
    (folder / "a.tfrecord").write_bytes(data)
    pieces: Pieces = stored_pieces(open_store(str(folder)), "a.tfrecord", 0, len(data))
    found = read_records(pieces, skip=skip, most_bytes=most_bytes)
    return [(one.offset, str(one.data) if isinstance(one.data, ImageRefusedError) else one.data) for one in found]


@pytest.mark.parametrize(
    ("data", "checksum"),
    [  # RFC 3720, appendix B.4, and the check value of the CRC catalogue
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_known_checksums(data: bytes, checksum: int) -> None:
    assert crc32c(data) == checksum


@pytest.mark.parametrize("length", [63, 64, 66, 1023, 1024, 1025, 1027, 1028, 65_535, 65_536, 65_539, 70_000])
def test_long_data_has_the_checksum_of_a_loop_over_its_bytes(length: int) -> None:
    data = np.random.default_rng(length).bytes(length)
    crc = crc32c(data)
    assert ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == masked(data)


def test_records_after_the_first_ones(tmp_path: Path) -> None:
    data = framed(b"one") + framed(b"") + framed(b"three" * 100)
    # 12 bytes before the data, 4 after it.
    assert read(data, tmp_path) == [(12, b"one"), (31, b""), (47, b"three" * 100)]
    assert read(data, tmp_path, skip=2) == [(47, b"three" * 100)]
    assert read(data, tmp_path, skip=3) == read(data, tmp_path, skip=9) == read(b"", tmp_path) == []


def test_one_record_is_refused_and_the_next_is_read(tmp_path: Path) -> None:
    wrong = framed(b"two")[:-5] + b"x" + framed(b"two")[-4:]
    data = framed(b"one") + wrong + framed(b"3" * 1001) + framed(b"four")
    assert read(data, tmp_path) == [
        (12, b"one"),
        (31, "damaged TFRecord: the checksum of its data is wrong"),
        (50, "too large: 1001 bytes, allowed: 1000"),
        (1067, b"four"),
    ]


def length_said(number: int) -> Callable[[bytes], bytes]:
    """Another length in a record, with the right checksum."""
    told = struct.pack("<Q", number)
    return lambda record: told + struct.pack("<I", masked(told)) + record[12:]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (length_said(1 << 60), "record 1 is cut off: it has 1152921504606846976 bytes, and 6 are left in the file"),
        (length_said((1 << 64) - 1), "record 1 is cut off: it has 18446744073709551615 bytes, and 6 are left"),
        (length_said(7), "record 1 is cut off: it has 7 bytes, and 6 are left"),
        (lambda record: record[:-1], "record 1 is cut off: it has 6 bytes, and 5 are left"),
        (lambda record: record[:13], "record 1 is cut off: it has 6 bytes, and 0 are left"),
        (lambda record: record[:11], "record 1 is cut off: the file ends within its length"),
        (lambda record: b"\x07" + record[1:], "the checksum of the length of record 1 is wrong"),
        (lambda _: b"\x89PNG" * 8, "the checksum of the length of record 1 is wrong; this is no TFRecord file"),
    ],
)
def test_the_rest_of_a_damaged_file_is_not_read(edit: Callable[[bytes], bytes], reason: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedShardError, match=reason):
        read(framed(b"one") + edit(framed(b"twotwo")), tmp_path)

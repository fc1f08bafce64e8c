"""Datasets that TFDS has prepared: found by name and version, read record by record, and checked before believed."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import ImageRefusedError, InvalidDataError, UserError
from shards.sources.tfds import (
    DatasetKey,
    Feature,
    ShardSlice,
    Span,
    crc32c,
    open_prepared,
    read_features,
    read_records,
)
from shards.storage.ahead import Pieces, stored_pieces
from shards.store import open_store
from tests.rigs.prepared import Value, example, framed, masked, varint, write_prepared

SVHN = DatasetKey(name="svhn_cropped", majors=(3,))
SPLITS = {"train": [b"x"] * 7, "test": [b"x"] * 2}
ALL: dict[str, list[Value]] = {
    "image": [b"png"],
    "label": [7],
    "box": [0.5, -2.0],
    "none": [],
    "ids": [0, -1, 2**63 - 1, -(2**63)],
}
FLOATS = st.floats(width=32, allow_nan=False)


def write(root: Path, version: str = "3.1.0", info: dict[str, object] | None = None) -> Path:
    return write_prepared(root, "svhn_cropped", SPLITS, version=version, info=info)


def test_slices_of_a_split_go_over_its_shards(tmp_path: Path) -> None:
    folder = write(tmp_path)
    prepared = open_prepared(str(tmp_path), SVHN)
    assert (prepared.num_examples("train"), prepared.num_examples("test")) == (7, 2)
    path = "svhn_cropped/3.1.0/svhn_cropped-train.tfrecord-{:05d}-of-00003"  # the shards have 2, 2 and 3 examples
    whole = [
        ShardSlice(path=path.format(number), first=0, count=length, length=length)
        for number, length in enumerate((2, 2, 3))
    ]
    assert list(prepared.slices("train", 0, 7)) == whole
    assert list(prepared.slices("train", 1, 5)) == [
        ShardSlice(path=path.format(0), first=1, count=1, length=2),
        whole[1],
        ShardSlice(path=path.format(2), first=0, count=1, length=3),
    ]
    assert list(prepared.slices("train", 4, 4)) == []
    in_folder = open_prepared(str(folder), SVHN)
    assert [one.path for one in in_folder.slices("test", 0, 1)] == ["svhn_cropped-test.tfrecord-00001-of-00003"]


def test_the_newest_version_that_is_accepted_is_taken(tmp_path: Path) -> None:
    for version in ("3.0.0", "3.10.0", "3.9.1", "4.0.0", "2.0.0"):
        write(tmp_path, version)
    assert open_prepared(f"{tmp_path}/", SVHN).folder == "svhn_cropped/3.10.0"


def test_names_of_classes(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert open_prepared(str(tmp_path), SVHN).class_names("label") == ()
    (folder / "label.labels.txt").write_text("zero\n one \n\n")
    assert open_prepared(str(tmp_path), SVHN).class_names("label") == ("zero", "one")
    (folder / "label.labels.txt").write_bytes(b"\xff\n")
    with pytest.raises(InvalidDataError, match=r"label\.labels\.txt is not UTF-8"):
        open_prepared(str(tmp_path), SVHN).class_names("label")


def test_one_message_if_it_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--source\.root is missing; give the data folder of TensorFlow Datasets"):
        open_prepared("", SVHN)
    with pytest.raises(UserError, match=r"has no svhn_cropped/VERSION/dataset_info\.json; .* tfds build svhn_cropped"):
        open_prepared(str(tmp_path), SVHN)
    write(tmp_path, "2.0.0")
    with pytest.raises(UserError, match=r"has only version 2\.0\.0; wanted: version 3\.\*\.\*"):
        open_prepared(str(tmp_path), SVHN)


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


def values(data: bytes, feature: Feature) -> list[Value]:
    """The values, spans as their bytes."""
    return [data[value.begin : value.end] if isinstance(value, Span) else value for value in feature]


@pytest.mark.parametrize("is_packed", [True, False])
def test_values_of_every_kind(is_packed: bool) -> None:
    data = example(ALL, is_packed=is_packed)
    found = read_features(data, [*ALL, "missing"])
    assert {name: values(data, feature) for name, feature in found.items()} == ALL
    assert list(read_features(data, ["label"])) == ["label"], "only what is asked for"


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(FLOATS), st.lists(st.binary()), st.booleans())
def test_all_values_come_back(ints: list[int], floats: list[float], texts: list[bytes], is_packed: bool) -> None:
    said: dict[str, list[Value]] = {"i": [*ints], "f": [*floats], "b": [*texts]}
    data = example(said, is_packed=is_packed)
    assert {name: values(data, found) for name, found in read_features(data, ["i", "f", "b"]).items()} == said


def field(number: int, content: bytes, *, wire_type: int = 2) -> bytes:
    length = varint(len(content)) if wire_type == 2 else b""
    return varint(number << 3 | wire_type) + length + content


def feature(content: bytes, *, name: bytes = b"x") -> bytes:
    """An Example with one feature of this content."""
    return field(1, field(1, field(1, name) + field(2, content)))


def test_unknown_fields_are_skipped() -> None:
    known = field(1, b"x") + field(2, field(3, field(1, b"\x05")))
    unknown = field(9, b"y") + field(8, bytes(8), wire_type=1) + field(7, bytes(4), wire_type=5) + b"\x30\xff\x01"
    data = unknown + field(1, unknown + field(1, unknown + known))
    assert read_features(data, ["x"]) == {"x": (5,)}

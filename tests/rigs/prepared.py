"""Datasets in the form that TensorFlow Datasets (TFDS) writes, made from its formats' descriptions alone.

TFRecord: `tensorflow/core/lib/io/record_writer.h`. Example: `tensorflow/core/example/feature.proto`.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

Value = bytes | int | float
Example = Mapping[str, Sequence[Value]]
TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"


def write_prepared(
    root: Path,
    name: str,
    splits: Mapping[str, Sequence[bytes]],
    *,
    num_shards: int = 3,
    version: str = "3.0.0",
    config: str = "",
    info: Mapping[str, object] | None = None,
) -> Path:
    """Writes a dataset of these records below TFDS's data folder `root`; returns its own folder. `info`: what
    dataset_info.json says instead."""
    folder = root / name / config / version
    folder.mkdir(parents=True)
    told, as_records = [], {record: framed(record) for records in splits.values() for record in records}
    for split, records in splits.items():
        lengths = []
        for number in range(num_shards):
            shard = records[len(records) * number // num_shards : len(records) * (number + 1) // num_shards]
            path = folder / f"{name}-{split}.tfrecord-{number:05d}-of-{num_shards:05d}"
            path.write_bytes(b"".join(as_records[record] for record in shard))
            lengths.append(str(len(shard)))
        told.append({"filepathTemplate": TEMPLATE, "name": split, "shardLengths": lengths, "numBytes": "1"})
    about = {"name": name, "version": version, "fileFormat": "tfrecord", "splits": told}
    about |= {"configName": config} if config else {}
    (folder / "dataset_info.json").write_text(json.dumps(about | dict(info or {})))
    return folder


def framed(data: bytes) -> bytes:
    """A TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data))


def masked(data: bytes) -> int:
    """The checksum of a TFRecord: CRC-32C, bit by bit for each value of a byte, then masked."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ 0x82F63B78 * (byte & 1)
    return byte


TABLE = [_entry(byte) for byte in range(256)]


def example(features: Example, *, is_packed: bool = True) -> bytes:
    """A serialized tf.train.Example. A feature without values has no list, unless all its values are numbers."""
    entries = b"".join(
        _field(1, _field(1, name.encode()) + _field(2, _feature(values, is_packed=is_packed)))
        for name, values in features.items()
    )
    return _field(1, entries)


def _feature(values: Sequence[Value], *, is_packed: bool) -> bytes:
    if not values:
        return b""
    if isinstance(values[0], bytes):
        return _field(1, b"".join(_field(1, value) for value in values if isinstance(value, bytes)))
    if isinstance(values[0], float):
        floats = [struct.pack("<f", value) for value in values]
        return _field(2, _field(1, b"".join(floats)) if is_packed else b"".join(b"\x0d" + one for one in floats))
    numbers = [varint(int(value) % (1 << 64)) for value in values]
    return _field(3, _field(1, b"".join(numbers)) if is_packed else b"".join(b"\x08" + one for one in numbers))


def _field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    """A number of the wire format, 7 bits per byte."""
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])

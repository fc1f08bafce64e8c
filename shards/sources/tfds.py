"""Reads datasets that TFDS has prepared: NAME[/CONFIG]/VERSION with dataset_info.json and shards of TFRecords.

A split's examples are ordered by shard, then by their place in the shard: `train[:800]` in TFDS's notation means the
first 800 of all shards together (`tensorflow_datasets/core/splits.py` and `core/utils/shard_utils.py`).

A TFRecord file is a sequence of records without a header or an index (TensorFlow's `record_writer.h`). Each record is
the length (uint64, little-endian), its masked CRC-32C (uint32), the data, and the data's masked CRC-32C (uint32).

A record is a `tf.train.Example`, a map from names to lists of bytes, floats or integers. It is encoded as a protocol
buffer (https://protobuf.dev/programming-guides/encoding), of which this file reads what `example.proto` and
`feature.proto` of TensorFlow need. The messages have a fixed depth, so no recursion is needed, and only the requested
features are decoded.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shards.config_values import shown_value
from shards.errors import ImageRefusedError, InvalidDataError, UserError
from shards.files.typed_json import parse_json
from shards.output.terminal import printable_name
from shards.storage.ahead import Pieces
from shards.store import MissingObjectError, Store, open_store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INFO_PATH = "dataset_info.json"
_MOST_INFO_BYTES = 64 << 20
_MOST_NAMES_BYTES = 4 << 20
_MOST_SHARDS, _MOST_EXAMPLES = 100_000, 1 << 40
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})")
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_NUMBER = re.compile(r"\d{1,13}")
_POLYNOMIAL, _ALL_ONES, _MASK_DELTA = 0x82F63B78, 0xFFFFFFFF, 0xA282EAD8
_BLOCK_BYTES = 1024
_BLOCKS_AT_ONCE = 64  # `_after_group` takes an int64 index for each byte, eight times the data's memory
_FEW_BYTES = 64  # below this, a loop over the bytes is faster
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size + _CRC.size
AROUND_BYTES = HEADER_BYTES + _CRC.size
_VARINT, _FIXED64, _WITH_LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_MOST_FEATURES = 1000
_MOST_VALUES = 1 << 16
_MOST_VARINT_BYTES = 10


@dataclass(frozen=True, kw_only=True)
class DatasetKey:
    """The name that TFDS gives a dataset, its configuration (empty: none), and the major versions to accept.

    TFDS gives a new major version to a dataset whose examples or order change.
    """

    name: str
    config: str = ""
    majors: tuple[int, ...]

    @property
    def path(self) -> str:
        """The dataset's folder below TFDS's data folder."""
        return f"{self.name}/{self.config}" if self.config else self.name

    @property
    def versions(self) -> str:
        """The accepted versions, for a message."""
        return " and ".join(f"{major}.*.*" for major in self.majors)


@dataclass(frozen=True, kw_only=True)
class ShardSlice:
    """`count` examples of a shard, beginning at number `first`. The shard has `length` examples."""

    path: str
    first: int
    count: int
    length: int


@dataclass(frozen=True, kw_only=True)
class PreparedDataset:
    """A dataset that TFDS has prepared in `folder` of a store. `shard_lengths`: the lengths of each split's shards, in
    order."""

    store: Store
    folder: str
    key: DatasetKey
    shard_lengths: dict[str, tuple[int, ...]]

    @property
    def where(self) -> str:
        """The dataset's URL and folder, for a message."""
        return "/".join(filter(None, (self.store.url, self.folder)))

    def num_examples(self, split: str) -> int:
        """Returns the number of examples of a split. Raises UserError if there is no split with this name."""
        if split not in self.shard_lengths:
            found = ", ".join(self.shard_lengths) or "none"
            raise UserError(f"{self.where} has no split {split!r}, but {printable_name(found)}; prepare it again")
        return sum(self.shard_lengths[split])

    def slices(self, split: str, first: int, end: int) -> Iterator[ShardSlice]:
        """Yields the slices of shards that together are examples first..end-1 of a split."""
        lengths, begin = self.shard_lengths[split], 0
        for number, length in enumerate(lengths):
            low, high = max(first, begin), min(end, begin + length)
            if low < high:
                name = f"{self.key.name}-{split}.tfrecord-{number:05d}-of-{len(lengths):05d}"
                path = f"{self.folder}/{name}" if self.folder else name
                yield ShardSlice(path=path, first=low - begin, count=high - low, length=length)
            begin += length

    def class_names(self, feature: str) -> tuple[str, ...]:
        """Returns the class names of a label, or () if TFDS has written none."""
        name = f"{feature}.labels.txt"
        try:
            data = self.store.read(f"{self.folder}/{name}" if self.folder else name, most_bytes=_MOST_NAMES_BYTES)
            return tuple(line.strip() for line in data.decode().split("\n") if line.strip())
        except MissingObjectError:
            return ()
        except UnicodeDecodeError as error:
            raise InvalidDataError(f"{self.where}/{name} is not UTF-8: {error}; prepare the dataset again") from error


def open_prepared(root: str, key: DatasetKey) -> PreparedDataset:
    """Opens a dataset. `root` is TFDS's data folder, or the dataset's own folder with a dataset_info.json. If there are
    several versions, takes the newest that `key` accepts. Raises UserError if there is no such dataset."""
    if not root:
        raise UserError(
            "--source.root is missing; give the data folder of TensorFlow Datasets (often ~/tensorflow_datasets), or "
            f"the dataset's own folder in it, {key.path}/VERSION"
        )
    store = open_store(root)
    folder = "" if store.exists(INFO_PATH) else _newest_folder(store, key)
    path = f"{folder}/{INFO_PATH}" if folder else INFO_PATH
    where = f"{store.url}/{path}"
    try:
        info = parse_json(store.read(path, most_bytes=_MOST_INFO_BYTES))
        if not isinstance(info, dict):
            raise ValueError(f"it is {shown_value(info)}, not an object")
        _check_name(info, key, where)
        return PreparedDataset(store=store, folder=folder, key=key, shard_lengths=_shard_lengths(info))
    except ValueError as error:
        raise InvalidDataError(f"{where} is not a description of a dataset: {error}; prepare it again") from error


def _newest_folder(store: Store, key: DatasetKey) -> str:
    found: dict[tuple[int, ...], str] = {}
    others = set()
    for path in store.list(key.path):
        folder, _, name = path.rpartition("/")
        version = _VERSION.fullmatch(folder.removeprefix(f"{key.path}/"))
        if name != INFO_PATH or not version:
            continue
        numbers = tuple(map(int, version.groups()))
        if numbers[0] in key.majors:
            found[numbers] = folder
        else:
            others.add(version[0])
    if not found:
        there = f"only version {', '.join(sorted(others))}" if others else f"no {key.path}/VERSION/{INFO_PATH}"
        raise UserError(
            f"--source.root {store.url!r} has {there}; wanted: version {key.versions}, which TFDS makes with "
            f"tfds build {key.path} --data_dir {store.url}"
        )
    return found[max(found)]


def _check_name(info: dict[str, Any], key: DatasetKey, where: str) -> None:
    """Raises UserError if the dataset, its version or its file format is not the wanted one."""
    version = _VERSION.fullmatch(str(info.get("version", "")))
    said = (info.get("name"), info.get("configName") or "")
    if said != (key.name, key.config) or not version or int(version[1]) not in key.majors:
        found = "/".join(filter(None, map(str, said))) + f":{info.get('version')}"
        raise UserError(
            f"{where} describes {shown_value(found)}; wanted: {key.path} of version {key.versions}; give its folder, "
            "or TFDS's data folder, as --source.root"
        )
    if (kind := info.get("fileFormat") or "tfrecord") != "tfrecord":
        raise UserError(
            f"{where}: the examples are in {shown_value(kind)} files; allowed: tfrecord; write them again with "
            "tfds build --file_format=tfrecord, or convert them with tfds convert_format --out_file_format=tfrecord"
        )


def _shard_lengths(info: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns each split's shard lengths. Raises ValueError if they cannot be right."""
    splits, lengths = info.get("splits"), dict[str, tuple[int, ...]]()
    if not isinstance(splits, list):
        raise ValueError("it has no list of splits")
    for split in splits:
        name = split.get("name") if isinstance(split, dict) else None
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]{1,100}", name) or name in lengths:
            raise ValueError(f"it has a split named {shown_value(name)}")
        if (split.get("filepathTemplate") or _TEMPLATE) != _TEMPLATE:
            template = shown_value(split["filepathTemplate"])
            raise ValueError(f"the files of split {name!r} are named {template}; allowed: {_TEMPLATE}")
        found = split.get("shardLengths", [])
        if not isinstance(found, list) or len(found) > _MOST_SHARDS:
            raise ValueError(f"the shardLengths of split {name!r} are not a list of at most {_MOST_SHARDS}")
        lengths[name] = tuple(_length(item, name) for item in found)
        if sum(lengths[name]) > _MOST_EXAMPLES:
            raise ValueError(f"split {name!r} has {sum(lengths[name])} examples")
    return lengths


def _length(item: Any, split: str) -> int:
    """Returns a number of examples, which may be text, because the JSON of protocol buffers writes int64 as text."""
    text = str(item) if isinstance(item, str | int) and not isinstance(item, bool) else ""
    if not _NUMBER.fullmatch(text) or not text.isascii():
        raise ValueError(f"a shard of split {split!r} has {shown_value(item)} examples")
    return int(text)


def masked_crc32c(data: bytes) -> int:
    """Returns the CRC-32C as a TFRecord stores it: rotated by 15 bits, plus a constant (`crc32c.h` of TensorFlow)."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _ALL_ONES


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C of `data` (RFC 3720, appendix B.4, with the reflected polynomial 0x82F63B78).

    Each byte adds a term that depends only on its value and its distance from the end. So the terms of many bytes are
    looked up together, which checks more than 100 MB per second; a loop over the bytes checks 5 MB per second.
    """
    state = _ALL_ONES
    if len(data) < _FEW_BYTES:
        table = _byte_table()
        for byte in data:
            state = table[(state ^ byte) & 0xFF] ^ state >> 8
        return state ^ _ALL_ONES
    group_bytes = _BLOCKS_AT_ONCE * _BLOCK_BYTES
    for begin in range(0, len(data), group_bytes):
        state = _after_group(state, data[begin : begin + group_bytes])
    return state ^ _ALL_ONES


def _after_group(state: int, group: bytes) -> int:
    """Returns the state after up to _BLOCKS_AT_ONCE blocks. The last block may be short."""
    import numpy as np

    terms, first = _terms()
    row = np.arange(_BLOCK_BYTES) * 256
    values, num_blocks = np.frombuffer(group, np.uint8), len(group) // _BLOCK_BYTES
    # [num_blocks, _BLOCK_BYTES] -> [num_blocks]
    blocks = values[: num_blocks * _BLOCK_BYTES].reshape(num_blocks, _BLOCK_BYTES)
    for term in np.bitwise_xor.reduce(terms.take(row + blocks), axis=1).tolist():
        # The state acts as if its four bytes had been XORed into the first four of the block.
        for number in range(4):
            term ^= first[number][state >> 8 * number & 0xFF]  # noqa: PLW2901
        state = term
    rest = values[num_blocks * _BLOCK_BYTES :].copy()
    if not len(rest):
        return state
    head = min(4, len(rest))
    rest[:head] ^= np.frombuffer(state.to_bytes(4, "little"), np.uint8)[:head]
    return int(np.bitwise_xor.reduce(terms.take(row[-len(rest) :] + rest))) ^ state >> 8 * head


@lru_cache(maxsize=1)
def _terms() -> "tuple[NDArray[np.uint32], list[list[int]]]":
    """Returns uint32[_BLOCK_BYTES * 256]: the term that each value of a byte, at each place of a block, adds to the
    state after the block. Also returns the rows of the first four places."""
    import numpy as np

    table = np.array(_byte_table(), np.uint32)
    terms = np.empty((_BLOCK_BYTES, 256), np.uint32)
    terms[-1] = table
    for place in range(_BLOCK_BYTES - 2, -1, -1):  # one more byte follows than at `place + 1`
        terms[place] = table[terms[place + 1] & 0xFF] ^ terms[place + 1] >> 8
    return terms.reshape(-1), terms[:4].tolist()


@lru_cache(maxsize=1)
def _byte_table() -> tuple[int, ...]:
    """Returns the state after each possible byte, from a state of zero."""
    states = []
    for byte in range(256):
        state = byte
        for _ in range(8):
            state = state >> 1 ^ (_POLYNOMIAL if state & 1 else 0)
        states.append(state)
    return tuple(states)


class DamagedShardError(ValueError):
    """The file is so damaged that no further record can be found."""


@dataclass(frozen=True, kw_only=True)
class TfRecord:
    """The data of a record, or why it cannot be used. `offset` is where the data begins in the file."""

    offset: int
    data: bytes | ImageRefusedError


def read_records(pieces: Pieces, *, skip: int, most_bytes: int) -> Iterator[TfRecord]:
    """Yields the records after the first `skip`. Does not read the data of skipped records, or of records with more
    than `most_bytes`.

    Raises DamagedShardError if a length cannot be right, and the errors of `pieces`.
    """
    number = 0
    while pieces.position < pieces.end:
        length = _next_length(pieces, number)
        offset = pieces.position
        if number < skip:
            pieces.skip(length + _CRC.size)
        elif length > most_bytes:
            pieces.skip(length + _CRC.size)
            yield TfRecord(offset=offset, data=ImageRefusedError(f"too large: {length} bytes, allowed: {most_bytes}"))
        else:
            data = pieces.take(length)
            (expected,) = _CRC.unpack(pieces.take(_CRC.size))
            is_whole = masked_crc32c(data) == expected
            fault = ImageRefusedError("damaged TFRecord: the checksum of its data is wrong")
            yield TfRecord(offset=offset, data=data if is_whole else fault)
        number += 1


def _next_length(pieces: Pieces, number: int) -> int:
    """Reads the length of the next record. Raises DamagedShardError if it is wrong or the file ends within the
    record."""
    header, where = pieces.take(HEADER_BYTES), f"record {number}"
    if len(header) < HEADER_BYTES:
        raise DamagedShardError(f"{where} is cut off: the file ends within its length")
    (length,), (expected,) = _LENGTH.unpack_from(header), _CRC.unpack_from(header, _LENGTH.size)
    if masked_crc32c(header[: _LENGTH.size]) != expected:
        raise DamagedShardError(f"the checksum of the length of {where} is wrong; this is no TFRecord file, or damaged")
    if length > pieces.end - pieces.position - _CRC.size:
        left = max(0, pieces.end - pieces.position - _CRC.size)
        raise DamagedShardError(f"{where} is cut off: it has {length} bytes, and {left} are left in the file")
    return int(length)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A range of bytes in a record, such as a value of a list of bytes."""

    begin: int
    end: int


Feature = tuple[Span, ...] | tuple[float, ...] | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Field:
    """A field of a message. `value` is the value of a varint; `span` is the place of the field's contents."""

    number: int
    wire_type: int
    value: int
    span: Span


def read_features(data: bytes, names: Sequence[str]) -> dict[str, Feature]:
    """Returns the named features that an Example has. Raises ValueError if the Example is damaged, or has one of these
    features twice."""
    wanted, found, num_features = {name.encode(): name for name in names}, dict[str, Feature](), 0
    for features in _submessages(data, Span(begin=0, end=len(data)), 1):
        for entry in _submessages(data, features, 1):
            num_features += 1
            if num_features > _MOST_FEATURES:
                raise ValueError(f"it has more than {_MOST_FEATURES} features")
            key, value = b"", Span(begin=0, end=0)
            for field in _fields(data, entry):
                if field.wire_type == _WITH_LENGTH and field.number == 1:
                    key = data[field.span.begin : field.span.end]
                elif field.wire_type == _WITH_LENGTH and field.number == 2:
                    value = field.span
            if name := wanted.get(key):
                if name in found:
                    raise ValueError(f"it has the feature {name!r} twice")
                found[name] = _values(data, value, name)
    return found


def _values(data: bytes, feature: Span, name: str) -> Feature:
    """Returns all values of a feature, or () if it has no list."""
    kinds = [field for field in _fields(data, feature) if field.wire_type == _WITH_LENGTH]
    if len(kinds) > 1:
        raise ValueError(f"its feature {name!r} has several lists")
    if not kinds:
        return ()
    kind, values = kinds[0].number, list[Span | float | int]()
    for field in _fields(data, kinds[0].span):
        if field.number != 1:
            continue
        values += _of_field(data, field, kind)
        if len(values) > _MOST_VALUES:
            raise ValueError(f"its feature {name!r} has more than {_MOST_VALUES} values")
    return tuple(values)  # type: ignore[return-value]  # a list has values of one kind


def _of_field(data: bytes, field: _Field, kind: int) -> Sequence[Span | float | int]:
    """Returns the values in one field of a list: a single value, or several packed ones."""
    span = field.span
    if kind == _BYTES_LIST and field.wire_type == _WITH_LENGTH:
        return (span,)
    if kind == _FLOAT_LIST and field.wire_type == _FIXED32:
        return struct.unpack_from("<f", data, span.begin)
    if kind == _FLOAT_LIST and field.wire_type == _WITH_LENGTH:
        if (span.end - span.begin) % 4:
            raise ValueError("a packed list of floats has a part of a float")
        return struct.unpack_from(f"<{(span.end - span.begin) // 4}f", data, span.begin)
    if kind == _INT64_LIST and field.wire_type == _VARINT:
        return (_signed(field.value),)
    if kind == _INT64_LIST and field.wire_type == _WITH_LENGTH:
        return tuple(map(_signed, _varints(data, span)))
    raise ValueError(f"a list of kind {kind} has a value of wire type {field.wire_type}")


def _submessages(data: bytes, span: Span, number: int) -> Iterator[Span]:
    for field in _fields(data, span):
        if field.number == number and field.wire_type == _WITH_LENGTH:
            yield field.span


def _fields(data: bytes, span: Span) -> Iterator[_Field]:
    """Yields the fields of the message in a span. Raises ValueError for an unknown wire type, or if a field goes beyond
    the span's end."""
    position = span.begin
    while position < span.end:
        tag, position = _varint(data, position, span.end)
        number, wire_type, value = tag >> 3, tag & 7, 0
        if wire_type == _VARINT:
            value, after = _varint(data, position, span.end)
        elif wire_type == _WITH_LENGTH:
            length, position = _varint(data, position, span.end)
            after = position + length
        elif wire_type in _FIXED_BYTES:
            after = position + _FIXED_BYTES[wire_type]
        else:
            raise ValueError(f"byte {position} is not a field of an Example: wire type {wire_type}")
        if after > span.end or number == 0:
            raise ValueError(f"the field at byte {position} goes beyond the end of its message")
        yield _Field(number=number, wire_type=wire_type, value=value, span=Span(begin=position, end=after))
        position = after


def _varints(data: bytes, span: Span) -> Iterator[int]:
    position = span.begin
    while position < span.end:
        value, position = _varint(data, position, span.end)
        yield value


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Reads an unsigned number with 7 bits per byte, and returns it with the position after it."""
    value = 0
    for number, byte in enumerate(data[position : min(end, position + _MOST_VARINT_BYTES)]):
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position + number + 1
    raise ValueError(f"the number at byte {position} does not end")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value

"""The third phase of packing writes shards. The bytes of a shard depend only on the plan and are the same on every
machine.

The tar is complete or absent, and the index file, which is written after it, commits both. The tar is a plain USTAR
archive without times, users or modes of the machine, and is hashed while it is written. Its headers are made from a
template, 20 times as fast as with tarfile and with the same bytes in every version of Python.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, BinaryIO, cast

import pyarrow as pa
from isal.isal_zlib import crc32

from shards.errors import ImageRefusedError, InvalidDataError, UserError
from shards.images.image_header import ImageHeader
from shards.images.resize import fitted
from shards.index import IndexRow, LeftOut, ShardCommit, index_bytes, read_commit
from shards.manifest import index_path, sha256_hex, shard_path
from shards.packing.config import PackSpec
from shards.packing.deal import SAMPLES_SCHEMA, samples_path, shards_per_file
from shards.packing.plan import Plan
from shards.packing.scan import reader_of
from shards.pool import each_at_once
from shards.sources.entry import ImageBytes
from shards.sources.tar_members import BLOCK_BYTES
from shards.storage.objects import StoreFile
from shards.store import MissingObjectError, Store, open_store
from shards.tables import MOST_ROWS, TableSchema, arrow_faults, open_checked

MOST_NAME_BYTES = 100
MOST_MEMBER_BYTES = 8**11 - 1
# Smaller pieces are buffered, so that a sample takes one or two writes instead of nine.
_HELD_BYTES = 1 << 15
# A header is the name, _MODE_UID_GID, the size, _TIME, the checksum, _TYPE_MAGIC (POSIX.1-1988, ustar).
_MODE_UID_GID = b"0000644\0" + b"0000000\0" * 2
_TIME = b"\0" + b"00000000000\0"
_TYPE_MAGIC = (b"\0 0" + bytes(MOST_NAME_BYTES) + b"ustar\x0000").ljust(
    BLOCK_BYTES - MOST_NAME_BYTES - len(_MODE_UID_GID) - 11 - len(_TIME) - 6, b"\0"
)
# The checksum counts its own eight bytes as spaces. The last two of them are in _TYPE_MAGIC, as NUL and space.
_FIXED_SUM = sum(_MODE_UID_GID) + sum(_TIME) + sum(_TYPE_MAGIC) + 7 * ord(" ")
_ROWS_AT_ONCE = 1 << 16
_JSON = json.JSONEncoder(ensure_ascii=False, sort_keys=True)
_RULES = TableSchema(schema=SAMPLES_SCHEMA)


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """A task: one shard to pack into the dataset at `url`, by the plan whose sha256 is `plan_hash`.

    `samples_sha256`: the sha256 of the samples file that has this shard's rows of the plan.
    """

    url: str
    plan_hash: str
    spec: PackSpec
    shard: int
    samples_sha256: str
    max_quarantined: float


@dataclass(frozen=True, kw_only=True)
class PlannedSample:
    """A row of the plan: the place of a sample, and what the scan found out about its image."""

    slot: int
    position: int
    locator: bytes
    source: str
    ext: str
    height: int
    width: int
    mode: str
    orientation: int
    size: int
    crc32: int
    labels: tuple[int, ...]
    weights: tuple[float, ...]

    def header(self) -> ImageHeader:
        """Returns what the scan found in the image's header."""
        return ImageHeader(
            ext=self.ext, height=self.height, width=self.width, mode=self.mode, orientation=self.orientation
        )


def pack_shard(task: ShardTask) -> int:
    """Writes and commits one shard, unless it is already complete. Returns the number of the shard's samples in the
    plan."""
    store = open_store(task.url)
    _refuse_other_samples(task.url, samples_of_shard(task.shard, task.spec), task.samples_sha256)
    try:
        samples = planned_samples(store, task.shard, samples_per_shard=task.spec.samples_per_shard)
    except ValueError as error:
        path = samples_of_shard(task.shard, task.spec)
        raise InvalidDataError(f"{store.url}/{path} cannot be used: {error}; {_again(store)}") from error
    commit = committed(store, task.plan_hash, task.shard)
    if commit is None or commit.left_out:  # images that were missing may be readable again
        with store.create(shard_path(task.shard)) as file:
            rows, commit = _write_tar(file, store, task, samples)
        store.write(index_path(task.shard), index_bytes(task.shard, rows, commit))
    return len(samples)


def shards_of_part(part: int, num_parts: int, *, num_shards: int) -> range:
    """Returns the shards of one task: a contiguous range of the plan. The lengths of ranges differ by at most one."""
    return range(part * num_shards // num_parts, (part + 1) * num_shards // num_parts)


def unpacked_parts(store: Store, plan: Plan, *, num_parts: int) -> list[int]:
    """Returns the parts of the shards phase that still have a shard of this plan to pack."""
    is_missing = each_at_once(lambda shard: committed(store, plan.hash, shard) is None, range(plan.num_shards))
    return [
        part
        for part in range(num_parts)
        if any(is_missing[shard] for shard in shards_of_part(part, num_parts, num_shards=plan.num_shards))
    ]


class TarWriter:
    """Writes a tar to `file`, member by member. `num_bytes` and `sha256()` cover everything added."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._held = bytearray()
        self.num_bytes = 0

    def add(self, name: str, data: bytes) -> int:
        """Appends one file. Returns the offset of its first data byte in the archive."""
        self._held += header(name, len(data))
        offset = self.num_bytes + BLOCK_BYTES
        if len(data) < _HELD_BYTES:
            self._held += data
        else:
            self._write_held()
            self._write(data)
        num_padding = -len(data) % BLOCK_BYTES
        self._held += bytes(num_padding)
        self.num_bytes = offset + len(data) + num_padding
        if len(self._held) >= _HELD_BYTES:
            self._write_held()
        return offset

    def finish(self) -> None:
        """Writes the end-of-archive marker, two empty blocks, and everything still buffered."""
        self._held += bytes(2 * BLOCK_BYTES)
        self.num_bytes += 2 * BLOCK_BYTES
        self._write_held()

    def sha256(self) -> str:
        """Returns the sha256 of the bytes added so far."""
        self._write_held()
        return self._hash.hexdigest()

    def _write_held(self) -> None:
        self._write(bytes(self._held))
        self._held.clear()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)


def header(name: str, num_bytes: int) -> bytes:
    """Returns the header block of a file. Raises ValueError if name or size do not fit into a plain ustar header."""
    encoded = name.encode()
    if len(encoded) > MOST_NAME_BYTES or not 0 <= num_bytes <= MOST_MEMBER_BYTES:
        sizes = f"name of {len(encoded)} bytes (at most {MOST_NAME_BYTES}), {num_bytes} bytes (to {MOST_MEMBER_BYTES})"
        raise ValueError(f"tar member {name!r} does not fit into a ustar header: {sizes}")
    size = b"%011o" % num_bytes
    checksum = b"%06o" % (_FIXED_SUM + sum(encoded) + sum(size))
    return b"".join((encoded.ljust(MOST_NAME_BYTES, b"\0"), _MODE_UID_GID, size, _TIME, checksum, _TYPE_MAGIC))


def samples_of_shard(shard: int, spec: PackSpec) -> str:
    """Returns the path of the samples file that has a shard's rows of the plan."""
    return samples_path(shard // shards_per_file(spec.samples_per_shard))


@lru_cache(maxsize=256)
def _refuse_other_samples(url: str, path: str, sha256: str) -> None:
    """Raises UserError unless a samples file is the plan's. For this check, each worker process reads the whole file
    once."""
    store = open_store(url)
    try:
        is_the_plans = sha256_hex(store.read(path)) == sha256
    except MissingObjectError:
        raise UserError(f"{store.url}/{path} is missing; {_again(store)}") from None
    if not is_the_plans:
        raise UserError(f"{store.url}/{path} does not match the plan: its sha256 differs; {_again(store)}")


def _again(store: Store) -> str:
    return f"delete {store.url}/plan/plan.json and run --phase plan again"


def committed(store: Store, plan_hash: str, shard: int) -> ShardCommit | None:
    """Returns the commit record of a shard if this plan has finished it and its tar has the right size; otherwise
    None."""
    try:
        commit = read_commit(store.read(index_path(shard)))
        whole = store.size(shard_path(shard)) == commit.tar_bytes
    except (MissingObjectError, ValueError):
        return None
    return commit if whole and commit.plan_hash == plan_hash else None


def planned_samples(store: Store, shard: int, *, samples_per_shard: int) -> list[PlannedSample]:
    """Reads the samples that the plan deals to a shard. Only this shard's row group is read. Raises ValueError if it is
    damaged."""
    file, group = divmod(shard, shards_per_file(samples_per_shard))
    with arrow_faults(), open_checked(StoreFile(store, samples_path(file)), _RULES, most_rows=MOST_ROWS) as opened:
        if not group < len(opened.groups):
            raise ValueError(f"it has {len(opened.groups)} row groups")
        table = opened.read(SAMPLES_SCHEMA.names, rows=_ROWS_AT_ONCE, groups=[group])
    columns = {field.name: _values(table.column(field.name).combine_chunks()) for field in table.schema}
    rows = zip(*columns.values(), strict=True)
    return [PlannedSample(**dict(zip(columns, row, strict=True))) for row in rows]


def _values(column: pa.Array) -> list[Any]:
    """Returns a column as Python values, with lists as tuples (empty for null). This is several times as fast as
    `to_pylist`."""
    if pa.types.is_list(column.type):
        values, offsets = _values(column.values), column.offsets.to_pylist()
        return [tuple(values[begin:end]) for begin, end in pairwise(offsets)]
    if pa.types.is_primitive(column.type):
        return cast("list[Any]", column.to_numpy().tolist())
    return cast("list[Any]", column.to_pylist())


def _write_tar(
    file: BinaryIO, store: Store, task: ShardTask, samples: list[PlannedSample]
) -> tuple[list[IndexRow], ShardCommit]:
    tar, rows, left_out = TarWriter(file), [], []
    locators = [sample.locator.decode("utf-8", "surrogateescape") for sample in samples]
    images = reader_of(store, task.spec).read_many(locators)
    for sample, image in zip(samples, images, strict=True):
        try:
            rows.append(_add(tar, sample, *_stored(sample, image, task.spec)))
        except ImageRefusedError as error:
            left_out.append(LeftOut(position=sample.position, source=sample.source, reason=str(error)))
    _refuse_losses(task, left_out, len(samples))
    data_end = tar.num_bytes
    tar.finish()
    commit = ShardCommit(
        tar_sha256=tar.sha256(),
        tar_bytes=tar.num_bytes,
        data_end=data_end,
        plan_hash=task.plan_hash,
        left_out=tuple(left_out),
    )
    return rows, commit


def _stored(sample: PlannedSample, image: ImageBytes, spec: PackSpec) -> tuple[bytes, ImageHeader, int]:
    """Returns the bytes that go into the shard, their header and their crc32."""
    if not isinstance(image, bytes):
        raise ImageRefusedError(f"unreadable: {image}")
    if len(image) != sample.size or crc32(image) != sample.crc32:
        raise ImageRefusedError("the image has changed since the scan")
    stored, header = fitted(image, sample.header(), spec.resize)
    return stored, header, sample.crc32 if stored is image else crc32(stored)


def _add(tar: TarWriter, sample: PlannedSample, image: bytes, header: ImageHeader, crc32: int) -> IndexRow:
    key = f"{sample.slot:010d}"
    offset = tar.add(f"{key}.{header.ext}", image)
    if len(sample.labels) == 1:
        tar.add(f"{key}.cls", str(sample.labels[0]).encode())
    facts = {
        "height": header.height,
        "labels": sample.labels,
        "mode": header.mode,
        "orientation": header.orientation,
        "source": sample.source,
        "width": header.width,
    }
    if sample.weights:
        facts["weights"] = sample.weights
    tar.add(f"{key}.json", _JSON.encode(facts).encode())
    return IndexRow(
        key=key,
        offset=offset,
        size=len(image),
        ext=header.ext,
        height=header.height,
        width=header.width,
        labels=sample.labels,
        crc32=crc32,
        source=sample.source,
        weights=sample.weights,
        orientation=header.orientation,
    )


def _refuse_losses(task: ShardTask, left_out: list[LeftOut], num_samples: int) -> None:
    # A committed shard counts as packed even without these images, so a source that is briefly unavailable must not
    # empty it.
    if len(left_out) > max(1, task.max_quarantined * num_samples):
        example = f"{left_out[0].source}: {left_out[0].reason}"
        message = f"{len(left_out)} of {num_samples} images of shard {task.shard} are not as scanned ({example})"
        raise UserError(f"{message}; the allowed share is {task.max_quarantined:g}; restore the source")

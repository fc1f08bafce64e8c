"""Checks one shard: compares its tar with its index, and its index with the manifest. Each check yields faults.

The tar is mapped into memory, for random access. A remote tar is copied to a temporary file first.
"""

import hashlib
import io
import json
import mmap
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import numpy as np
from isal.isal_zlib import crc32
from PIL import Image

from shards.images.config import DEFAULT_LIMITS, ImageLimits
from shards.images.damage import jpeg_damage, png_damage
from shards.images.decoding_cost import refuse_costly
from shards.index import IndexRow, ShardCommit, read_index, read_sample_rows
from shards.manifest import Manifest, ShardRecord
from shards.packing.merge import blocks_of_shard
from shards.sample_rows import BlockTable, refuse_places, refuse_rows
from shards.sources.entry import printable
from shards.sources.tar_members import BLOCK_BYTES
from shards.storage.local import open_regular
from shards.storage.temporary import temporary_file
from shards.store import Store

PIECE_BYTES = 8 << 20
Tar = bytes | mmap.mmap


@contextmanager
def mapped_tar(store: Store, path: str) -> Iterator[Tar]:
    """Yields the bytes of a tar, read-only, which are valid inside the block. Raises MissingObjectError, and
    InvalidDataError if the tar is not a regular file."""
    if (local := store.local_path(path)) is not None:
        store.size(path)  # raises MissingObjectError for a missing file
        with open(local, "rb", opener=open_regular) as file:
            yield from _mapped(file)
        return
    with temporary_file() as copy, store.open_read(path) as remote:
        shutil.copyfileobj(remote, copy, PIECE_BYTES)
        copy.flush()
        yield from _mapped(copy)


def _mapped(file: BinaryIO) -> Iterator[Tar]:
    if not file.seek(0, 2):
        yield b""  # an empty file cannot be mapped
        return
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as tar:
        yield tar


def check_commit(record: ShardRecord, commit: ShardCommit, rows: Sequence[IndexRow], plan_hash: str) -> Iterator[str]:
    """Compares the commit record of the index with the manifest."""
    if commit.plan_hash != plan_hash:
        yield "its index was written by another plan"
    if (commit.tar_sha256, commit.tar_bytes) != (record.sha256, record.num_bytes):
        yield "its index commits a tar of another sha256 or size than the manifest's"
    if len(rows) != record.num_samples:
        yield f"its index has {len(rows)} rows, the manifest says {record.num_samples} samples"


def check_loading(data: bytes, shard: int, manifest: Manifest) -> Iterator[str]:
    """Finds faults of a shard's index: those that make a loader refuse it, and those in columns that only other readers
    use."""
    record = manifest.shards[shard]
    checks: tuple[Callable[[], None], ...] = (
        lambda: refuse_rows(read_sample_rows(data), record, num_classes=manifest.num_classes),
        lambda: refuse_places(read_index(data), shard=shard, is_ours=not manifest.adopted),
    )
    for check in checks:
        try:
            check()
        except ValueError as error:
            yield f"its index cannot be right: {error}"


def check_labels(rows: Sequence[IndexRow], num_classes: int, *, may_be_none: bool = False) -> Iterator[str]:
    """Checks that every label is a class, and that every row has a label unless `may_be_none`."""
    for number, row in enumerate(rows):
        if not row.labels and may_be_none:
            continue
        if not row.labels or min(row.labels) < 0 or max(row.labels) >= num_classes:
            yield f"row {number} has labels {list(row.labels)}, allowed: 0 to {num_classes - 1}"


def check_blocks(
    rows: Sequence[IndexRow],
    data_end: int,
    record: ShardRecord,
    *,
    shard: int,
    blocks: BlockTable,
    samples_per_block: int,
) -> Iterator[str]:
    """Compares the shard's part of the block table with its index."""
    offsets = np.array([row.offset for row in rows], dtype=np.int64)
    expected = [
        (shard, first_byte, end_byte, record.first_sample_id + row, count)
        for row, first_byte, end_byte, count in blocks_of_shard(
            offsets, data_end=data_end, samples_per_block=samples_per_block
        )
    ]
    # The blocks are found by sample id, so that a wrong shard number cannot hide one.
    ids = (record.first_sample_id, record.first_sample_id + record.num_samples)
    begin, end = np.searchsorted(blocks.first_sample_id, ids)
    columns = (blocks.shard, blocks.first_byte, blocks.end_byte, blocks.first_sample_id, blocks.num_samples)
    if [tuple(int(column[place]) for column in columns) for place in range(begin, end)] != expected:
        yield "the block table does not fit its index"


def check_tar(record: ShardRecord, tar: Tar) -> Iterator[str]:
    """Checks the size and the sha256 of the whole tar."""
    if len(tar) != record.num_bytes:
        yield f"has {len(tar)} bytes, the manifest says {record.num_bytes}"
    if hashlib.sha256(tar).hexdigest() != record.sha256:
        yield "its sha256 is not the manifest's"


def check_checksums(rows: Sequence[IndexRow], tar: Tar) -> Iterator[str]:
    """Checks the crc32 of every image. Images are found by offset and size alone, without the tar's headers."""
    for number, row in enumerate(rows):
        if crc32(tar[row.offset : row.offset + row.size]) != row.crc32:
            yield f"the crc32 of row {number} ({row.source}) is not the index's"


def check_members(rows: Sequence[IndexRow], tar: Tar, *, is_ours: bool) -> Iterator[str]:
    """Compares the names, offsets and sizes in the tar's headers with the index. A tar written by Patchline must have
    no other members."""
    try:
        with tarfile.open(fileobj=_opened(tar), mode="r:") as archive:
            members = {printable(item.name): (item.offset_data, item.size) for item in archive if item.isreg()}
    except (tarfile.TarError, OSError, ValueError) as error:  # ValueError: a mapped tar ends inside a member
        yield f"is not a readable tar: {error}"
        return
    wanted = {f"{row.key}.{row.ext}" for row in rows}
    for number, row in enumerate(rows):
        if members.get(f"{row.key}.{row.ext}") != (row.offset, row.size):
            yield f"member {row.key}.{row.ext} is not where row {number} of the index says"
    if not is_ours:
        return
    for row in rows:
        wanted |= {f"{row.key}.json"} | ({f"{row.key}.cls"} if len(row.labels) == 1 else set())
    for name in sorted(wanted ^ set(members)):
        yield f"member {name} is {'missing' if name in wanted else 'not in the index'}"


def check_webdataset(rows: Sequence[IndexRow], tar: Tar, *, is_ours: bool) -> Iterator[str]:
    """Checks that webdataset's own reader returns every sample with its image and, for tars written by Patchline, its
    class."""
    group_by_keys, tar_file_expander = _webdataset()
    found = {}
    try:
        if sparse := _sparse_member(tar):
            yield f"member {printable(sparse)} is sparse: readers would fill its gaps in memory"
            return
        for sample in group_by_keys(tar_file_expander([{"url": "shard", "stream": _opened(tar)}])):
            found[printable(sample["__key__"])] = sample
    except (tarfile.TarError, OSError, ValueError) as error:
        yield f"webdataset cannot read it: {error}"
    for row in rows:
        sample = found.get(row.key, {})
        label = str(row.labels[0]).encode() if len(row.labels) == 1 else None
        is_same_label = not is_ours or sample.get("cls") == label
        if len(sample.get(row.ext.lower(), b"")) != row.size or not is_same_label:
            yield f"webdataset does not give sample {row.key} as the index has it"


def _sparse_member(tar: Tar) -> str:
    """Returns the name of a sparse member, which is larger than its data in the tar, or "" if there is none."""
    with tarfile.open(fileobj=_opened(tar), mode="r:") as archive:
        return next((item.name for item in archive if item.issparse()), "")


def _webdataset() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Imports webdataset's functions for reading tars. webdataset would import torch, which takes seconds and is not
    needed here, so torch is hidden from it unless it is loaded already."""
    is_hidden = "torch" not in sys.modules
    if is_hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]  # `import torch` then fails as if it were not installed
    try:
        from webdataset.tariterators import group_by_keys, tar_file_expander  # noqa: PLC0415
    finally:
        if is_hidden:
            del sys.modules["torch"]
    return group_by_keys, tar_file_expander


def check_json(rows: Sequence[IndexRow], tar: Tar) -> Iterator[str]:
    """Checks that KEY.json, the last member of a sample written by Patchline, says the same as the index."""
    for number, row in enumerate(rows):
        facts = _json_facts(tar, row.key, row.offset + row.size)
        if facts is None:
            yield f"{row.key}.json does not follow the image of row {number}, or is not JSON"
            continue
        index = {
            "height": row.height,
            "labels": list(row.labels),
            "orientation": row.orientation,
            "source": row.source,
            "width": row.width,
            "weights": list(row.weights),
        }
        found = {"weights": []} | facts
        if different := [name for name, value in index.items() if found.get(name) != value]:
            yield f"{row.key}.json has another {', '.join(different)} than row {number} of the index"


def _json_facts(tar: Tar, key: str, image_end: int) -> dict[str, Any] | None:
    end = image_end
    for name in (f"{key}.cls", f"{key}.json"):
        begin = end + -end % BLOCK_BYTES + BLOCK_BYTES
        try:
            member = tarfile.TarInfo.frombuf(tar[begin - BLOCK_BYTES : begin], "utf-8", "surrogateescape")
            if member.name == f"{key}.json":
                facts = json.loads(tar[begin : begin + member.size])
                return facts if isinstance(facts, dict) else None
        except (tarfile.TarError, ValueError):
            return None
        if member.name != name:
            return None
        end = begin + member.size
    return None


def check_decode(rows: Sequence[IndexRow], tar: Tar, limits: ImageLimits = DEFAULT_LIMITS) -> Iterator[str]:
    """Checks that every image decodes to the size in the index, at no more cost than the limits allow."""
    for number, row in enumerate(rows):
        data = tar[row.offset : row.offset + row.size]
        try:
            refuse_costly(data, limits)
            with Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP")) as image:
                height, width = image.height, image.width
                if (height, width) == (row.height, row.width):
                    image.load()  # the size in the index is within the limits of packing
        except Exception as error:  # Pillow's decoders raise nearly any exception for damage
            yield f"row {number} ({row.source}) does not decode: {error or type(error).__name__}"
            continue
        if (height, width) != (row.height, row.width):
            yield f"row {number} is {height}x{width}, the index says {row.height}x{row.width}"
        elif damage := jpeg_damage(data) or png_damage(data):
            yield f"row {number} ({row.source}) is damaged: {damage}; the rest of it decodes to grey, black or noise"


def _opened(tar: Tar) -> BinaryIO:
    """Returns the tar as a file, at its start."""
    if isinstance(tar, bytes):
        return io.BytesIO(tar)
    tar.seek(0)
    return cast(BinaryIO, tar)

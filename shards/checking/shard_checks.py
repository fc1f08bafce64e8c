"""What can be wrong with one shard: pure checks of a tar's bytes against its index, each yielding faults."""

import hashlib
import io
import json
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

import numpy as np
from PIL import Image

from shards.checking.plan_checks import Weights
from shards.checking.whole_tar import Tar
from shards.index import BlockTable, ShardCommit, ShardRows
from shards.manifest import ShardRecord
from shards.packing.merge import blocks_of_shard
from shards.packing.tar_writer import BLOCK_BYTES
from shards.sources.entry import printable

# What Pillow's decoders raise on damaged images.
_DECODE_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def check_commit(record: ShardRecord, commit: ShardCommit, rows: ShardRows, plan_hash: str) -> Iterator[str]:
    """The index's commit record against the manifest."""
    if commit.plan_hash != plan_hash:
        yield "its index was written by another plan"
    if (commit.tar_sha256, commit.tar_bytes) != (record.sha256, record.num_bytes):
        yield "its index commits a tar of another sha256 or size than the manifest's"
    if len(rows.offset) != record.num_samples:
        yield f"its index has {len(rows.offset)} rows, the manifest says {record.num_samples} samples"


def check_labels(rows: ShardRows, num_classes: int) -> Iterator[str]:
    """Every label is a class."""
    for row, labels in enumerate(rows.labels):
        if not labels or min(labels) < 0 or max(labels) >= num_classes:
            yield f"row {row} has labels {labels}, allowed are 0 to {num_classes - 1}"


def check_blocks(
    rows: ShardRows,
    data_end: int,
    record: ShardRecord,
    *,
    shard: int,
    blocks: BlockTable,
    samples_per_block: int,
) -> Iterator[str]:
    """The shard's part of the block table against its index."""
    expected = [
        (shard, first_byte, end_byte, record.first_sample_id + row, count)
        for row, first_byte, end_byte, count in blocks_of_shard(
            rows.offset, data_end=data_end, samples_per_block=samples_per_block
        )
    ]
    # Found by sample id, so that a wrong shard number cannot hide a block.
    ids = (record.first_sample_id, record.first_sample_id + record.num_samples)
    begin, end = np.searchsorted(blocks.first_sample_id, ids)
    columns = (blocks.shard, blocks.first_byte, blocks.end_byte, blocks.first_sample_id, blocks.num_samples)
    if [tuple(int(column[place]) for column in columns) for place in range(begin, end)] != expected:
        yield "the block table does not fit its index"


def check_tar(record: ShardRecord, tar: Tar) -> Iterator[str]:
    """Size and sha256 of the whole."""
    if len(tar) != record.num_bytes:
        yield f"has {len(tar)} bytes, the manifest says {record.num_bytes}"
    if hashlib.sha256(tar).hexdigest() != record.sha256:
        yield "its sha256 is not the manifest's"


def check_checksums(rows: ShardRows, tar: Tar) -> Iterator[str]:
    """crc32 of every image, found by its offset and size alone."""
    for row, crc32 in enumerate(rows.crc32.tolist()):
        begin, size = int(rows.offset[row]), int(rows.size[row])
        if zlib.crc32(tar[begin : begin + size]) != crc32:
            yield f"the crc32 of row {row} ({rows.source[row]}) is not the index's"


def check_members(rows: ShardRows, tar: Tar, *, is_ours: bool) -> Iterator[str]:
    """The tar's own headers against the index: names, offsets, sizes, and nothing else if the tar is ours."""
    try:
        with tarfile.open(fileobj=_opened(tar), mode="r:") as archive:
            members = {printable(item.name): (item.offset_data, item.size) for item in archive if item.isreg()}
    except (tarfile.TarError, OSError, ValueError) as error:  # ValueError: a mapped tar that ends inside a member
        yield f"is not a readable tar: {error}"
        return
    wanted = {f"{key}.{ext}" for key, ext in zip(rows.key, rows.ext, strict=True)}
    for row, (key, ext) in enumerate(zip(rows.key, rows.ext, strict=True)):
        if members.get(f"{key}.{ext}") != (int(rows.offset[row]), int(rows.size[row])):
            yield f"member {key}.{ext} is not where row {row} of the index says"
    if not is_ours:
        return
    for key, labels in zip(rows.key, rows.labels, strict=True):
        wanted |= {f"{key}.json"} | ({f"{key}.cls"} if len(labels) == 1 else set())
    for name in sorted(wanted ^ set(members)):
        yield f"member {name} is {'missing' if name in wanted else 'not in the index'}"


def check_webdataset(rows: ShardRows, tar: Tar, *, is_ours: bool) -> Iterator[str]:
    """webdataset's own reader returns every sample with its image, and with its class if the tar is ours."""
    group_by_keys, tar_file_expander = _webdataset()
    found = {}
    try:
        for sample in group_by_keys(tar_file_expander([{"url": "shard", "stream": _opened(tar)}])):
            found[printable(sample["__key__"])] = sample
    except (tarfile.TarError, OSError, ValueError) as error:
        yield f"webdataset cannot read it: {error}"
    for row, key in enumerate(rows.key):
        sample = found.get(key, {})
        labels = rows.labels[row]
        label = str(labels[0]).encode() if len(labels) == 1 else None
        is_same_label = not is_ours or sample.get("cls") == label
        if len(sample.get(rows.ext[row].lower(), b"")) != int(rows.size[row]) or not is_same_label:
            yield f"webdataset does not give sample {key} as the index has it"


def _webdataset() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """webdataset's functions for reading tars. It imports torch if there is one, which takes seconds and is not needed
    here; so it is loaded as if there were none, unless torch is loaded already."""
    is_hidden = "torch" not in sys.modules
    if is_hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]  # `import torch` then fails as if it were not installed
    try:
        from webdataset.tariterators import group_by_keys, tar_file_expander  # noqa: PLC0415
    finally:
        if is_hidden:
            del sys.modules["torch"]
    return group_by_keys, tar_file_expander


def check_json(rows: ShardRows, weights: Weights, tar: Tar) -> Iterator[str]:
    """KEY.json, the last member of a sample of ours, says the same as the index."""
    for row, key in enumerate(rows.key):
        facts = _json_facts(tar, key, int(rows.offset[row]) + int(rows.size[row]))
        if facts is None:
            yield f"{key}.json does not follow the image of row {row}, or is not JSON"
            continue
        index = {
            "height": int(rows.height[row]),
            "labels": rows.labels[row],
            "orientation": int(rows.orientation[row]),
            "source": rows.source[row],
            "width": int(rows.width[row]),
            "weights": list(weights[row] or ()),
        }
        found = {"weights": []} | facts
        if different := [name for name, value in index.items() if found.get(name) != value]:
            yield f"{key}.json has another {', '.join(different)} than row {row} of the index"


def _json_facts(tar: Tar, key: str, image_end: int) -> dict[str, Any] | None:
    place = image_end
    for name in (f"{key}.cls", f"{key}.json"):
        begin = place + -place % BLOCK_BYTES + BLOCK_BYTES
        try:
            member = tarfile.TarInfo.frombuf(tar[begin - BLOCK_BYTES : begin], "utf-8", "surrogateescape")
            if member.name == f"{key}.json":
                facts = json.loads(tar[begin : begin + member.size])
                return facts if isinstance(facts, dict) else None
        except (tarfile.TarError, ValueError):
            return None
        if member.name != name:
            return None
        place = begin + member.size
    return None


def check_decode(rows: ShardRows, tar: Tar) -> Iterator[str]:
    """Every image decodes, to the size that the index says."""
    for row in range(len(rows.offset)):
        begin, size = int(rows.offset[row]), int(rows.size[row])
        try:
            with Image.open(io.BytesIO(tar[begin : begin + size]), formats=("JPEG", "PNG", "WEBP")) as image:
                height, width = image.height, image.width
                if (height, width) == (int(rows.height[row]), int(rows.width[row])):
                    image.load()  # the size was within the packing's limits
        except _DECODE_ERRORS as error:
            yield f"row {row} ({rows.source[row]}) does not decode: {error}"
            continue
        if (height, width) != (int(rows.height[row]), int(rows.width[row])):
            yield f"row {row} is {height}x{width}, the index says {rows.height[row]}x{rows.width[row]}"


def _opened(tar: Tar) -> BinaryIO:
    """The tar as a file at its start."""
    if isinstance(tar, bytes):
        return io.BytesIO(tar)
    tar.seek(0)
    return cast(BinaryIO, tar)

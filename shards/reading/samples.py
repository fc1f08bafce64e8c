"""Reads single samples of a dataset: finds their row in the index, and checks their bytes."""

from dataclasses import dataclass, replace

import numpy as np
from isal.isal_zlib import crc32

from shards.dataset import Dataset
from shards.images.config import MAX_IMAGE_BYTES
from shards.order import BlockSlice
from shards.output.terminal import printable_name
from shards.sample_rows import SampleRows
from shards.storage.objects import MissingObjectError

# The errors for a tar that is missing or cut off. Other errors of a store say nothing about the sample.
BYTES_MISSING = (MissingObjectError, EOFError)
MOST_SLICE_BYTES = 1 << 30  # the most bytes that one read may fetch


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSample:
    """One sample as it lies in the shard. Its crc32 is not checked yet: `verified` must be called before it is decoded.

    `data` is None if the bytes are unavailable; `fault` then says why. `source`, the image's original name, is empty
    until the sample is read again or has a fault.
    """

    sample_id: int
    data: memoryview | bytes | None
    fault: str
    height: int  # pixels as stored, from the index
    width: int
    orientation: int  # as in EXIF, from the index: 1 to 8, 1 is upright
    labels: tuple[int, ...]
    source: str
    crc32: int
    weights: tuple[float, ...] = ()  # either one per label, or none


def locate_row(dataset: Dataset, sample_id: int) -> tuple[int, int]:
    """Returns (shard, row) of a sample id."""
    shard = int(np.searchsorted(dataset.first_sample_ids, sample_id, side="right")) - 1
    return shard, sample_id - int(dataset.first_sample_ids[shard])


def sample_of(rows: SampleRows, row: int, *, sample_id: int, data: memoryview | bytes | None) -> RawSample:
    """Returns the sample that a row of the index describes."""
    return RawSample(
        sample_id=sample_id,
        data=data,
        fault="",
        height=int(rows.height[row]),
        width=int(rows.width[row]),
        orientation=int(rows.orientation[row]),
        labels=rows.labels_of(row),
        source="",
        crc32=int(rows.crc32[row]),
        weights=rows.weights_of(row),
    )


def too_large(size: int, *, most_bytes: int = MAX_IMAGE_BYTES) -> str:
    """Returns why a sample of `size` bytes must not be read, or "" if it may be."""
    return f"too large: {size} bytes, allowed: {most_bytes}" if size > most_bytes else ""


def faulty(dataset: Dataset, sample: RawSample, fault: str) -> RawSample:
    """Returns the sample without its bytes. Its `fault` names the reason and the tar; its `source` is the image's
    name."""
    shard, row = locate_row(dataset, sample.sample_id)
    where = f"row {dataset.packed_row(shard, row)} of {dataset.shard_store.url}/{dataset.shard_path(shard)}"
    return replace(sample, data=None, fault=f"{fault} ({printable_name(where)})", source=dataset.source_of(shard, row))


def verified(dataset: Dataset, sample: RawSample) -> RawSample:
    """Returns the sample if its bytes have the crc32 of the index. Otherwise reads it once again and returns the
    result, which may have a `fault`."""
    if sample.data is None or crc32(sample.data) == sample.crc32:
        return sample
    return refetched(dataset, sample)


def refetched(dataset: Dataset, sample: RawSample) -> RawSample:
    """Reads a sample again by its offset and checks it. The returned sample has a `fault` if it is too large or its
    bytes are missing or wrong.

    Raises the errors of an unreachable store, and StorageError if all tars are missing.
    """
    shard, row = locate_row(dataset, sample.sample_id)
    rows = dataset.rows_of(sample.sample_id, 1)
    if fault := too_large(int(rows.size[0])):
        return faulty(dataset, sample, fault)
    begin = int(rows.offset[0])
    try:
        data = dataset.read_shard(shard, begin, begin + int(rows.size[0]))
    except BYTES_MISSING as error:
        if isinstance(error, MissingObjectError):
            dataset.check_others_than(shard)
        return faulty(dataset, sample, f"its bytes are not there: {error}")
    if (found := crc32(data)) != sample.crc32:
        return faulty(dataset, sample, f"crc32 is {found:08x}, the index says {sample.crc32:08x}")
    return replace(sample, data=data, fault="", source=dataset.source_of(shard, row))


def read_sample(dataset: Dataset, sample_id: int) -> RawSample:
    """Reads one sample by its offset and checks it. Substitutes are read this way."""
    rows = dataset.rows_of(sample_id, 1)
    if fault := too_large(int(rows.size[0])):
        return faulty(dataset, sample_of(rows, 0, sample_id=sample_id, data=None), fault)
    return verified(dataset, read_slice(dataset, BlockSlice(first_sample_id=sample_id, num_samples=1))[0])


def read_slice(dataset: Dataset, block: BlockSlice) -> list[RawSample]:
    """Reads consecutive samples of one shard by one range read, or one by one if the range is too large or the tar does
    not have all of it."""
    shard, _ = locate_row(dataset, block.first_sample_id)
    rows = dataset.rows_of(block.first_sample_id, block.num_samples)
    begin, end = int(rows.offset[0]), int(rows.offset[-1] + rows.size[-1])
    numbers = list(enumerate(range(block.first_sample_id, block.first_sample_id + block.num_samples)))
    try:
        body = memoryview(dataset.read_shard(shard, begin, end)) if end - begin <= MOST_SLICE_BYTES else None
    except BYTES_MISSING:
        body = None
    if body is None:
        return [refetched(dataset, sample_of(rows, row, sample_id=number, data=None)) for row, number in numbers]
    samples = []
    for row, number in numbers:
        at = int(rows.offset[row]) - begin
        samples.append(sample_of(rows, row, sample_id=number, data=body[at : at + int(rows.size[row])]))
    return samples

"""Rows of an index as arrays: parts of them, the ranges that bring them, and the labels of images with exactly one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shards import sample_rows
from shards.dataset import Dataset, open_dataset
from shards.index import index_bytes, read_index, read_labels, read_sample_rows
from shards.manifest import LABELS_PATH, index_path
from shards.part import labels_of
from shards.sample_rows import (
    BlockTable,
    refuse_block_reads,
    refuse_blocks,
    refuse_count,
    refuse_labels,
    refuse_places,
    refuse_rows,
)
from tests.rigs.datasets import index_rows, packed_folders
from tests.shards.test_index import COMMIT, ROWS


@pytest.mark.parametrize(("first", "end"), [(0, 3), (1, 3), (1, 2), (2, 3), (0, 1)])
def test_a_part_of_the_rows_holds_nothing_of_the_others(first: int, end: int) -> None:
    rows = read_sample_rows(index_bytes(7, ROWS, COMMIT))
    part = rows.slice(first, end)
    assert part.offset.tolist() == rows.offset[first:end].tolist()
    assert part.crc32.tolist() == rows.crc32[first:end].tolist()
    assert [part.labels_of(row) for row in range(end - first)] == [rows.labels_of(row) for row in range(first, end)]
    assert all(array.base is None for array in vars(part).values())


@pytest.mark.parametrize("rows", [[], [1], [0, 2], [2, 1, 1]])
def test_rows_are_taken_with_their_labels(rows: list[int]) -> None:
    whole = read_sample_rows(index_bytes(7, ROWS, COMMIT))
    part = whole.take(np.array(rows, dtype=np.int64))
    assert part.offset.tolist() == [ROWS[row].offset for row in rows]
    assert [part.labels_of(row) for row in range(len(rows))] == [ROWS[row].labels for row in rows]
    assert part.label_values.dtype == whole.label_values.dtype


def test_rows_are_taken_with_their_weights() -> None:
    weighted = [replace(row, weights=(0.25, 0.5)[: len(row.labels)]) for row in ROWS]
    part = read_sample_rows(index_bytes(7, weighted, COMMIT)).take(np.array([1, 0]))
    assert [part.weights_of(row) for row in range(2)] == [(0.25, 0.5), (0.25,)]


@pytest.mark.parametrize(
    ("gaps", "begins"),
    [
        pytest.param([100, 100], [0], id="none above the limit"),
        pytest.param([100, 101], [0, 2], id="one above the limit"),
        pytest.param([101, 101], [0, 1, 2], id="all apart"),
        pytest.param([], [0], id="one row"),
    ],
)
def test_what_lies_apart_is_read_apart(gaps: list[int], begins: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_rows, "MOST_GAP_BYTES", 100)
    rows = read_sample_rows(index_bytes(7, ROWS, COMMIT)).take(np.arange(len(gaps) + 1))
    size = np.full(len(gaps) + 1, 10)
    offset = np.cumsum([0, *(10 + gap for gap in gaps)])
    assert replace(rows, offset=offset, size=size).reads().tolist() == begins


def test_a_block_is_read_whole_unless_said_otherwise() -> None:
    first, end = np.array([0, 100]), np.array([90, 300])
    shard = np.zeros(2, dtype=np.int32)
    table = BlockTable(shard=shard, first_byte=first, end_byte=end, first_sample_id=first, num_samples=end)
    assert table.most_bytes.tolist() == [90, 200]
    assert replace(table, read_bytes=np.array([5, 6])).most_bytes.tolist() == [5, 6]


def test_labels_are_those_of_the_index(tmp_path: Path) -> None:
    dataset = open_dataset(str(packed_folders(tmp_path)))
    rows = [row for shard in range(len(dataset.manifest.shards)) for row in index_rows(dataset, shard)]
    assert [[label] for label in labels_of(dataset, what="it").tolist()] == [list(row.labels) for row in rows]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Four shards of 4, 4, 4 and 3 samples of 3 classes, in blocks of 3 and 1."""
    return open_dataset(str(packed_folders(Path(tmp_path_factory.mktemp("rules")))))


def test_tables_of_packing_are_right(dataset: Dataset) -> None:
    manifest = dataset.manifest
    refuse_blocks(dataset.blocks, manifest)
    refuse_labels(read_labels(dataset.store.read(LABELS_PATH)), num_classes=3)
    for shard, record in enumerate(manifest.shards):
        refuse_rows(dataset.sample_rows(shard), record, num_classes=3)
        refuse_count(record.num_samples, record)
        refuse_places(read_index(dataset.store.read(index_path(shard))), shard=shard, is_ours=True)


def test_labels_must_be_classes(dataset: Dataset) -> None:
    rows, record = dataset.sample_rows(0), dataset.manifest.shards[0]
    with pytest.raises(ValueError, match=r"row 3 has label 7; allowed: 0 to 2"):
        refuse_rows(
            replace(rows, label_ends=np.array([0, 2, 2, 2, 3]), label_values=np.array([0, 2, 7], np.int32)),
            record,
            num_classes=3,
        )
    with pytest.raises(ValueError, match="has label"):
        refuse_rows(rows, record, num_classes=0)


def test_an_empty_shard_has_no_block(dataset: Dataset) -> None:
    manifest, blocks = dataset.manifest, dataset.blocks
    empty = replace(manifest.shards[0], path="x", num_samples=0)
    shards = (empty, *manifest.shards)
    refuse_blocks(replace(blocks, shard=blocks.shard + 1), replace(manifest, shards=shards))
    refuse_rows(dataset.sample_rows(0).slice(0, 0), empty, num_classes=3)


def test_a_huge_number_of_blocks_is_counted_not_made(dataset: Dataset) -> None:
    manifest = dataset.manifest
    shards = tuple(replace(record, num_samples=1 << 24) for record in manifest.shards)
    many = replace(manifest, shards=shards, num_samples=4 << 24, samples_per_block=1)
    with pytest.raises(ValueError, match="it has 7 blocks; allowed: 67108864"):
        refuse_blocks(dataset.blocks, many)


def test_reads_stay_inside_their_block(dataset: Dataset) -> None:
    blocks, rows = dataset.blocks, dataset.sample_rows(0)
    refuse_block_reads(blocks, rows.slice(0, 3), 0)
    refuse_block_reads(blocks, rows.slice(1, 2), 1)
    refuse_block_reads(blocks, rows.slice(3, 4), 3)
    with pytest.raises(ValueError, match=r"samples from 0 on are bytes .* those of their block"):
        refuse_block_reads(blocks, rows.slice(0, 4), 0)

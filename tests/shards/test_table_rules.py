"""What the tables must say, given the manifest. tests/shards/verifying/test_refused.py has whole datasets."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shards.dataset import Dataset, open_dataset
from shards.index import read_index, read_labels
from shards.manifest import LABELS_PATH, index_path
from shards.tables import (
    refuse_block_reads,
    refuse_blocks,
    refuse_count,
    refuse_labels,
    refuse_places,
    refuse_rows,
)
from tests.rigs.datasets import packed_folders


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

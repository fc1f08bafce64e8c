"""Blocks, labels, quarantine list and manifest."""

from pathlib import Path

import numpy as np
import pytest

from shards.dataset import open_dataset
from shards.errors import UserError
from shards.manifest import LABELS_PATH, QUARANTINE_PATH, index_path
from shards.packing.merge import blocks_of_shard, merge
from shards.packing.plan import read_plan
from shards.sources.kinds import FolderSource
from tests.rigs.datasets import packed_folders
from tests.rigs.packing import pack_spec
from tests.rigs.tables import read_table


@pytest.mark.parametrize(
    ("num_samples", "samples_per_block", "expected"),
    [
        (0, 2, []),
        (1, 2, [(0, 0, 9999, 1)]),
        (5, 2, [(0, 0, 4096, 2), (2, 4096, 8192, 2), (4, 8192, 9999, 1)]),
        (4, 2, [(0, 0, 4096, 2), (2, 4096, 9999, 2)]),
    ],
)
def test_blocks_run_from_header_to_header(
    num_samples: int, samples_per_block: int, expected: list[tuple[int, int, int, int]]
) -> None:
    offsets = np.arange(num_samples, dtype=np.int64) * 2048 + 512
    assert list(blocks_of_shard(offsets, data_end=9999, samples_per_block=samples_per_block)) == expected


def test_the_block_table_covers_every_sample_and_byte_once(tmp_path: Path) -> None:
    dataset = open_dataset(str(packed_folders(tmp_path)))
    blocks = dataset.blocks
    assert blocks.num_samples.tolist() == [3, 1, 3, 1, 3, 1, 3]  # shards of 4, 4, 4 and 3 samples
    assert blocks.first_sample_id.tolist() == [0, 3, 4, 7, 8, 11, 12]
    for shard in range(4):
        mine = np.flatnonzero(blocks.shard == shard)
        assert blocks.first_byte[mine[0]] == 0
        assert blocks.end_byte[mine[:-1]].tolist() == blocks.first_byte[mine[1:]].tolist()
        end = int(blocks.end_byte[mine[-1]])
        tar = dataset.store.read(dataset.shard_path(shard))
        assert tar[end:] == bytes(1024)


def test_labels_have_their_names_and_counts(tmp_path: Path) -> None:
    store = open_dataset(str(packed_folders(tmp_path))).store
    assert read_table(store.read(LABELS_PATH)).to_pylist() == [
        {"label": label, "name": f"c{label}", "num_samples": 5} for label in range(3)
    ]
    assert read_table(store.read(QUARANTINE_PATH)).num_rows == 0


def test_a_missing_shard_stops_the_merge(tmp_path: Path) -> None:
    store = open_dataset(str(packed_folders(tmp_path))).store
    source = FolderSource(root=str(tmp_path / "images"))
    spec = pack_spec(source, samples_per_block=3, seed=0)
    plan = read_plan(store, spec)
    assert plan is not None
    store.delete(index_path(2))
    with pytest.raises(UserError, match=r"shard 2 of .* is not packed.*--phase shards"):
        merge(store, spec, plan, max_quarantined=0.0)

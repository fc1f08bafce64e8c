"""The closest and the most doubtful pairs are shown, with both pictures if they can be read."""

from pathlib import Path

import pyarrow as pa
import pytest

from shards.packing.evaluation_sets import closest_matches, find_sets
from shards.sources.kinds import FolderSource
from shards.store import open_store
from tests.rigs.datasets import packed_folders
from tests.rigs.packing import pack_spec


@pytest.mark.parametrize(
    ("num_overlaps", "distances"),
    [(0, []), (3, [0, 1, 2]), (100, [*range(24), *range(76, 100)])],
)
def test_the_ends_of_the_range_are_shown(tmp_path: Path, num_overlaps: int, distances: list[int]) -> None:
    url = str(packed_folders(tmp_path))
    rows = range(num_overlaps)
    dropped = pa.table(
        {
            "position": pa.array(rows, pa.int64()),
            "locator": pa.array([b"c0/img 0.JPEG" if row else b"gone.jpg" for row in rows], pa.binary()),
            "source": pa.array([f"own {row}" for row in rows], pa.string()),
        }
    )
    overlaps = pa.table(
        {
            "position": pa.array(rows, pa.int64()),
            "distance": pa.array(rows, pa.int32()),
            "match": pa.array(["c1/x.jpg"] * num_overlaps, pa.string()),
            "set_number": pa.array([0] * num_overlaps, pa.int64()),
            "shard": pa.array([1] * num_overlaps, pa.int64()),
            "row": pa.array([row % 5 for row in rows], pa.int64()),
        }
    )
    spec = pack_spec(FolderSource(root=str(tmp_path / "images")))
    store, sets = open_store(str(tmp_path / "out")), tuple(find_sets((url,)))
    found = closest_matches(store, spec, dropped, overlaps, sets).to_pylist()
    assert [row["distance"] for row in found] == distances
    for row in found:
        is_there = row["source"] != "own 0"
        assert (row["thumbnail"] is not None) == is_there
        # A shard has four samples: the fifth row belongs to an index that has changed since.
        assert (row["evaluation_thumbnail"] is not None) == (row["distance"] % 5 < 4)
        assert (row["evaluation"], row["evaluation_set"]) == ("c1/x.jpg", url)

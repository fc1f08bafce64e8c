"""The benchmark of a rank's start measures what it says: the ranks of a host ask for each object once."""

from pathlib import Path

import pytest

from benchmarks.scale_start import data_starts, summary, write_synthetic


@pytest.mark.long
def test_two_ranks_ask_for_each_object_of_a_synthetic_dataset_once(tmp_path: Path) -> None:
    write_synthetic(str(tmp_path), 40)
    starts = data_starts(str(tmp_path), 2)
    assert summary(starts)["asked"] == {"manifest.json": 1, "blocks.parquet": 1, "labels.parquet": 1}
    assert len(starts) == 2
    assert max(start.private_mebibytes for start in starts) < 100

"""The proof that every image is in exactly one shard or in quarantine."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from shards.index import table_bytes
from shards.packing.plan import DROPPED_PATH, Plan
from shards.sources.kinds import FolderSource
from shards.store import Store, open_store
from shards.verifying.verify import misplaced
from tests.rigs.images import class_folders
from tests.rigs.packing import pack_spec, planned
from tests.rigs.tables import read_table

SAMPLES = "plan/samples-00000.parquet"


@pytest.fixture
def made(tmp_path: Path) -> tuple[Store, Plan]:
    """A plan of 6 images, of which one is refused."""
    root = class_folders(tmp_path / "images", num_classes=2, images_a_class=3)
    (root / "c1" / "img 0.JPEG").write_bytes(b"")
    store = open_store(str(tmp_path / "out"))
    return store, planned(store, pack_spec(FolderSource(root=str(root))))


def test_a_plan_of_ours_places_every_image_once(made: tuple[Store, Plan]) -> None:
    assert list(misplaced(*made)) == []


@pytest.mark.parametrize(
    ("path", "position", "faults"),
    [
        (SAMPLES, 3, ["position 3 is in more than one place", "is in no shard"]),
        (DROPPED_PATH, 0, ["position 0 is in more than one place", "position 3 is in no shard"]),
        (SAMPLES, 6, ["positions outside 0 to 5"]),
        (SAMPLES, -1, ["positions outside 0 to 5"]),
    ],
)
def test_an_image_lost_or_placed_twice_is_named(
    made: tuple[Store, Plan], path: str, position: int, faults: list[str]
) -> None:
    store, plan = made
    table = read_table(store.read(path))
    positions = pa.array([position, *table.column("position").to_pylist()[1:]], pa.int64())
    place = table.schema.get_field_index("position")
    store.write(path, table_bytes(table.set_column(place, "position", positions)))
    found = sorted(misplaced(store, plan), reverse=True)
    assert len(found) == len(faults)
    assert all(any(fault in what for what in found) for fault in faults)


def test_a_plan_that_counts_other_images_is_found(made: tuple[Store, Plan]) -> None:
    store, plan = made
    assert list(misplaced(store, replace(plan, num_samples=plan.num_samples + 1))) == [
        "the image at position 6 is in no shard and not among the dropped"
    ]

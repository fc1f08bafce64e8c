"""Which samples the card shows, and how thumbnails come out."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from shards.card.facts import Mosaic, Pick, read_matches, read_tiles
from shards.dataset import open_dataset
from shards.index import INDEX_SCHEMA
from shards.store import open_store
from tests.rigs.card_datasets import Sample, write_dataset
from tests.rigs.images import image_bytes


def index(labels: list[list[int]]) -> pa.Table:
    rows = [{"offset": 10 * row, "size": 9, "labels": item, "source": f"{row}.jpg"} for row, item in enumerate(labels)]
    return pa.Table.from_pylist(rows, schema=INDEX_SCHEMA)


def chosen(num_tiles: int, shards: list[list[list[int]]], *, num_classes: int = 10) -> list[Pick]:
    shard_samples = np.array([len(labels) for labels in shards])
    mosaic = Mosaic(shard_samples, num_tiles=num_tiles, num_classes=num_classes)
    for shard, labels in enumerate(shards):
        if mosaic.wants(shard):
            mosaic.add(shard, index(labels))
    return mosaic.picks()


def test_tiles_are_spread_over_classes_and_shards() -> None:
    shards = [[[row % 10] for row in range(100)] for _ in range(5)]
    picks = chosen(20, shards)
    assert [pick.labels[0] for pick in picks] == sorted([*range(10)] * 2)
    assert np.bincount([pick.shard for pick in picks]).tolist() == [4] * 5
    assert picks == chosen(20, shards)


@pytest.mark.parametrize(
    ("num_tiles", "num_rows", "expected"),
    [(0, 5, 0), (3, 5, 3), (9, 5, 5), (4, 0, 0)],
    ids=["none asked", "some", "more than there are", "an empty shard"],
)
def test_no_sample_is_shown_twice(num_tiles: int, num_rows: int, expected: int) -> None:
    picks = chosen(num_tiles, [[[0]] * num_rows])
    assert len({pick.row for pick in picks}) == len(picks) == expected


def test_samples_without_a_label_and_with_a_strange_one() -> None:
    assert len(chosen(3, [[[], [99], [1]]])) == 3


def test_a_short_last_shard_leaves_no_tile_missing() -> None:
    shards = [[[0]] * size for size in (64, 64, 64, 2)]
    assert np.bincount([pick.shard for pick in chosen(20, shards)], minlength=4).tolist() == [7, 6, 7, 0]
    assert len(chosen(500, shards)) == 194


def test_few_tiles_of_many_shards_come_from_all_over() -> None:
    assert [pick.shard for pick in chosen(3, [[[0]]] * 9)] == [1, 4, 7]


def test_broken_samples_and_missing_bytes_are_passed_over(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    samples = [Sample(image=image_bytes(1)), Sample(image=b"broken"), Sample(num_bytes=5000)]
    write_dataset(store, [samples], ["a"])
    size = len(samples[0].image)
    places = [(512, size), (512 + size + 512, 6), (512 + size + 512 + 6 + 512, 5000)]
    picks = [
        Pick(shard=0, row=row, offset=first, size=count, labels=(0,), source="")
        for row, (first, count) in enumerate(places)
    ]
    assert [tile.pick.row for tile in read_tiles(open_dataset(str(tmp_path)), picks)] == [0]


def test_matches_are_read_nearest_first(tmp_path: Path) -> None:
    match = {"source": "a", "evaluation": "b", "evaluation_set": "s", "thumbnail": image_bytes(1)}
    rows: list[dict[str, object]] = [match | {"distance": distance} for distance in (5, 0)]
    write_dataset(open_store(str(tmp_path)), [[Sample()]], ["a"], matches=rows)
    found = read_matches(open_dataset(str(tmp_path)))
    assert [item.distance for item in found] == [0, 5]
    assert found[0].thumbnail is not None
    assert found[0].evaluation_thumbnail is None

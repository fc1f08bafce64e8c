"""The card's histograms against counts of single samples."""

import numpy as np
import pyarrow as pa
import pytest

from shards.card import tally as tally_module
from shards.card.tally import ASPECT_STEPS, BYTE_STEPS, SIDE_STEPS, Tally, first_labels, quantile
from shards.index import INDEX_SCHEMA


def table(rows: list[dict[str, object]]) -> pa.Table:
    filled = [
        {"size": 100, "ext": "jpg", "height": 8, "width": 8, "labels": [0], "orientation": 1} | row for row in rows
    ]
    return pa.Table.from_pylist(filled, schema=INDEX_SCHEMA)


def tally(*tables: pa.Table, top: tuple[int, ...] = (), num_classes: int = 6) -> Tally:
    counted = Tally(top_classes=np.array(top, np.int64), num_classes=num_classes)
    for item in tables:
        counted.add(item)
    return counted


def test_numbers_add_up_over_shards() -> None:
    found = tally(table([{"size": 10}, {"size": 1000, "ext": "png"}]), table([]), table([{"size": 5}]))
    assert (found.num_images, found.num_bytes, found.bytes_range) == (3, 1015, (5, 1000))
    assert found.exts == {"jpg": 2, "png": 1}
    assert found.byte_sizes.sum() == 3


@pytest.mark.parametrize(
    ("value", "place"),
    [(1, 0), (2, SIDE_STEPS), (1024, 10 * SIDE_STEPS), (1023, 10 * SIDE_STEPS - 1), (1 << 30, 20 * SIDE_STEPS - 1)],
)
def test_sides_are_in_their_bin(value: int, place: int) -> None:
    found = tally(table([{"height": value, "width": 4}]))
    assert np.argwhere(found.sides).tolist() == [[place, 2 * SIDE_STEPS]]


@pytest.mark.parametrize(("orientation", "size"), [(1, (30, 40)), (3, (30, 40)), (6, (40, 30)), (8, (40, 30))])
def test_sizes_are_those_that_are_seen(orientation: int, size: tuple[int, int]) -> None:
    found = tally(table([{"height": 30, "width": 40, "orientation": orientation}]))
    assert found.sizes.most_common(9) == [(size, 1)]
    assert found.orientations[orientation] == 1


def test_aspect_ratios_are_symmetric() -> None:
    found = tally(table([{"height": h, "width": w} for h, w in [(10, 10), (10, 20), (20, 10)]]))
    middle = 4 * ASPECT_STEPS
    assert np.flatnonzero(found.aspects).tolist() == [middle - ASPECT_STEPS, middle, middle + ASPECT_STEPS]


def test_labels_that_occur_together() -> None:
    rows: list[dict[str, object]] = [{"labels": labels} for labels in ([5, 2], [2], [2, 5, 1], [], [1, 99])]
    found = tally(table(rows), top=(2, 5))
    assert found.together.tolist() == [[3, 2], [2, 2]]
    assert found.labels_a_sample[:4].tolist() == [1, 1, 2, 1]
    assert found.is_multi_label
    assert not tally(table([{}])).is_multi_label


def test_first_labels() -> None:
    rows: list[dict[str, object]] = [{"labels": labels} for labels in ([5, 2], [], [3])]
    assert first_labels(table(rows).column("labels").combine_chunks()).tolist() == [5, -1, 3]
    assert first_labels(table(rows).slice(1).column("labels").combine_chunks()).tolist() == [-1, 3]


def test_rare_sizes_are_forgotten_common_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally_module, "SIZES_HELD", 8)
    found = tally()
    for shard in range(9):
        rows: list[dict[str, object]] = [
            {"height": height} for height in (7, 7, 7, *range(100 + 10 * shard, 105 + 10 * shard))
        ]
        found.add(table(rows))
    assert len(found.sizes) <= 8
    assert found.sizes.most_common(1) == [((7, 8), 27)]


def test_quantile_of_a_histogram() -> None:
    assert quantile(np.array([0, 4, 4, 0]), 0.5) == 2.0
    sizes = tally(table([{"size": size} for size in range(900, 1101)])).byte_sizes
    assert 2 ** (quantile(sizes, 0.5) / BYTE_STEPS) == pytest.approx(1000, rel=0.03)

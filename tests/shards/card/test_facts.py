"""What the card says of a dataset, which samples it shows, and how thumbnails come out."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jobs.data.index import IndexJob, run
from shards.card import facts as card
from shards.card.facts import Mosaic, Pick, gather_facts, read_matches, read_tiles
from shards.dataset import open_dataset
from shards.index import INDEX_SCHEMA, QUARANTINE_SCHEMA
from shards.store import open_store
from tests.rigs.card_datasets import Sample, write_dataset
from tests.rigs.datasets import packed_folders
from tests.rigs.images import image_bytes


def left_out(kind: str, reason: str, **more: object) -> dict[str, object]:
    return (
        dict.fromkeys(QUARANTINE_SCHEMA.names) | {"phase": "plan", "kind": kind, "reason": reason, "source": "a"} | more
    )


def test_facts_of_a_packed_dataset(tmp_path: Path) -> None:
    dataset = open_dataset(str(packed_folders(tmp_path)))
    facts = gather_facts(dataset, num_tiles=9)
    assert facts.tally.num_images == dataset.num_samples == 15
    assert len(facts.manifest.shards) == 4
    assert facts.num_blocks == 7
    assert facts.class_names == ("c0", "c1", "c2")
    assert facts.class_counts.tolist() == [5, 5, 5]
    assert sum(facts.modes.values()) == 15
    assert facts.plan.settings["samples_per_shard"] == 4
    assert "pillow" in facts.plan.versions
    assert [tile.pick.labels for tile in facts.tiles] == [(0,)] * 3 + [(1,)] * 3 + [(2,)] * 3


def test_tars_made_by_others(tmp_path: Path) -> None:
    shutil.copytree(packed_folders(tmp_path) / "shards", tmp_path / "tars")
    assert run(IndexJob(url=str(tmp_path / "tars"), index_url=str(tmp_path / "index"))) == 0
    facts = gather_facts(open_dataset(str(tmp_path / "index")), num_tiles=6)
    assert facts.manifest.adopted
    assert len(facts.tiles) == 6
    assert facts.plan.settings["samples_per_block"] == 64


def test_the_same_dataset_gives_the_same_pictures(tmp_path: Path) -> None:
    url = str(packed_folders(tmp_path))
    first, second = (gather_facts(open_dataset(url), num_tiles=5).tiles for _ in range(2))
    assert first == second


def test_quarantine_is_grouped_by_the_general_part_of_the_reason(tmp_path: Path) -> None:
    rows = [
        *(left_out("refused", f"too large: {n} bytes, allowed: 9", source=f"{n}.jpg") for n in range(5)),
        *(left_out("refused", f"unknown label '{n}'") for n in range(2)),
        left_out("duplicate", "the same bytes as an image before it", match="b", distance=0),
        *(left_out("evaluation", f"a copy of an image of s3://e/{name}", distance=2) for name in "xyy"),
    ]
    write_dataset(open_store(str(tmp_path)), [[Sample()]], ["a"], quarantine=rows)
    groups = gather_facts(open_dataset(str(tmp_path)), num_tiles=0).quarantine
    assert [(group.kind, group.reason, group.count) for group in groups] == [
        ("refused", "too large", 5),
        ("evaluation", "a copy of an image of s3://e/y", 2),
        ("refused", "unknown label …", 2),
        ("duplicate", "the same bytes as an image before it", 1),
        ("evaluation", "a copy of an image of s3://e/x", 1),
    ]
    assert [image.source for image in groups[0].examples] == ["0.jpg", "1.jpg", "2.jpg"]
    assert groups[3].examples[0].match == "b"


@pytest.mark.parametrize(
    ("reasons", "general"),
    [
        ((f"a list.csv row {n}: the weight '{n}': allowed: numbers of 0 or more" for n in range(3)), "the weight …"),
        (
            (f"x: y.tsv.gz row {n}: a label is a dict; allowed: text" for n in range(3)),
            "a label is a dict",
        ),
        (
            (
                f"{name!r} is not a path below the source's root: no '..', and not absolute"
                for name in ("../x", "a: b", "it's")
            ),
            "… is not a path below the source's root",
        ),
        ((f"unknown label {name!r}" for name in ("cat", "a: b", "bob's", "x.csv row 3: y", "'\"")), "unknown label …"),
        (("damaged: 'a' is no 'b'", "damaged: 'c'"), "damaged"),
    ],
)
def test_reasons_that_differ_only_in_the_image_are_one_group(
    tmp_path: Path, reasons: Iterable[str], general: str
) -> None:
    rows = [left_out("refused", reason) for reason in reasons]
    write_dataset(open_store(str(tmp_path)), [[Sample()]], ["a"], quarantine=rows)
    groups = gather_facts(open_dataset(str(tmp_path)), num_tiles=0).quarantine
    assert [(group.reason, group.count) for group in groups] == [(general, len(rows))]


def test_endless_reasons_do_not_make_an_endless_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "MOST_GROUPS", 4)
    monkeypatch.setattr(card, "_ROWS_AT_ONCE", 7)
    rows = [left_out("refused", f"reason {n}") for n in range(50)]
    write_dataset(open_store(str(tmp_path)), [[Sample()]], ["a"], quarantine=rows)
    groups = gather_facts(open_dataset(str(tmp_path)), num_tiles=0).quarantine
    assert (groups[0].reason, groups[0].count) == ("other reasons", 46)
    assert len(groups) == 5
    assert len(groups[0].examples) == 3


def test_labels_that_occur_together(tmp_path: Path) -> None:
    shards = [[Sample(labels=(0, 3)), Sample(labels=(3,))], [Sample(labels=(3, 0, 1))]]
    write_dataset(open_store(str(tmp_path)), shards, list("abcd"))
    tally = gather_facts(open_dataset(str(tmp_path)), num_tiles=0).tally
    assert tally.top_classes.tolist() == [3, 0, 1]
    assert tally.together.tolist() == [[3, 2, 1], [2, 2, 1], [1, 1, 1]]


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

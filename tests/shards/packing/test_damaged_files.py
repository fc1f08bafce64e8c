"""Packing's own files, damaged or edited: made again where they are copies, refused in one message where not."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from shards.errors import InvalidDataError, UserError
from shards.index import index_bytes, read_commit, read_rows
from shards.manifest import index_path, sha256_hex
from shards.packing.config import PackSpec
from shards.packing.listing import LISTING_PATH, listed
from shards.packing.merge import merge
from shards.packing.plan import DROPPED_PATH, PLAN_PATH, Plan, read_plan
from shards.packing.planning import make_plan
from shards.packing.scan import SCAN_SCHEMA, is_scanned, scan_footer, scan_path
from shards.packing.write_shard import ShardTask, pack_shard, samples_of_shard
from shards.sources.kinds import FolderSource
from shards.store import Store, open_store
from shards.tables import table_bytes
from tests.rigs.images import class_folders
from tests.rigs.packing import pack_spec, planned, scanned
from tests.rigs.tables import read_table


@pytest.fixture
def spec(tmp_path: Path) -> PackSpec:
    return pack_spec(FolderSource(root=str(class_folders(tmp_path / "images", num_classes=2, images_a_class=3))))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "out"))


@pytest.mark.parametrize(
    "listing",
    [b"[" * 200_000, b"[]", b'{"scan_hash": 1}', b'{"scan_hash": "x", "slices": [{"sha256": "x"}]}', b"\xff"],
)
def test_a_damaged_listing_is_made_again(listing: bytes, store: Store, spec: PackSpec) -> None:
    before = listed(store, spec.source, scan_hash=spec.scan_hash())
    store.write(LISTING_PATH, listing)
    assert listed(store, spec.source, scan_hash=spec.scan_hash()) == before
    fields = json.loads(store.read(LISTING_PATH))
    fields["slices"][0]["num_images"] = -1
    store.write(LISTING_PATH, json.dumps(fields).encode())
    assert listed(store, spec.source, scan_hash=spec.scan_hash()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height": -1}, "column height has -1; allowed: 1 or more"),
        ({"labels": None}, "column labels is null in row 0"),
        ({"sha256": None}, "column sha256 is null in row 0"),
        ({"size": -5}, "column size has -5; allowed: 0 or more"),
        (None, "column .* a page header is damaged"),
    ],
)
def test_an_edited_scan_is_refused(
    change: dict[str, object] | None, message: str, store: Store, spec: PackSpec
) -> None:
    listing = scanned(store, spec)
    footer = scan_footer(spec.scan_hash(), listing.slices[0].sha256)
    data = store.read(scan_path(0))
    if change is None:
        store.write(scan_path(0), data[:4] + bytes(400) + data[404:])
    else:
        rows = [row | change for row in read_table(data).to_pylist()]
        store.write(scan_path(0), table_bytes(pa.Table.from_pylist(rows, schema=SCAN_SCHEMA.with_metadata(footer))))
    assert is_scanned(store, 0, footer)
    with pytest.raises(InvalidDataError, match=rf"scan-000000\.parquet cannot be used: {message}.*; delete it"):
        make_plan(store, spec, listing, workers=1)


def test_a_scan_with_a_damaged_footer_is_made_again(store: Store, spec: PackSpec) -> None:
    listing = scanned(store, spec)
    data = store.read(scan_path(0))
    store.write(scan_path(0), data[:-300] + bytes(200) + data[-100:])
    assert not is_scanned(store, 0, scan_footer(spec.scan_hash(), listing.slices[0].sha256))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 1 << 62}, "num_samples is 4611686018427387904; allowed: 0 to 1,099,511,627,776"),
        ({"num_samples": 1 << 30}, "says 2 shards for 1073741824 samples, 4 per shard"),
        ({"num_samples": -3}, "num_samples is -3; allowed: 0 to 1,099,511,627,776"),
        ({"num_shards": "2"}, "num_shards is '2'; allowed: a whole number"),
        ({"label_names": "ab"}, "label_names is 'ab'; allowed: a list"),
        ({"label_names": [1]}, "label_names.0 is 1; allowed: a text"),
        ({"files": []}, r"files is \[\]; allowed: an object"),
        ({"settings": 3}, "settings is 3; allowed: an object"),
        ({"format_version": [[]]}, r"its format version is \[\[\]\]; this version reads 2"),
        ({"more": 1}, "'more' is not a field"),
    ],
)
def test_an_edited_plan_is_refused(change: dict[str, object], message: str, store: Store, spec: PackSpec) -> None:
    planned(store, spec)
    store.write(PLAN_PATH, json.dumps(json.loads(store.read(PLAN_PATH)) | change).encode())
    with pytest.raises(UserError, match=rf"plan\.json .*{message}"):
        read_plan(store, spec)


def packed(store: Store, spec: PackSpec) -> Plan:
    plan = planned(store, spec)
    for shard in range(plan.num_shards):
        samples = plan.files[samples_of_shard(shard, spec)]
        pack_shard(
            ShardTask(
                url=store.url, plan_hash=plan.hash, spec=spec, shard=shard, samples_sha256=samples, max_quarantined=0.0
            )
        )
    return plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": (7,)}, "its labels are 7 to 7, allowed: 0 to below 2"),
        ({"labels": (-1,)}, "its labels are -1 to -1"),
        ({"offset": 1 << 62}, "its offsets do not rise from 512 to below"),
        ({"offset": -512}, "its offsets do not rise"),
    ],
)
def test_an_edited_index_is_refused(change: dict[str, object], message: str, store: Store, spec: PackSpec) -> None:
    """A label above the classes was left out of the counts, in silence."""
    plan = packed(store, spec)
    data = store.read(index_path(1))
    rows = [replace(row, **change) for row in read_rows(data)]  # type: ignore[arg-type]
    store.write(index_path(1), index_bytes(1, rows, read_commit(data)))
    with pytest.raises(InvalidDataError, match=rf"shard-000001\.parquet cannot be used: {message}.*; delete it"):
        merge(store, spec, plan, max_quarantined=0.0)


def test_other_dropped_images_are_refused(store: Store, spec: PackSpec) -> None:
    plan = packed(store, spec)
    store.write(DROPPED_PATH, store.read(DROPPED_PATH)[:-1])
    with pytest.raises(InvalidDataError, match=r"dropped\.parquet is not the plan's: its sha256 differs"):
        merge(store, spec, plan, max_quarantined=0.0)


def test_samples_of_another_kind_are_refused(store: Store, spec: PackSpec) -> None:
    """A plan that was edited together with its samples."""
    plan = planned(store, spec)
    path = samples_of_shard(0, spec)
    for data in (table_bytes(pa.table({"slot": [1]})), store.read(path)[:-20], b""):
        store.write(path, data)
        task = ShardTask(
            url=store.url, plan_hash=plan.hash, spec=spec, shard=0, samples_sha256=sha256_hex(data), max_quarantined=0.0
        )
        with pytest.raises(InvalidDataError, match=rf"{path} cannot be used: .*; delete .*plan\.json"):
            pack_shard(task)

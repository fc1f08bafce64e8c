"""A whole dataset: no faults in an intact one, the place of every fault in others, and files that belong to nothing."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.data.pack import PackJob, run
from shards.dataset import open_dataset
from shards.manifest import (
    BLOCKS_PATH,
    LABELS_PATH,
    MANIFEST_PATH,
    QUARANTINE_PATH,
    Manifest,
    index_path,
    sha256_hex,
    shard_path,
)
from shards.packing.plan import PLAN_PATH
from shards.sources.image_lists import ManifestSource
from shards.store import Store, open_store
from shards.tables import table_bytes
from shards.verifying.verify import strays, verify_dataset
from tests.rigs.datasets import packed_folders
from tests.rigs.images import image_bytes
from tests.rigs.tables import read_table

LEFT = ("work/listing-000000.parquet", "work/adopted-000007.parquet")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(packed_folders(tmp_path)))


def test_a_good_dataset_has_no_faults(store: Store) -> None:
    assert verify_dataset(store.url) == []
    assert verify_dataset(store.url, deep=True) == []


def test_a_corrupted_byte_in_a_tar_is_found_and_placed(store: Store) -> None:
    data = bytearray(store.read(shard_path(2)))
    data[700] ^= 1
    store.write(shard_path(2), bytes(data))
    faults = verify_dataset(store.url)
    assert {fault.where for fault in faults} == {shard_path(2)}
    assert any("sha256" in fault.what for fault in faults)
    assert any("crc32 of row 0" in fault.what for fault in faults)


@pytest.mark.parametrize("path", [BLOCKS_PATH, QUARANTINE_PATH, PLAN_PATH, index_path(1), "plan/samples-00000.parquet"])
@pytest.mark.parametrize("damage", ["changed", "missing", "emptied"])
def test_every_other_file_is_covered(store: Store, path: str, damage: str) -> None:
    if damage == "missing":
        store.delete(path)
    else:
        store.write(path, b"" if damage == "emptied" else store.read(path).replace(b"a", b"b", 1))
    assert path in {fault.where for fault in verify_dataset(store.url)}


@pytest.mark.parametrize("path", [shard_path(1), index_path(3)])
def test_a_missing_shard_or_index_is_found_once(store: Store, path: str) -> None:
    store.delete(path)
    assert [(fault.where, fault.what) for fault in verify_dataset(store.url)] == [(path, "is missing")]


def test_workers_find_the_same_faults_in_the_same_order(store: Store) -> None:
    for shard in (0, 2):
        store.write(shard_path(shard), bytes(store.size(shard_path(shard))))
    assert verify_dataset(store.url, workers=2) == verify_dataset(store.url) != []


def test_an_image_that_is_nowhere_is_found(store: Store) -> None:
    """All hashes of the dataset match, but its plan lost an image."""
    plan = json.loads(store.read(PLAN_PATH))
    samples = read_table(store.read("plan/samples-00000.parquet"))
    place = samples.schema.get_field_index("position")
    positions = pa.array([*samples.column("position").to_pylist()[:-1], 0], pa.int64())
    data = table_bytes(samples.set_column(place, "position", positions), row_group_size=4)
    store.write("plan/samples-00000.parquet", data)
    plan["files"]["plan/samples-00000.parquet"] = sha256_hex(data)
    store.write(PLAN_PATH, json.dumps(plan, sort_keys=True, indent=1).encode() + b"\n")
    what = {fault.what for fault in verify_dataset(store.url) if fault.where == PLAN_PATH}
    assert any("in no shard and not among the dropped" in item for item in what)
    assert any("position 0 is in more than one place" in item for item in what)


def test_a_shard_that_nobody_knows_is_found(store: Store) -> None:
    store.write("shards/shard-000099.tar", b"")
    (fault,) = verify_dataset(store.url)
    assert fault.where == "shards/shard-000099.tar"


@pytest.fixture
def lists(tmp_path: Path) -> Store:
    """Two weighted labels per image, one image refused, one duplicate."""
    rows = [f"{number}.jpg,a|b,{number}|0.5" for number in range(9)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,score", *rows]) + "\n")
    for number in range(9):
        (tmp_path / f"{number}.jpg").write_bytes(b"" if number == 3 else image_bytes(number % 8))
    source = ManifestSource(files=(str(tmp_path / "list.csv"),), weights_column="score", separator="|")
    job = PackJob(
        out=str(tmp_path / "out"), source=source, samples_per_shard=4, samples_per_block=3, max_quarantined=0.5
    )
    assert run(job) == 0
    return open_store(job.out)


def column_of(name: str, value: object) -> Callable[[pa.Table], pa.Table]:
    """A change that sets this value in every row."""

    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(name)
        return table.set_column(
            place, table.schema[place], pa.array([value] * table.num_rows, table.schema[place].type)
        )

    return change


@pytest.mark.parametrize(
    ("path", "change", "where", "what"),
    [
        (index_path(0), column_of("labels", [0, 0]), shard_path(0), "labels (0, 0), by the plan (0, 1)"),
        (index_path(0), column_of("weights", [9.0, 9.0]), shard_path(0), "weights (9.0, 9.0), by the plan"),
        (index_path(0), column_of("orientation", 6), shard_path(0), "another orientation than row 0"),
        (QUARANTINE_PATH, lambda table: table.slice(0, 0), QUARANTINE_PATH, "position 3 is not in it"),
        (QUARANTINE_PATH, lambda table: table.slice(1), QUARANTINE_PATH, "has 1 rows, the manifest says 2"),
        (QUARANTINE_PATH, column_of("kind", "refused"), QUARANTINE_PATH, "position 8 has another kind"),
        (LABELS_PATH, column_of("name", "x"), LABELS_PATH, "row 0 has label, name, num_samples (0, 'x', 7)"),
        (LABELS_PATH, column_of("num_samples", 1), LABELS_PATH, "they should be (1, 'b', 7)"),
        (LABELS_PATH, lambda table: table.slice(0, 1), LABELS_PATH, "has 1 rows, the plan has 2 classes"),
        (
            LABELS_PATH,
            lambda table: table.drop_columns("name"),
            LABELS_PATH,
            "column name is missing",
        ),
    ],
)
def test_tables_changed_with_their_hashes_are_found(
    lists: Store, path: str, change: Callable[[pa.Table], pa.Table], where: str, what: str
) -> None:
    assert verify_dataset(lists.url, deep=True) == []
    data = table_bytes(change(read_table(lists.read(path))))
    manifest = Manifest.from_bytes(lists.read(MANIFEST_PATH))
    lists.write(path, data)
    lists.write(MANIFEST_PATH, replace(manifest, files={**manifest.files, path: sha256_hex(data)}).to_bytes())
    assert any(what in fault.what for fault in verify_dataset(lists.url) if fault.where == where)


@pytest.mark.parametrize(("name", "value"), [("num_classes", 100), ("split", "test"), ("num_quarantined", 5)])
def test_a_changed_manifest_is_found(lists: Store, name: str, value: object) -> None:
    manifest = Manifest.from_bytes(lists.read(MANIFEST_PATH))
    lists.write(MANIFEST_PATH, replace(manifest, **{name: value}).to_bytes())  # type: ignore[arg-type]
    assert MANIFEST_PATH in {fault.where for fault in verify_dataset(lists.url)}


@pytest.mark.parametrize("num_bytes", [0, 100, 700, 3000])
def test_a_truncated_tar_is_blamed_and_every_check_runs(store: Store, num_bytes: int) -> None:
    store.write(shard_path(1), store.read(shard_path(1))[:num_bytes])
    faults = verify_dataset(store.url, deep=True)
    assert {fault.where for fault in faults} == {shard_path(1)}
    whats = [fault.what for fault in faults]
    for expected in (
        f"has {num_bytes} bytes",
        "its sha256",
        "crc32 of row 3",
        "webdataset",
        "does not decode",
        ".json",
    ):
        assert any(expected in what for what in whats), expected


def test_leftovers_are_named(store: Store) -> None:
    (Path(store.url) / "shards" / ".tmp-shard-000000.tar.0").write_bytes(b"")
    store.write("work/listing.json", b"")
    store.write("plan/scan-000099.parquet", b"")
    assert [fault.where for fault in verify_dataset(store.url)] == [
        "plan/scan-000099.parquet",
        "work/listing.json",
        "shards/.tmp-shard-000000.tar.0",
    ]


def test_sample_ids_must_run_on(store: Store) -> None:
    text = store.read(MANIFEST_PATH)
    store.write(MANIFEST_PATH, text.replace(b'"first_sample_id": 8', b'"first_sample_id": 9'))
    (fault,) = verify_dataset(store.url)
    assert (fault.where, "first_sample_id of 'shards/shard-000002.tar' is 9; allowed: 8" in fault.what) == (
        MANIFEST_PATH,
        True,
    )


def test_many_faults_of_one_kind_are_counted_not_listed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.verifying.verify.MAX_FAULTS_A_CHECK", 1)
    store.write(shard_path(0), bytes(store.size(shard_path(0))))
    assert "and 3 more of this kind" in {fault.what for fault in verify_dataset(store.url)}


def test_a_setting_of_the_plan_that_nobody_knows_is_said_in_our_words(store: Store) -> None:
    plan = json.loads(store.read(PLAN_PATH))
    plan["settings"]["resize"]["sharpness"] = 1
    store.write(PLAN_PATH, json.dumps(plan).encode())
    said = [fault.what for fault in verify_dataset(store.url)]
    assert any("settings.resize.'sharpness' is not a field; allowed: short_side" in what for what in said), said
    assert not [what for what in said if "__init__" in what]


def test_strays_and_what_writers_left(tmp_path: Path) -> None:
    dataset = open_dataset(str(packed_folders(tmp_path)))
    assert list(strays(dataset.store, dataset.manifest)) == []
    unlisted = ("shards/shard-000099.tar", "index/notes.txt", "plan/scan-000099.parquet")
    unfinished = ("shards/.tmp-shard-000001.tar.0123", "plan/.tmp-plan.json.0123")
    for path in (*unlisted, *LEFT, *unfinished):
        (tmp_path / "packed" / path).parent.mkdir(exist_ok=True)
        (tmp_path / "packed" / path).write_bytes(b"")
    found = {fault.where: fault.what for fault in strays(dataset.store, dataset.manifest)}
    assert set(found) == {*unlisted, *LEFT, *unfinished}
    assert {found[path] for path in unlisted} == {"is not in the manifest"}
    assert all("left" in found[path] for path in (*LEFT, *unfinished))
    adopted = replace(dataset.manifest, adopted=True)
    assert [fault.where for fault in strays(dataset.store, adopted)] == ["index/notes.txt", LEFT[1]]

"""Making the plan: every image once, in one permutation, whatever was left out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import UserError
from shards.packing.config import Dedup, PackSpec
from shards.packing.deal import shards_per_file
from shards.packing.listing import listed
from shards.packing.plan import DROPPED_PATH, PLAN_PATH, Plan
from shards.packing.planning import make_plan, permutation, sorted_labels
from shards.packing.scan import scan_path
from shards.packing.write_shard import PlannedSample, planned_samples
from shards.sources.kinds import FolderSource, ParquetSource
from shards.store import Store, open_store
from tests.rigs.images import class_folders, image_bytes
from tests.rigs.packing import pack_spec, planned, scanned
from tests.rigs.tables import read_table


@pytest.fixture
def spec(tmp_path: Path) -> PackSpec:
    root = class_folders(tmp_path / "images", num_classes=3, images_a_class=5)
    return pack_spec(FolderSource(root=str(root)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "out"))


def samples_of(store: Store, plan: Plan) -> list[PlannedSample]:
    size = plan.settings["samples_per_shard"]
    assert isinstance(size, int)
    return [
        sample for shard in range(plan.num_shards) for sample in planned_samples(store, shard, samples_per_shard=size)
    ]


def dropped_of(store: Store) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = read_table(store.read(DROPPED_PATH)).to_pylist()
    return rows


def test_every_image_is_dealt_once_in_the_permuted_order(store: Store, spec: PackSpec) -> None:
    plan = planned(store, spec)
    assert (plan.num_samples, plan.num_shards, plan.label_names) == (15, 4, ("c0", "c1", "c2"))
    samples = samples_of(store, plan)
    assert [sample.slot for sample in samples] == list(range(15))
    assert [sample.position for sample in samples] == permutation(np.arange(15), seed=1).tolist()
    assert all(sample.source.startswith(f"c{sample.labels[0]}/") for sample in samples)
    assert dropped_of(store) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_many_slices_and_files_change_no_sample(
    store: Store, spec: PackSpec, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = samples_of(store, planned(store, replace(spec, samples_per_shard=2)))
    if workers == 1:  # spawned workers import the modules afresh
        monkeypatch.setattr("shards.packing.deal.SAMPLES_A_FILE", 6)
        monkeypatch.setattr("shards.packing.planning.SCANS_A_TASK", 2)
    monkeypatch.setattr("shards.packing.listing.SLICE_ENTRIES", 2)
    other = open_store(str(tmp_path / "other"))
    small = replace(spec, samples_per_shard=2)
    plan = make_plan(other, small, scanned(other, small), workers=workers)
    assert len([path for path in plan.files if "scan" in path]) == 8
    assert len([path for path in plan.files if "samples" in path]) == (3 if workers == 1 else 1)
    assert samples_of(other, plan) == expected


@pytest.mark.parametrize(("samples_per_shard", "files"), [(1, 256), (1000, 256), (10_000, 26), (10**9, 1)])
def test_a_samples_file_has_a_bounded_number_of_rows(samples_per_shard: int, files: int) -> None:
    assert shards_per_file(samples_per_shard) == files


def test_duplicates_are_left_out_and_listed_with_the_one_that_stays(store: Store, spec: PackSpec) -> None:
    root = Path(spec.source.root)  # type: ignore[union-attr]
    (root / "c2" / "again.jpg").write_bytes((root / "c0" / "img 0.JPEG").read_bytes())
    (root / "c0" / "again.jpg").write_bytes((root / "c0" / "img 0.JPEG").read_bytes())
    plan = planned(store, spec)
    assert (plan.num_samples, plan.num_duplicates, plan.num_relabelled, plan.num_refused) == (15, 2, 1, 0)
    rows = dropped_of(store)
    # "again" sorts before "img 0": it is the first of the three.
    assert [(row["source"], row["kind"], row["match"]) for row in rows] == [
        ("c0/img 0.JPEG", "duplicate", "c0/again.jpg"),
        ("c2/again.jpg", "duplicate", "c0/again.jpg"),
    ]
    [kept] = [sample for sample in samples_of(store, plan) if sample.source == "c0/again.jpg"]
    assert kept.labels == (0,)


def test_duplicates_may_merge_their_labels_or_all_be_kept(tmp_path: Path, spec: PackSpec) -> None:
    root = Path(spec.source.root)  # type: ignore[union-attr]
    (root / "c2" / "again.jpg").write_bytes((root / "c0" / "img 0.JPEG").read_bytes())
    merged = open_store(str(tmp_path / "merged"))
    plan = planned(merged, replace(spec, dedup=Dedup(duplicates="merge")))
    labels = {sample.source: sample.labels for sample in samples_of(merged, plan)}
    assert labels["c0/img 0.JPEG"] == (0, 2)
    assert "c2/again.jpg" not in labels
    every = open_store(str(tmp_path / "every"))
    plan = planned(every, replace(spec, dedup=Dedup(duplicates="keep")))
    assert (plan.num_samples, plan.num_duplicates) == (16, 0)


def test_dropping_an_image_moves_no_other(store: Store, spec: PackSpec, tmp_path: Path) -> None:
    before = [sample.source for sample in samples_of(store, planned(store, spec))]
    (Path(spec.source.root) / "c1" / "img 0.JPEG").write_bytes(b"")  # type: ignore[union-attr]
    other = open_store(str(tmp_path / "other"))
    after = samples_of(other, planned(other, spec))
    assert [sample.source for sample in after] == [source for source in before if source != "c1/img 0.JPEG"]
    assert [(row["source"], row["reason"]) for row in dropped_of(other)] == [("c1/img 0.JPEG", "empty file")]


def test_labels_may_be_given_in_a_file_and_others_are_refused(store: Store, spec: PackSpec, tmp_path: Path) -> None:
    names = tmp_path / "labels.txt"
    names.write_text("c2\n\nc0\n")
    plan = planned(store, replace(spec, labels_file=str(names)))
    assert (plan.label_names, plan.num_samples, plan.num_refused) == (("c2", "c0"), 10, 5)
    assert {row["reason"] for row in dropped_of(store)} == {"unknown label 'c1'"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "names no class"),
        (b"a\nb\na\n", "the classes 0 and 2 are both"),
        (b"\xff", "cannot"),
    ],
)
def test_a_bad_labels_file_is_refused(
    store: Store, spec: PackSpec, tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "labels.txt").write_bytes(content)
    with pytest.raises(UserError, match=rf"--labels-file .*{message}"):
        planned(store, replace(spec, labels_file=str(tmp_path / "labels.txt")))


def test_many_labels_with_weights_come_through(store: Store, tmp_path: Path) -> None:
    rows = [
        {"image": {"bytes": image_bytes(n), "path": f"{n}.jpg"}, "label": [f"l{k}" for k in range(n)]} for n in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    plan = planned(store, pack_spec(ParquetSource(files=(str(tmp_path / "a.parquet"),))))
    assert {sample.source: sample.labels for sample in samples_of(store, plan)} == {
        f"{n}.jpg": tuple(range(n)) for n in (1, 2, 3)
    }
    assert [row["reason"] for row in dropped_of(store)] == ["no label"]


def test_an_incomplete_scan_is_refused(store: Store, spec: PackSpec) -> None:
    listing = listed(store, spec.source, scan_hash=spec.scan_hash())
    with pytest.raises(UserError, match=r"scan-000000\.parquet is missing.*--phase scan"):
        make_plan(store, spec, listing, workers=1)


def test_a_scan_of_other_settings_is_refused(store: Store, spec: PackSpec) -> None:
    scanned(store, spec)
    root = Path(spec.source.root)  # type: ignore[union-attr]
    (root / "c1" / "late.jpg").write_bytes(image_bytes(5))
    changed = listed(store, spec.source, scan_hash=spec.scan_hash(), relist=True)
    with pytest.raises(UserError, match="the scan of another source or of other settings"):
        make_plan(store, spec, changed, workers=1)
    assert not store.exists(PLAN_PATH)


def test_a_source_without_one_good_image_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "bad" / "c").mkdir(parents=True)
    (tmp_path / "bad" / "c" / "x.jpg").write_bytes(b"")
    with pytest.raises(UserError, match="no usable image"):
        planned(store, pack_spec(FolderSource(root=str(tmp_path / "bad"))))
    assert store.exists(scan_path(0))


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        ({"b", "a"}, ("a", "b")),
        ({"10", "9", "2"}, ("2", "9", "10")),
        ({"1", "-1", "0"}, ("-1", "0", "1")),
        ({"10", "9", "x"}, ("10", "9", "x")),
        ({"n02", "n01"}, ("n01", "n02")),
    ],
)
def test_labels_get_ids_in_sorted_order(names: set[str], ids: tuple[str, ...]) -> None:
    assert sorted_labels(names) == ids


@given(count=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), dropped=st.integers(0, 299))
def test_the_permutation_is_exact_and_dropping_one_moves_no_other(count: int, seed: int, dropped: int) -> None:
    positions = np.arange(count)
    order = positions[permutation(positions, seed=seed)]
    assert sorted(order.tolist()) == list(range(count))
    fewer = positions[positions != dropped]
    assert fewer[permutation(fewer, seed=seed)].tolist() == [p for p in order.tolist() if p != dropped]

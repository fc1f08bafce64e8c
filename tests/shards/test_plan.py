"""The plan: who is dealt where, and when it is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import UserError
from shards.pack import planned_samples
from shards.plan import (
    PLAN_PATH,
    PackSpec,
    Plan,
    make_plan,
    permutation,
    read_plan,
    refuse_other_versions,
    sorted_labels,
)
from shards.scan import ScanTask, scan_path, scan_slice, slices
from shards.sources import FolderSource, Source
from shards.store import Store, open_store
from tests.rigs.images import class_folders, image_bytes


def scanned(store: Store, source: Source) -> None:
    """Scan all of a source."""
    for part in slices(source):
        scan_slice(ScanTask(url=store.url, source=source, slice=part))


@pytest.fixture
def spec(tmp_path: Path) -> PackSpec:
    root = class_folders(tmp_path / "images", num_classes=3, images_a_class=5)
    source = FolderSource(root=str(root))
    return PackSpec(source=source, split="train", samples_per_shard=4, samples_per_block=2, seed=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "out"))


def test_every_image_is_dealt_once_in_the_permuted_order(store: Store, spec: PackSpec) -> None:
    scanned(store, spec.source)
    plan = make_plan(store, spec)
    assert (plan.num_samples, plan.num_shards, plan.label_names) == (15, 4, ("c0", "c1", "c2"))
    samples = [sample for shard in range(4) for sample in planned_samples(store, shard)]
    assert [sample.slot for sample in samples] == list(range(15))
    assert [sample.position for sample in samples] == permutation(np.arange(15), seed=1).tolist()
    assert all(sample.source.startswith(f"c{sample.label}/") for sample in samples)


def test_many_shards_span_several_files(store: Store, spec: PackSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("plan", "pack"):
        monkeypatch.setattr(f"shards.{module}.SHARDS_PER_FILE", 3)
    scanned(store, spec.source)
    plan = make_plan(store, replace(spec, samples_per_shard=2))
    assert sorted(path for path in plan.files if "samples" in path) == [
        f"plan/samples-{number:05d}.parquet" for number in range(3)
    ]
    assert [s.slot for shard in range(8) for s in planned_samples(store, shard)] == list(range(15))


def test_the_plan_is_read_back_and_hashes_its_bytes(store: Store, spec: PackSpec) -> None:
    assert read_plan(store, spec) is None
    scanned(store, spec.source)
    plan = make_plan(store, spec)
    again = read_plan(store, spec)
    assert again == plan
    assert Plan.from_bytes(store.read(PLAN_PATH)).hash == plan.hash


@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"samples_per_shard": 5}, {"split": "test"}, {"source": FolderSource(root="elsewhere")}],
)
def test_a_plan_of_other_settings_is_refused(store: Store, spec: PackSpec, change: dict[str, object]) -> None:
    scanned(store, spec.source)
    make_plan(store, spec)
    with pytest.raises(UserError, match=f"planned with other settings: {next(iter(change))}"):
        read_plan(store, replace(spec, **change))  # type: ignore[arg-type]


def test_other_library_versions_are_refused(store: Store, spec: PackSpec) -> None:
    scanned(store, spec.source)
    plan = make_plan(store, spec)
    refuse_other_versions(plan, spec.source)
    with pytest.raises(UserError, match=r"0\.0"):
        refuse_other_versions(replace(plan, versions={"numpy": "0.0"}), spec.source)


def test_an_incomplete_scan_is_refused(store: Store, spec: PackSpec) -> None:
    with pytest.raises(UserError, match=r"scan-000000\.parquet is missing.*--phase scan"):
        make_plan(store, spec)


def test_a_source_that_changed_after_its_scan_is_refused(store: Store, spec: PackSpec, tmp_path: Path) -> None:
    scanned(store, spec.source)
    (tmp_path / "images" / "c1" / "late.jpg").write_bytes(image_bytes(5))
    with pytest.raises(UserError, match="has changed since"):
        make_plan(store, spec)
    assert not store.exists(PLAN_PATH)


def test_a_damaged_plan_is_refused(store: Store, spec: PackSpec) -> None:
    store.write(PLAN_PATH, b"{}")
    with pytest.raises(UserError, match="not a plan"):
        read_plan(store, spec)


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (["b", "a", "b"], ("a", "b")),
        (["10", "9", "2"], ("2", "9", "10")),
        (["1", "-1", "0"], ("-1", "0", "1")),
        (["10", "9", "x"], ("10", "9", "x")),
        (["n02", "n01", None], ("n01", "n02")),
    ],
)
def test_labels_get_ids_in_sorted_order(names: list[str | None], ids: tuple[str, ...]) -> None:
    assert sorted_labels(pa.chunked_array([names], pa.string())) == ids


@given(count=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), dropped=st.integers(0, 299))
def test_the_permutation_is_exact_and_dropping_one_moves_no_other(count: int, seed: int, dropped: int) -> None:
    positions = np.arange(count)
    order = positions[permutation(positions, seed=seed)]
    assert sorted(order.tolist()) == list(range(count))
    fewer = positions[positions != dropped]
    assert fewer[permutation(fewer, seed=seed)].tolist() == [p for p in order.tolist() if p != dropped]


def test_impossible_sizes_are_refused(spec: PackSpec) -> None:
    for change, message in (({"samples_per_shard": 0}, "at least 1"), ({"seed": -1}, "seed is -1")):
        with pytest.raises(UserError, match=message):
            replace(spec, **change)  # type: ignore[arg-type]


def test_a_source_without_one_good_image_is_refused(store: Store, tmp_path: Path, spec: PackSpec) -> None:
    (tmp_path / "bad" / "c").mkdir(parents=True)
    (tmp_path / "bad" / "c" / "x.jpg").write_bytes(b"")
    source = FolderSource(root=str(tmp_path / "bad"))
    scanned(store, source)
    assert store.exists(scan_path(0))
    with pytest.raises(UserError, match="no usable image"):
        make_plan(store, replace(spec, source=source))

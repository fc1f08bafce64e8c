"""shards.parquet, which lists the shards of large datasets: it says what manifest.json would, and nothing else is
believed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs.data import index as index_stage
from jobs.data.pack import PackJob, run
from jobs.settings.data import IndexJob
from shards.dataset import open_dataset
from shards.errors import InvalidDataError
from shards.manifest import MANIFEST_PATH, SHARDS_PATH, Manifest, index_path
from shards.manifest_table import manifest_from, read_manifest, table_of
from shards.sources.kinds import FolderSource
from shards.store import Store, open_store
from shards.verifying.verify import verify_dataset
from tests.rigs.datasets import file_hashes, packed_folders
from tests.rigs.hostile_datasets import Change, cell, change_table, rehash, write_manifest

NUM_SHARDS = 4


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same 15 images in four shards, which manifest.json lists, and shards.parquet."""
    folder = tmp_path_factory.mktemp("table")
    listed = packed_folders(folder).rename(folder / "listed")
    shutil.rmtree(folder / "images")  # made again: the plan names the folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shards.manifest_table.MOST_LISTED_SHARDS", NUM_SHARDS - 1)
        return listed, packed_folders(folder)


@pytest.fixture
def store(both: tuple[Path, Path], tmp_path: Path) -> Store:
    return open_store(str(shutil.copytree(both[1], tmp_path / "packed")))


def said(manifest: Manifest) -> dict[str, Any]:
    """All that a manifest says, but for its format."""
    files = {path: sha256 for path, sha256 in manifest.files.items() if path != SHARDS_PATH}
    assert len(dict(manifest.files)) == len(manifest.files)
    shards = [vars(shard) for shard in manifest.shards]
    return vars(manifest) | {"format_version": 0, "files": dict(sorted(files.items())), "shards": shards}


def test_the_table_says_what_manifest_json_would(both: tuple[Path, Path]) -> None:
    listed, table = (read_manifest(open_store(str(folder)))[0] for folder in both)
    assert (listed.format_version, table.format_version) == (2, 3)
    assert said(table) == said(listed)
    assert table.shards[1:3] == tuple(listed.shards[1:3])
    for name in ("first_sample_id", "num_samples", "num_bytes"):
        assert table.shard_column(name).tolist() == listed.shard_column(name).tolist()
    for manifest in (listed, table):
        assert said(manifest_from(table_of(manifest))) == said(manifest)
    found = [file_hashes(folder) for folder in both]
    assert found[1].keys() - found[0].keys() == {SHARDS_PATH}
    assert {path for path in found[0] if found[0][path] != found[1][path]} == {MANIFEST_PATH}
    assert not verify_dataset(str(both[1]))
    assert len(json.loads((both[1] / MANIFEST_PATH).read_text())["files"]) < len(listed.files)


def test_a_description_changes_no_other_byte(store: Store, both: tuple[Path, Path]) -> None:
    before, fingerprint = file_hashes(Path(store.url)), open_dataset(store.url).fingerprint
    source = FolderSource(root=str(both[0].parent / "images"))
    sizes: dict[str, Any] = {"samples_per_shard": 4, "samples_per_block": 3}
    assert run(PackJob(out=store.url, source=source, description="fifteen images", **sizes)) == 0
    dataset = open_dataset(store.url)
    assert (dataset.manifest.description, dataset.fingerprint) == ("fifteen images", fingerprint)
    after = file_hashes(Path(store.url))
    assert {path for path in after if after[path] != before[path]} == {MANIFEST_PATH}


def test_a_smaller_packing_removes_it(store: Store, both: tuple[Path, Path]) -> None:
    shutil.rmtree(Path(store.url) / "plan")
    source = FolderSource(root=str(both[0].parent / "images"))
    assert run(PackJob(out=store.url, source=source, samples_per_shard=4, samples_per_block=3)) == 0
    assert file_hashes(Path(store.url)) == file_hashes(both[0])


def test_a_file_of_the_same_name_beside_tars_of_others_stays(both: tuple[Path, Path], tmp_path: Path) -> None:
    tars = Path(shutil.copytree(both[0] / "shards", tmp_path / "tars"))
    (tars / SHARDS_PATH).write_text("somebody's own")
    assert index_stage.run(IndexJob(url=str(tars))) == 0
    assert (tars / SHARDS_PATH).read_text() == "somebody's own"


def test_tars_of_others_have_one_too(both: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.manifest_table.MOST_LISTED_SHARDS", NUM_SHARDS - 1)
    url = str(shutil.copytree(both[0] / "shards", tmp_path / "tars"))
    for _ in range(2):  # the second finds it done
        assert index_stage.run(IndexJob(url=url)) == 0
        assert open_dataset(url).manifest.format_version == 3
        assert not verify_dataset(url)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (cell("path", 1, "../outside.tar"), "the path of a shard is '../outside.tar'"),
        (cell("path", 1, "shards/shard-000000.tar"), "the shard 'shards/shard-000000.tar' is there twice"),
        (cell("path", 2, None), "column path is null in row 2"),
        (cell("num_samples", 0, -4), "column num_samples has -4"),
        (cell("num_samples", 0, 5), "num_samples is 15, but its shards hold another number"),
        (cell("num_bytes", 3, 0), "column num_bytes has 0"),
        (cell("sha256", 0, None), "column sha256 is null in row 0"),
        (lambda table: table.drop_columns(["sha256"]), "column sha256 is missing"),
        (lambda table: table.set_column(1, "num_samples", pa.array([4.0] * 4)), "is of type 'double'"),
        (lambda table: table.slice(0, 3), "its shards hold another number"),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(store: Store, change: Change, what: str) -> None:
    change_table(store, SHARDS_PATH, change)
    with pytest.raises(InvalidDataError) as caught:
        open_dataset(store.url)
    assert what in str(caught.value)
    assert f"{store.url}/{MANIFEST_PATH} cannot be read" in str(caught.value)
    assert [fault.where for fault in verify_dataset(store.url)] == [MANIFEST_PATH]


def test_another_table_than_the_manifests_is_refused(store: Store) -> None:
    data = store.read(SHARDS_PATH)
    store.write(SHARDS_PATH, data[:-1])
    with pytest.raises(InvalidDataError, match=f"{SHARDS_PATH} is not the file that the manifest has the sha256 of"):
        open_dataset(store.url)
    rehash(store, SHARDS_PATH, b"PAR1")
    with pytest.raises(InvalidDataError, match=f"{SHARDS_PATH}: not a"):
        open_dataset(store.url)
    store.delete(SHARDS_PATH)
    with pytest.raises(InvalidDataError, match=f"no object '{SHARDS_PATH}'.*but .*{MANIFEST_PATH} names it"):
        open_dataset(store.url)


def test_a_manifest_has_its_shards_in_one_place(store: Store) -> None:
    with pytest.raises(ValueError, match=f"its shards are in {SHARDS_PATH}"):
        Manifest.from_bytes(store.read(MANIFEST_PATH))
    manifest = json.loads(store.read(MANIFEST_PATH))
    write_manifest(store, manifest | {"shards": []})
    with pytest.raises(InvalidDataError, match="'shards' is not a field"):
        open_dataset(store.url)
    write_manifest(store, manifest | {"files": manifest["files"] | {index_path(0): "ab" * 32}})
    with pytest.raises(InvalidDataError, match=r"files has 'index/shard-000000\.parquet'"):
        open_dataset(store.url)

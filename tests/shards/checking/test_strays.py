"""Files that belong to nothing are named; files of a dataset, and other files beside adopted tars, are not."""

from dataclasses import replace
from pathlib import Path

from shards.checking.strays import strays
from shards.dataset import open_dataset
from tests.rigs.datasets import packed_folders

LEFT = ("work/listing-000000.parquet", "work/adopted-000007.parquet")


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

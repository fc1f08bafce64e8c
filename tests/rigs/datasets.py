"""Small packed datasets for tests, and the hashes of their files."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from jobs.data.pack import PackJob, run
from shards.dataset import Dataset
from shards.index import IndexRow, read_rows
from shards.manifest import index_path
from shards.sources.kinds import FolderSource, ManifestSource
from shards.store import Store
from tests.rigs.images import class_folders, image_bytes


def packed_folders(folder: Path, *, num_classes: int = 3, images_a_class: int = 5) -> Path:
    """Packs generated class folders into `folder`/packed: shards of 4 samples, blocks of 3."""
    root = class_folders(folder / "images", num_classes=num_classes, images_a_class=images_a_class)
    out = folder / "packed"
    source = FolderSource(root=str(root))
    assert run(PackJob(out=str(out), source=source, samples_per_shard=4, samples_per_block=3)) == 0
    return out


def packed_with_undecodable(folder: Path) -> Path:
    """As `packed_folders`, plus one image, c0/spoiled.jpg, with a valid header and data that no decoder accepts."""
    root = class_folders(folder / "images")
    good = image_bytes(99)
    body = good.index(b"\xff\xda") + 14  # after the header of the scan
    (root / "c0" / "spoiled.jpg").write_bytes(good[:body] + b"\xff\xc4" + good[body + 40 :])
    out = folder / "packed"
    assert (
        run(PackJob(out=str(out), source=FolderSource(root=str(root)), samples_per_shard=4, samples_per_block=3)) == 0
    )
    return out


def packed_with_weights(folder: Path, rows: Sequence[str]) -> Path:
    """Packs a list of generated images, one per row `a|b,1|0.5` of labels and their weights (`a,`: without weights)."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(len(rows)):
        (folder / f"{number}.jpg").write_bytes(image_bytes(number))
    lines = ["path,label,score", *(f"{number}.jpg,{row}" for number, row in enumerate(rows))]
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    source = ManifestSource(files=(str(folder / "list.csv"),), weights_column="score", separator="|")
    out = folder / "packed"
    assert run(PackJob(out=str(out), source=source, samples_per_shard=4, samples_per_block=3)) == 0
    return out


def index_rows(dataset: Dataset, shard: int) -> list[IndexRow]:
    """All that a shard's index says of its samples."""
    return read_rows(dataset.checked_file(index_path(shard)))


def file_hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file below `folder`, including hidden files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def object_hashes(store: Store) -> dict[str, str]:
    """sha256 of every object of a store."""
    return {path: hashlib.sha256(store.read(path)).hexdigest() for path in store.list()}

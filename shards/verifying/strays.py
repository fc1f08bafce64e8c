"""Files in a dataset's folders that do not belong to it: not in the manifest, or left by a writer."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shards.manifest import Manifest
from shards.storage.local import temporary_files
from shards.store import Store

_ADOPTED_LEFT = re.compile(r"work/adopted-\d{6,}\.parquet")


@dataclass(frozen=True, kw_only=True)
class DatasetFault:
    """What is wrong, and in which object of the dataset."""

    where: str
    what: str


def strays(store: Store, manifest: Manifest) -> Iterator[DatasetFault]:
    """Finds files that do not belong there. For adopted tars, only index/ and our own work files are checked: anything
    else may lie next to them."""
    known = {record.path for record in manifest.shards} | set(manifest.files)
    folders = ("index",) if manifest.adopted else ("shards", "index", "plan")
    for path in (path for folder in folders for path in store.list(folder)):
        if path not in known:
            yield DatasetFault(where=path, what="is not in the manifest")
    for path in store.list("work"):
        if not manifest.adopted or _ADOPTED_LEFT.fullmatch(path):
            yield DatasetFault(
                where=path, what="is left over from packing; a finished dataset does not need it: delete it"
            )
    for path in _unfinished(store, folders):
        yield DatasetFault(where=path, what="is an unfinished write that a killed process left; delete it")


def _unfinished(store: Store, folders: tuple[str, ...]) -> Iterator[str]:
    """Temporary files, which a folder's store does not list; unfinished uploads to S3 are not files."""
    for folder in folders:
        if (local := store.local_path(folder)) is not None and local.is_dir():
            root = Path(store.url)
            yield from sorted(str(file.relative_to(root)) for file in temporary_files(local))

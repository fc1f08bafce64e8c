"""What loaders refuse in a dataset's files, by the same checks: `verify` lists it."""

from collections.abc import Callable, Iterator
from contextlib import suppress

from shards.dataset import Dataset
from shards.errors import InvalidDataError
from shards.index import read_blocks, read_index, read_labels, read_quarantine, read_sample_rows
from shards.manifest import BLOCKS_PATH, LABELS_PATH, MANIFEST_PATH, QUARANTINE_PATH, Manifest, index_path
from shards.packing.plan import PLAN_PATH
from shards.store import MissingObjectError
from shards.tables import refuse_blocks, refuse_labels, refuse_places, refuse_rows
from shards.verifying.strays import Fault


def refused_files(dataset: Dataset) -> Iterator[Fault]:
    """What a loader would refuse in the tables of the whole, and files that it would not believe."""
    manifest = dataset.manifest
    tables: dict[str, Callable[[bytes], object]] = {
        BLOCKS_PATH: lambda data: refuse_blocks(read_blocks(data), manifest),
        LABELS_PATH: lambda data: refuse_labels(read_labels(data), num_classes=manifest.num_classes),
        QUARANTINE_PATH: read_quarantine,
    }
    for path, check in tables.items():
        with suppress(MissingObjectError, InvalidDataError):  # listed with the files
            try:
                check(dataset.store.read(path))
            except ValueError as error:
                yield Fault(where=path, what=f"cannot be right: {error}")
    needed = (*tables, PLAN_PATH, *(index_path(shard) for shard in range(len(manifest.shards))))
    for path in (path for path in needed if path not in manifest.files):
        yield Fault(where=MANIFEST_PATH, what=f"has no sha256 of {path}")


def refused_rows(data: bytes, shard: int, manifest: Manifest) -> Iterator[str]:
    """What a loader would refuse in a shard's index, and what only other readers use."""
    record = manifest.shards[shard]
    checks: tuple[Callable[[], None], ...] = (
        lambda: refuse_rows(read_sample_rows(data), record, num_classes=manifest.num_classes),
        lambda: refuse_places(read_index(data), shard=shard, is_ours=not manifest.adopted),
    )
    for check in checks:
        try:
            check()
        except ValueError as error:
            yield f"its index cannot be right: {error}"

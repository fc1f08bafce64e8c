"""Reads a dataset back and lists everything that differs from its manifest.

It also checks, in the plan's files, that every scanned image is in exactly one shard or among the dropped images. It
runs the loaders' own checks, and finds files that do not belong to the dataset.
"""

import hashlib
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

import pyarrow as pa

from shards.dataset import Dataset, open_dataset
from shards.errors import InvalidDataError, UserError
from shards.files.looks import is_a_folder
from shards.files.typed_json import record_from
from shards.images.config import Resize
from shards.index import (
    IndexRow,
    LeftOut,
    ShardCommit,
    read_blocks,
    read_commit,
    read_labels,
    read_quarantine,
    read_rows,
    read_sample_rows,
)
from shards.manifest import (
    BLOCKS_PATH,
    LABELS_PATH,
    MANIFEST_PATH,
    QUARANTINE_PATH,
    ROWS_PATH,
    Manifest,
    index_path,
    sha256_hex,
)
from shards.output.progress import Progress
from shards.packing.deal import read_dropped
from shards.packing.plan import DROPPED_PATH, PLAN_PATH, Plan, plan_record
from shards.packing.write_shard import planned_samples
from shards.reading.parallel import run_tasks
from shards.sample_rows import BlockTable, refuse_blocks, refuse_labels
from shards.storage.local import temporary_files
from shards.store import MissingObjectError, Store
from shards.verifying import plan_checks, shard_checks

_ADOPTED_LEFT = re.compile(r"work/adopted-\d{6,}\.parquet")
# The most faults that one check lists. The number of further faults is given, too.
MAX_FAULTS_A_CHECK = 10
# The errors that checks raise on damaged Parquet files, damaged tars and impossible settings.
_BROKEN = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError, OSError, EOFError, tarfile.TarError),
    *(UserError, RecursionError, pa.ArrowException),
)
# The errors for a file that is missing or cannot be right, which `_files` or `refused_files` has listed already.
_REPORTED = (MissingObjectError, InvalidDataError, ValueError)


@dataclass(frozen=True, kw_only=True)
class DatasetFault:
    """A fault, and the object of the dataset that has it."""

    where: str
    what: str


def strays(store: Store, manifest: Manifest) -> Iterator[DatasetFault]:
    """Finds files that do not belong to the dataset. Adopted tars may have other files beside them, so for these only
    index/ and our own work files are checked."""
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
    """Finds temporary files, which the store of a folder does not list. A bucket has none: unfinished uploads are not
    objects."""
    for folder in folders:
        if (local := store.local_path(folder)) is not None and is_a_folder(local):
            root = Path(store.url)
            yield from sorted(str(file.relative_to(root)) for file in temporary_files(local))


def refused_files(dataset: Dataset) -> Iterator[DatasetFault]:
    """Finds what a loader would refuse in the tables of the whole dataset, and files that have no sha256 in the
    manifest."""
    manifest = dataset.manifest
    tables: dict[str, Callable[[bytes], object]] = {
        BLOCKS_PATH: lambda data: refuse_blocks(read_blocks(data, has_rows=ROWS_PATH in manifest.files), manifest),
        LABELS_PATH: lambda data: refuse_labels(read_labels(data), num_classes=manifest.num_classes),
        QUARANTINE_PATH: read_quarantine,
    }
    for path, check in tables.items():
        with suppress(MissingObjectError, InvalidDataError):  # `_files` has listed it
            try:
                check(dataset.store.read(path))
            except ValueError as error:
                yield DatasetFault(where=path, what=f"cannot be right: {error}")
    needed = (*tables, PLAN_PATH, *(index_path(shard) for shard in range(len(manifest.shards))))
    for path in (path for path in needed if path not in manifest.files):
        yield DatasetFault(where=MANIFEST_PATH, what=f"has no sha256 of {path}")


@dataclass(frozen=True, kw_only=True)
class ShardCheck:
    """One shard of the dataset at `url` to check. `is_planned`: whether there is a plan to compare it with."""

    url: str
    fingerprint: str
    shard: int
    is_planned: bool
    deep: bool


@dataclass(frozen=True, kw_only=True)
class ShardFacts:
    """The faults of a shard, and what its index adds to the tables. `label_counts` is None if the index is
    unreadable."""

    shard: int
    faults: list[DatasetFault]
    label_counts: Mapping[int, int] | None
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, kw_only=True)
class _Index:
    rows: list[IndexRow]
    commit: ShardCommit
    data: bytes


def verify_dataset(url: str, *, deep: bool = False, workers: int = 1) -> list[DatasetFault]:
    """Returns all faults of a dataset. If `deep`, decodes every image, too. Raises UserError if there is no dataset."""
    try:
        dataset = open_dataset(url)
    except InvalidDataError as error:  # without a manifest, nothing else can be checked
        return [DatasetFault(where=MANIFEST_PATH, what=str(error))]
    faults = [*_files(dataset), *refused_files(dataset), *_plan(dataset), *strays(dataset.store, dataset.manifest)]
    num_shards = len(dataset.manifest.shards)
    planned = not dataset.manifest.adopted and dataset.store.exists(PLAN_PATH)
    tasks = (
        ShardCheck(url=url, fingerprint=dataset.fingerprint, shard=shard, is_planned=planned, deep=deep)
        for shard in range(num_shards)
    )
    by_shard: dict[int, ShardFacts] = {}
    num_faults = len(faults)
    with Progress("verify", num_shards, unit="shards") as progress:
        for found in run_tasks(check_shard, tasks, workers=workers):
            by_shard[found.shard] = found
            num_faults += len(found.faults)
            progress.advance(note=f"{num_faults} faults")
    ordered = [by_shard[shard] for shard in sorted(by_shard)]
    return [*faults, *_tables(dataset, ordered), *(fault for found in ordered for fault in found.faults)]


def check_shard(task: ShardCheck) -> ShardFacts:
    """Finds the faults of a shard, and gathers what the tables should say about it. A check that fails does not stop
    the others."""
    dataset = _opened(task.url, task.fingerprint)
    index, faults = _read_index(dataset, task.shard)
    faults += _index_faults(dataset, task, index) if index else []
    try:
        with shard_checks.mapped_tar(dataset.shard_store, dataset.shard_path(task.shard)) as tar:
            faults += _tar_faults(dataset, task, index, tar)
    except MissingObjectError as error:
        faults.append(DatasetFault(where=error.path, what="is missing"))
    except (ValueError, OSError, InvalidDataError) as error:
        faults.append(DatasetFault(where=dataset.shard_path(task.shard), what=f"cannot be read: {error}"))
    if index is None:
        return ShardFacts(shard=task.shard, faults=faults, label_counts=None, left_out=())
    counts = Counter(label for row in index.rows for label in row.labels)
    return ShardFacts(shard=task.shard, faults=faults, label_counts=counts, left_out=index.commit.left_out)


def _read_index(dataset: Dataset, shard: int) -> tuple[_Index | None, list[DatasetFault]]:
    path = index_path(shard)
    try:
        data = dataset.store.read(path)
        return _Index(rows=read_rows(data), commit=read_commit(data), data=data), []
    except MissingObjectError:
        is_listed = path in dataset.manifest.files  # then `_files` reports it
        return None, [] if is_listed else [DatasetFault(where=path, what="is missing")]
    except _BROKEN as error:
        return None, [DatasetFault(where=path, what=f"cannot be read: {error}")]


def _index_faults(dataset: Dataset, task: ShardCheck, index: _Index) -> list[DatasetFault]:
    manifest, rows, commit = dataset.manifest, index.rows, index.commit
    record = manifest.shards[task.shard]
    found = {
        "rows": shard_checks.check_loading(index.data, task.shard, manifest),
        "commit record": shard_checks.check_commit(record, commit, rows, manifest.plan_hash),
        "labels": shard_checks.check_labels(rows, manifest.num_classes, may_be_none=manifest.unlabeled),
        "blocks": _blocks(dataset, task.shard, rows, commit.data_end),
        ROWS_PATH: _block_rows(dataset, task.shard, index.data),
    }
    if task.is_planned:
        found["plan"] = _as_planned(dataset, task.shard, index)
    return _faults(record.path, found)


def _tar_faults(dataset: Dataset, task: ShardCheck, index: _Index | None, tar: shard_checks.Tar) -> list[DatasetFault]:
    record, is_ours = dataset.manifest.shards[task.shard], not dataset.manifest.adopted
    found = {"whole tar": shard_checks.check_tar(record, tar)}
    if index is not None:
        found |= {
            "checksums": shard_checks.check_checksums(index.rows, tar),
            "members": shard_checks.check_members(index.rows, tar, is_ours=is_ours),
            "webdataset": shard_checks.check_webdataset(index.rows, tar, is_ours=is_ours),
        }
        if is_ours:
            found["json"] = shard_checks.check_json(index.rows, tar)
        if task.deep:
            found["decode"] = shard_checks.check_decode(index.rows, tar, dataset.manifest.limits)
    return _faults(record.path, found)


def _faults(where: str, found: Mapping[str, Iterator[str]]) -> list[DatasetFault]:
    """Runs several checks and returns their faults. If a check breaks off, that is a fault, too, and the others still
    run."""
    return [
        DatasetFault(where=where, what=what)
        for name, check in found.items()
        for what in _shortened(_whole(name, check))
    ]


def _whole(name: str, check: Iterator[str]) -> Iterator[str]:
    try:
        yield from check
    except _BROKEN as error:
        yield f"the check of its {name} broke off: {type(error).__name__}: {error}"


@lru_cache(maxsize=1)
def _opened(url: str, fingerprint: str) -> Dataset:
    dataset = open_dataset(url)
    if dataset.fingerprint != fingerprint:
        raise UserError(f"{dataset.url} changed while it was verified; verify it again")
    return dataset


def _files(dataset: Dataset) -> Iterator[DatasetFault]:
    for path, expected in dataset.manifest.files.items():
        try:
            if _sha256_of(dataset.store, path) != expected:
                yield DatasetFault(where=path, what="its sha256 is not the manifest's")
        except MissingObjectError:
            yield DatasetFault(where=path, what="is missing")
        except InvalidDataError as error:
            yield DatasetFault(where=path, what=f"cannot be read: {error}")


def _sha256_of(store: Store, path: str) -> str:
    """Returns the sha256 of an object of any size."""
    digest = hashlib.sha256()
    with store.open_read(path) as file:
        while data := file.read(shard_checks.PIECE_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _plan(dataset: Dataset) -> Iterator[DatasetFault]:
    manifest = dataset.manifest
    try:
        data = dataset.store.read(PLAN_PATH)
        if sha256_hex(data) != manifest.plan_hash:
            yield DatasetFault(where=PLAN_PATH, what="its hash is not the manifest's plan hash")
        if manifest.adopted:
            return
        plan = Plan.from_bytes(data)
    except (MissingObjectError, InvalidDataError):
        return  # `_files` has reported it
    except ValueError as error:
        yield DatasetFault(where=PLAN_PATH, what=str(error))
        return
    scanned = plan.num_samples + plan.num_quarantined
    if manifest.num_samples + manifest.num_quarantined != scanned:
        packed = f"{manifest.num_samples} samples and {manifest.num_quarantined} in quarantine"
        yield DatasetFault(where=MANIFEST_PATH, what=f"{packed} are not the {scanned} images of the plan")
    yield from _faults(PLAN_PATH, {"positions": plan_checks.check_positions(dataset.store, plan)})


def _tables(dataset: Dataset, shards: list[ShardFacts]) -> list[DatasetFault]:
    """Compares the manifest with the plan and, if every index could be read, the small tables with the plan and all
    shards."""
    store, manifest = dataset.store, dataset.manifest
    try:
        plan = store.read(PLAN_PATH)
        faults = _faults(MANIFEST_PATH, {"settings": plan_checks.check_manifest(manifest, plan)})
    except (MissingObjectError, InvalidDataError):
        return []  # `_files` has reported it
    if any(found.label_counts is None for found in shards):
        return faults
    faults += _faults(LABELS_PATH, {"classes": _label_table(dataset, plan, shards)})
    return faults + _faults(QUARANTINE_PATH, {"rows": _quarantine(store, manifest, shards)})


def _label_table(dataset: Dataset, plan: bytes, shards: list[ShardFacts]) -> Iterator[str]:
    counts: Counter[int] = Counter()
    for found in shards:
        counts.update(found.label_counts or {})
    with suppress(*_REPORTED):
        names = plan_record(plan, is_adopted=dataset.manifest.adopted).label_names
        yield from plan_checks.check_label_table(read_labels(dataset.store.read(LABELS_PATH)), names, counts)


def _quarantine(store: Store, manifest: Manifest, shards: list[ShardFacts]) -> Iterator[str]:
    with suppress(*_REPORTED):
        table = read_quarantine(store.read(QUARANTINE_PATH))
        if table.num_rows != manifest.num_quarantined:
            yield f"has {table.num_rows} rows, the manifest says {manifest.num_quarantined} in quarantine"
        if manifest.adopted:
            yield from plan_checks.check_adopted_quarantine(table, manifest.num_samples + manifest.num_quarantined)
            return
        try:
            dropped = read_dropped(store.read(DROPPED_PATH))
        except ValueError as error:
            yield f"cannot be compared with {DROPPED_PATH}: {error}"
            return
        yield from plan_checks.check_quarantine(table, dropped, [item for found in shards for item in found.left_out])


def _as_planned(dataset: Dataset, shard: int, index: _Index) -> Iterator[str]:
    """Checks that a shard's samples are those that the plan assigns to it, except those listed as left out."""
    try:
        settings = Plan.from_bytes(dataset.store.read(PLAN_PATH)).settings
        size = int(cast("int", settings["samples_per_shard"]))
        planned = planned_samples(dataset.store, shard, samples_per_shard=size)
        resize = record_from(Resize, settings["resize"], where="settings.resize.")
    except (MissingObjectError, *_BROKEN) as error:
        yield f"what the plan dealt to it cannot be read: {error}"
        return
    yield from plan_checks.check_planned(index.rows, index.commit, planned, resize=resize)


def _blocks(dataset: Dataset, shard: int, rows: list[IndexRow], data_end: int) -> Iterator[str]:
    if (blocks := _readable_blocks(dataset)) is not None:
        record, size = dataset.manifest.shards[shard], dataset.manifest.samples_per_block
        yield from shard_checks.check_blocks(rows, data_end, record, shard=shard, blocks=blocks, samples_per_block=size)


def _block_rows(dataset: Dataset, shard: int, data: bytes) -> Iterator[str]:
    """Checks that rows.bin, if there is one, says the same about a shard as its index."""
    record, expected = dataset.manifest.shards[shard], read_sample_rows(data)
    if ROWS_PATH not in dataset.manifest.files or not record.num_samples:
        return
    found = dataset.rows_of(record.first_sample_id, record.num_samples)
    if found.to_bytes() != expected.to_bytes():
        yield f"{ROWS_PATH} does not fit its index"


@lru_cache(maxsize=1)
def _readable_blocks(dataset: Dataset) -> BlockTable | None:
    try:
        return read_blocks(dataset.store.read(BLOCKS_PATH))
    except _REPORTED:
        return None


def _shortened(faults: Iterator[str]) -> list[str]:
    listed = list(faults)
    more = len(listed) - MAX_FAULTS_A_CHECK
    return listed[:MAX_FAULTS_A_CHECK] + ([f"and {more} more of this kind"] if more > 0 else [])

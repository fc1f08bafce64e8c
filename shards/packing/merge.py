"""The last phase of packing writes the block table, the labels, the quarantine list, and the manifest that completes
the dataset.

This module also makes the summary at the end of a packing: what is in the dataset, what is not, and why.
"""

import hashlib
import io
import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from shards.class_names import listed, near_equal
from shards.errors import InvalidDataError, UserError
from shards.index import (
    BLOCK_ROWS_SCHEMA,
    BLOCKS_SCHEMA,
    INDEX_SCHEMA,
    KINDS,
    LABELS_SCHEMA,
    LeftOut,
    ShardCommit,
    left_out_words,
    read_commit,
    read_labels,
    read_quarantine,
    read_sample_rows,
)
from shards.manifest import (
    BLOCKS_PATH,
    FORMAT_VERSION,
    LABELS_PATH,
    MANIFEST_PATH,
    MOST_SHARD_SAMPLES,
    QUARANTINE_CSV_PATH,
    QUARANTINE_PATH,
    ROWS_PATH,
    SHARDS_PATH,
    Manifest,
    ShardRecord,
    index_path,
    sha256_hex,
    shard_path,
)
from shards.manifest_table import write_manifest
from shards.output.progress import Progress
from shards.output.quantities import duration, plural, size
from shards.output.terminal import printable_name
from shards.packing.config import About, DatasetSettings, PackSpec
from shards.packing.deal import quarantine_table, read_dropped
from shards.packing.plan import DROPPED_PATH, PLAN_PATH, Plan
from shards.sample_rows import SampleRows
from shards.sources.tar_members import BLOCK_BYTES
from shards.store import MissingObjectError, Store
from shards.tables import TableSchema, read_checked, table_bytes

LEAST_SAMPLES_WITH_ROWS = 1 << 21  # readers keep the rows of 3 million samples in memory
_INDEX_RULES = TableSchema(schema=INDEX_SCHEMA, may_be_null=frozenset(INDEX_SCHEMA.names) - {"offset", "labels"})
_WORK_FILE = re.compile(r"work/(listing\.json|listing-\d+\.parquet|staged-\d+\.bin|evaluation-\d+-\d+\.parquet)")
_SHARD_FILE = re.compile(r"(?:shards/shard-(?=\d+\.tar)|index/shard-(?=\d+\.parquet))(\d+)\.\w+")
_DATASET_FILE = re.compile(
    rf"{_WORK_FILE.pattern}|{_SHARD_FILE.pattern}|manifest\.json|rows\.bin|quarantine\.csv|(blocks|labels|quarantine|shards)\.parquet"
    r"|plan/(plan\.json|(scan|samples)-\d+\.parquet|(dropped|matches)\.parquet)"
)
_CSV_COLUMNS = ("kind", "source", "reason", "match", "distance", "phase", "position")
_EXAMPLES = 20
_MOST_GROUPS = 5
_LABELS = "each class its own folder (pack folder), or labels by --source.label-pattern or in a table"
log = logging.getLogger(__name__)


class RowsFile:
    """Writes the rows of every block to rows.bin, and keeps the end and the checksum of each block's rows for the block
    table."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self._num_bytes = file, hashlib.sha256(), 0
        self.ends: list[int] = []
        self.crc32s: list[int] = []

    def add(self, rows: SampleRows, *, samples_per_block: int) -> None:
        """Adds the rows of a shard."""
        for first in range(0, rows.offset.size, samples_per_block):
            data = rows.slice(first, min(first + samples_per_block, rows.offset.size)).to_bytes()
            self._file.write(data)
            self._hash.update(data)
            self._num_bytes += len(data)
            self.ends.append(self._num_bytes)
            self.crc32s.append(crc32(data))

    def sha256(self) -> str:
        """Returns the sha256 of everything written so far."""
        return self._hash.hexdigest()


@contextmanager
def rows_file(store: Store, num_samples: int) -> Iterator[RowsFile | None]:
    """Opens rows.bin of a dataset of up to `num_samples` samples. Yields None if the dataset is so small that readers
    keep its whole index in memory."""
    if num_samples < LEAST_SAMPLES_WITH_ROWS:
        yield None
        return
    with store.create(ROWS_PATH) as file:
        yield RowsFile(file)


@dataclass(kw_only=True)
class Merged:
    """Collects the shards, one after another, for the manifest and the tables of the dataset."""

    num_classes: int
    shards: list[ShardRecord] = field(default_factory=list)
    blocks: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    rows: RowsFile | None = None
    label_counts: NDArray[np.int64] = field(init=False)
    files: dict[str, str] = field(default_factory=dict)
    num_samples: int = 0

    def __post_init__(self) -> None:
        self.label_counts = np.zeros(self.num_classes, np.int64)

    def add_shard(self, path: str, index: bytes, commit: ShardCommit, *, samples_per_block: int) -> None:
        """Adds one shard, given the bytes of its index file. Raises ValueError if they are damaged."""
        shard = len(self.shards)
        rows = read_checked(index, _INDEX_RULES, ["offset", "labels"], most_rows=MOST_SHARD_SAMPLES)
        offsets = rows.column("offset").to_numpy()
        edges = np.concatenate([[BLOCK_BYTES - 1], offsets, [commit.data_end]])
        if (np.diff(edges) <= 0).any():
            raise ValueError(f"its offsets do not rise from {BLOCK_BYTES} to below {commit.data_end}")
        labels = pc.list_flatten(rows.column("labels")).to_numpy()
        if len(labels) and not 0 <= labels.min() <= labels.max() < self.num_classes:
            found = f"{labels.min()} to {labels.max()}"
            raise ValueError(f"its labels are {found}, allowed: 0 to below {self.num_classes}")
        for row, first_byte, end_byte, count in blocks_of_shard(
            offsets, data_end=commit.data_end, samples_per_block=samples_per_block
        ):
            self.blocks.append((shard, first_byte, end_byte, self.num_samples + row, count))
        if self.rows:
            self.rows.add(read_sample_rows(index), samples_per_block=samples_per_block)
        self.shards.append(
            ShardRecord(
                path=path,
                first_sample_id=self.num_samples,
                num_samples=len(offsets),
                sha256=commit.tar_sha256,
                num_bytes=commit.tar_bytes,
            )
        )
        self.num_samples += len(offsets)
        self.label_counts += np.bincount(labels, minlength=self.num_classes)
        self.files[index_path(shard)] = sha256_hex(index)
        self.left_out += commit.left_out

    def write_tables(self, store: Store, label_names: tuple[str, ...], quarantine: pa.Table) -> None:
        """Writes the block table, the labels and the quarantine list."""
        columns = zip(*self.blocks, strict=True) if self.blocks else [()] * len(BLOCKS_SCHEMA)
        arrays = [pa.array(column, kind) for column, kind in zip(columns, BLOCKS_SCHEMA.types, strict=True)]
        blocks = pa.Table.from_arrays(arrays, schema=BLOCKS_SCHEMA)
        if self.rows:
            for column, values in zip(BLOCK_ROWS_SCHEMA, (self.rows.ends, self.rows.crc32s), strict=True):
                blocks = blocks.append_column(column, pa.array(values, column.type))
            self.files[ROWS_PATH] = self.rows.sha256()
        names = [range(self.num_classes), label_names, self.label_counts]
        labels = [pa.array(column, kind) for column, kind in zip(names, LABELS_SCHEMA.types, strict=True)]
        tables = {
            BLOCKS_PATH: blocks,
            LABELS_PATH: pa.Table.from_arrays(labels, schema=LABELS_SCHEMA),
            QUARANTINE_PATH: quarantine,
        }
        for path, table in tables.items():
            data = table_bytes(table)
            store.write(path, data)
            self.files[path] = sha256_hex(data)

    def manifest(self, settings: DatasetSettings, *, plan_hash: str, num_quarantined: int) -> Manifest:
        """Returns the manifest of these shards and tables."""
        return Manifest(
            format_version=FORMAT_VERSION,
            plan_hash=plan_hash,
            split=settings.split,
            num_samples=self.num_samples,
            num_classes=self.num_classes,
            num_quarantined=num_quarantined,
            samples_per_block=settings.samples_per_block,
            shards=tuple(self.shards),
            files=self.files,
            limits=settings.limits,
        )


def merge(store: Store, spec: PackSpec, plan: Plan, *, max_quarantined: float) -> Manifest:
    """Writes the tables and, last, the manifest. Every shard must be committed."""
    merged = Merged(num_classes=len(plan.label_names), files={PLAN_PATH: plan.hash, **plan.files})
    with (
        rows_file(store, plan.num_samples) as merged.rows,
        Progress("merge", plan.num_shards, unit="shards") as progress,
    ):
        for shard in range(plan.num_shards):
            index, commit = _committed_index(store, plan, shard)
            try:
                merged.add_shard(shard_path(shard), index, commit, samples_per_block=spec.samples_per_block)
            except ValueError as error:
                what = f"{store.url}/{index_path(shard)} cannot be used: {error}"
                raise InvalidDataError(f"{what}; delete it and run --phase shards again") from error
            progress.advance()
    refuse_quarantine(plan, max_quarantined=max_quarantined, url=store.url, left_out=merged.left_out)
    quarantine = quarantine_table(_dropped_by_plan(store, plan), merged.left_out)
    merged.write_tables(store, plan.label_names, quarantine)
    write_quarantine_csv(store, quarantine)
    _discard_stale_files(store, plan)
    if not merged.rows:
        store.delete(ROWS_PATH)
    store.discard_unfinished(is_dataset_file)
    manifest = merged.manifest(spec, plan_hash=plan.hash, num_quarantined=quarantine.num_rows)
    manifest = write_manifest(store, replace(manifest, unlabeled=spec.unlabeled == "keep"))
    if SHARDS_PATH not in manifest.files:
        store.delete(SHARDS_PATH)  # left by an earlier packing with more shards
    discard_work(store)
    return manifest


def write_quarantine_csv(store: Store, left_out: pa.Table) -> None:
    """Writes the images that are left out as a CSV file, the refused ones first. If there are none, removes an earlier
    file."""
    if left_out.num_rows:
        data = io.BytesIO()
        order = pc.index_in(left_out["kind"], value_set=pa.array(KINDS))
        ordered = left_out.append_column("order", order).sort_by([("order", "ascending"), ("position", "ascending")])
        pa.csv.write_csv(ordered.select([name for name in _CSV_COLUMNS if name in left_out.column_names]), data)
        store.write(QUARANTINE_CSV_PATH, data.getvalue())
    else:
        store.delete(QUARANTINE_CSV_PATH)


def discard_work(store: Store) -> None:
    """Removes the phases' files from the work folder, since a finished dataset does not need them."""
    for path in [path for path in store.list("work") if _WORK_FILE.fullmatch(path)]:
        store.delete(path)


def is_dataset_file(path: str) -> bool:
    """Returns whether packing writes this path. All other files of the store belong to the user."""
    return _DATASET_FILE.fullmatch(path) is not None


def _discard_stale_files(store: Store, plan: Plan) -> None:
    """Removes what an earlier plan has left: shards with higher numbers than this plan has, and files of the plan."""
    for folder in ("shards", "index"):
        for path in list(store.list(folder)):
            found = _SHARD_FILE.fullmatch(path)
            if found and int(found[1]) >= plan.num_shards:
                store.delete(path)
    for path in list(store.list("plan")):
        if is_dataset_file(path) and path not in plan.files and path != PLAN_PATH:
            store.delete(path)


def is_refused(plan: Plan, *, max_quarantined: float, num_lost: int = 0) -> bool:
    """Returns whether more images were refused than the job allows, including `num_lost` since the plan was made.
    Images without a label, copies, and images of the other split do not count."""
    total = plan.num_samples + plan.num_quarantined
    return total > 0 and (plan.num_refused + num_lost) / total > max_quarantined  # 0.29 * 100 is below 29


def refuse_quarantine(
    plan: Plan,
    *,
    max_quarantined: float,
    url: str,
    left_out: Sequence[LeftOut] = (),
    is_alone: bool = False,
) -> None:
    """Raises UserError if more images were refused than the job allows. `is_alone`: whether the command is a later
    phase alone, which does not scan repaired images again."""
    if not is_refused(plan, max_quarantined=max_quarantined, num_lost=len(left_out)):
        return
    total, count = plan.num_samples + plan.num_quarantined, plan.num_refused + len(left_out)
    share = f"{math.ceil(1000 * count / total) / 1000:g}"
    message = f"{count} of {total} images cannot be packed, more than the allowed share of {max_quarantined:g}"
    if left_out:
        example = f"{left_out[0].source}: {left_out[0].reason}"
        message = f"{message}; {len(left_out)} of them since the plan was made, for example {example}"
        todo = "restore them and run --phase shards again"
    else:
        command = "--phase scan (every part) and --phase plan" if is_alone else "the same command"
        todo = f"all are in {url}/{QUARANTINE_CSV_PATH}; repair them and run {command} again"
    flags = ("--max-quarantined", share)
    raise UserError(message, todo=f"{todo}, or pack the others with {' '.join(flags)}", flags=flags)


def blocks_of_shard(
    offsets: NDArray[np.int64], *, data_end: int, samples_per_block: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yields (first row, first byte, end byte, number of samples) of each block. A block begins with the header of its
    first image."""
    starts = offsets - BLOCK_BYTES
    for row in range(0, len(starts), samples_per_block):
        after = row + samples_per_block
        end_byte = int(starts[after]) if after < len(starts) else data_end
        yield row, int(starts[row]), end_byte, min(samples_per_block, len(starts) - row)


def _committed_index(store: Store, plan: Plan, shard: int) -> tuple[bytes, ShardCommit]:
    try:
        data = store.read(index_path(shard))
        commit = read_commit(data)
        if commit.plan_hash == plan.hash and store.size(shard_path(shard)) == commit.tar_bytes:
            return data, commit
    except (MissingObjectError, ValueError) as error:
        reason = str(error)
    else:
        reason = "it is of another plan, or its tar has another size"
    raise UserError(f"shard {shard} of {store.url} is not packed ({reason}); run --phase shards with every part")


def _dropped_by_plan(store: Store, plan: Plan) -> pa.Table:
    """Reads the images that the plan dropped: those that the scan refused, and those that the plan left out. Raises
    InvalidDataError if the list is not the plan's."""
    try:
        data = store.read(DROPPED_PATH)
    except MissingObjectError:
        data = b""
    if sha256_hex(data) != plan.files.get(DROPPED_PATH):
        what = f"{store.url}/{DROPPED_PATH} is not the plan's: its sha256 differs, or it is missing"
        raise InvalidDataError(f"{what}; delete {store.url}/plan/plan.json and run --phase plan again")
    return read_dropped(data)


def packed_words(store: Store, manifest: Manifest, *, seconds: float) -> str:
    """Returns the summary of a packing: images, classes, shards, bytes and time, then what was left out, with up to
    twenty reasons, and where the whole list is."""
    num_bytes = int(manifest.shard_column("num_bytes").sum())
    images = f"{plural(manifest.num_samples, 'image')} of {plural(manifest.num_classes, 'class')}"
    shards = plural(len(manifest.shards), "shard")
    lines = [f"{store.url}: {images} in {shards}, {size(num_bytes)}, in {duration(seconds)}"]
    lines += empty_words(store, manifest)
    if manifest.num_quarantined:
        quarantine = read_quarantine(store.read(QUARANTINE_PATH))
        lines += _left_out(quarantine)
        lines.append(f"the list: {store.url}/{QUARANTINE_CSV_PATH}, and for programs {QUARANTINE_PATH}")
    return "\n".join(lines)


def empty_words(store: Store, manifest: Manifest) -> list[str]:
    """Returns lines that name the classes without images; an empty list if all classes have images."""
    labels = read_labels(store.read(LABELS_PATH))
    empty = labels.filter(pc.equal(labels["num_samples"], 0))["name"].to_pylist()
    lines = [f"without any image: {class_words(empty)}"] if empty else []
    if empty and manifest.num_classes - len(empty) == 1:
        lines.append("only one class has images, so there is nothing to tell it from")
    return lines


def class_words(names: Sequence[str]) -> str:
    """Returns the number of classes and their names; if there are many, the first and the last five names."""
    return printable_name(f"{plural(len(names), 'class')} ({listed(names)})")


def class_warnings(names: Sequence[str], *, todo: str = _LABELS) -> Iterator[str]:
    """Yields what is probably wrong with these classes: there is only one, or some names are nearly equal."""
    if len(names) == 1:
        yield printable_name(f"there is only one class, {names[0]!r}, so there is nothing to tell it from; give {todo}")
    groups = near_equal(names)
    for group in groups[:_MOST_GROUPS]:
        shown = ", ".join(repr(name) for name in group)
        yield printable_name(f"the classes {shown} differ only in case, spaces or similar characters; are they one?")
    if len(groups) > _MOST_GROUPS:
        yield f"{len(groups) - _MOST_GROUPS:,} more groups of classes have such names"


def refused_words(store: Store, dropped: pa.Table) -> str:
    """Returns the summary for a source that cannot be packed because too many images were refused. `dropped`: the
    plan's dropped images."""
    return "\n".join([*_left_out(dropped), f"the list: {store.url}/{QUARANTINE_CSV_PATH}"])


def _left_out(table: pa.Table) -> list[str]:
    counts = {kind: int(pc.sum(pc.equal(table["kind"], kind)).as_py() or 0) for kind in KINDS}
    refused = table.filter(pc.equal(table["kind"], "refused"))
    return [
        f"left out: {left_out_words(counts)}",
        *_examples(refused.slice(0, _EXAMPLES).to_pylist(), refused.num_rows),
    ]


def _examples(rows: Sequence[dict[str, str]], number: int) -> list[str]:
    lines = [printable_name(f"  {row['source']}: {row['reason']}") for row in rows]
    return [*lines, f"  and {number - len(rows):,} more"] if number > len(rows) else lines


def describe(store: Store, manifest: Manifest, about: About) -> None:
    """Writes description and licence into the manifest of a finished dataset, if they are new."""
    described = about.of(manifest)
    if described != manifest:
        write_manifest(store, described)
        log.info("description and licence written to %s/%s", store.url, MANIFEST_PATH)

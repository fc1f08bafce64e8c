"""The plan's first pass over the scan files finds out what labels mean, which images can be packed, and which hashes
may identify duplicates.

What labels mean is decided once for all scan files. The results are small arrays, even for many millions of images.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.class_labels import Meaning, WrittenLabels, are_names, settle
from shards.class_names import read_label_names
from shards.errors import ImageRefusedError, UserError
from shards.files.typed_json import read_record
from shards.images.image_header import ImageHeader
from shards.images.resize import refusal
from shards.manifest import sha256_hex
from shards.packing.config import PackSpec
from shards.packing.evaluation_sets import (
    EvaluationMatch,
    EvaluationSet,
    bytes_rows,
    find_sets,
    hash_tasks,
    is_hashed,
    load_images,
)
from shards.packing.listing import LISTING_PATH, Listing
from shards.packing.scan import SCAN_SCHEMA, is_scanned, read_scan, scan_footer, scan_path
from shards.pool import each_at_once
from shards.reading.parallel import run_tasks
from shards.store import MissingObjectError, Store, open_store

# Scan files per task: matching many images at once costs much less than matching them a few at a time.
SCANS_A_TASK = 32  # about a million images
EXAMPLES = 20  # at most this many images that cannot be packed are in a message


@dataclass(frozen=True, kw_only=True)
class _CountTask:
    """A task: collect the labels, as written, in scan file `number` of the dataset at `url`."""

    url: str
    number: int


def settled(store: Store, spec: PackSpec, num_scans: int, *, workers: int) -> Meaning:
    """Decides what the labels of a scan mean. If the source's labels are always names, this reads no labels. Raises
    UserError for labels that could mean two things."""
    listed = read_label_names(spec.labels_file) if spec.labels_file else None
    numbered = spec.source.known_labels()
    if spec.source.labels_are_names:
        return are_names(listed or numbered)
    tasks = (_CountTask(url=store.url, number=number) for number in range(num_scans))
    written = WrittenLabels.joined(run_tasks(_count, tasks, workers=workers))
    return settle(spec.labels, written, listed=listed, numbered=numbered or ())


def labelled(table: pa.Table, meaning: Meaning) -> pa.Table:
    """Returns the rows of a scan with the classes that their labels mean, or with the reason why a label cannot be
    read."""
    lists = table.column("labels").combine_chunks()
    labels_each = pc.list_flatten(lists).dictionary_encode()
    if meaning.is_same(labels_each.dictionary.to_pylist()) and not _has_repeated(lists, labels_each):
        return table
    has_weights = "weights" in table.column_names
    weights = table.column("weights").to_pylist() if has_weights else [None] * table.num_rows
    reasons = table.column("reason").to_pylist() if "reason" in table.column_names else [None] * table.num_rows
    labels, kept = list[tuple[str, ...]](), list[tuple[float, ...]]()
    for row, (written, some) in enumerate(zip(lists.to_pylist(), weights, strict=True)):
        try:
            found = meaning.of(written, some or ())
        except ImageRefusedError as refusal:
            found, reasons[row] = ((), ()), reasons[row] or str(refusal)
        labels.append(found[0])
        kept.append(found[1])
    columns = {"labels": labels, "weights": kept, "reason": reasons}
    for name in [name for name in columns if name in table.column_names]:
        column = pa.array(columns[name], SCAN_SCHEMA.field(name).type)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def _has_repeated(lists: pa.ListArray, each: pa.DictionaryArray) -> bool:
    """Returns whether an image has a label twice. `each`: the labels of all lists."""
    places = pc.list_parent_indices(lists).to_numpy().astype(np.int64) * len(each.dictionary) + each.indices.to_numpy()
    return len(np.unique(places)) < len(places)


def _count(task: _CountTask) -> WrittenLabels:
    _, table = read_scan(open_store(task.url), task.number, ["labels"])
    return WrittenLabels.of(table.column("labels").to_pylist())


@dataclass(frozen=True, kw_only=True)
class SurveyTask:
    """A task: consecutive scan files, given by the sha256 of their slices, and what their labels mean."""

    url: str
    spec: PackSpec
    first_number: int
    slices_sha256: tuple[str, ...]
    meaning: Meaning
    evaluation_sets: tuple[EvaluationSet, ...]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A row that is a copy of an evaluation image. `row` is counted from the first row of the survey."""

    row: int
    match: EvaluationMatch
    distance: int


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A summary of consecutive scan files. `sha_prefix`: the first 8 bytes of each image's sha256. `labels`: all
    labels, including those of images that cannot be packed. `examples`: the first images that cannot be packed, each
    with the reason."""

    first_number: int
    sha256: tuple[str, ...]
    num_rows: tuple[int, ...]
    is_fit: NDArray[np.bool_]
    sha_prefix: NDArray[np.uint64]
    labels: list[str]
    overlaps: list[Overlap]
    num_unlabeled: int
    examples: list[tuple[str, str]]


def survey(task: SurveyTask) -> Survey:
    """Summarises some scan files. Raises UserError if one is missing or was made with other settings."""
    columns = ["labels", "weights", "ext", "mode", "sha256", "reason", *(["phash"] if task.spec.is_hashed else [])]
    hashes, tables, fits, labels = [], [], [], set[str]()
    num_unlabeled, examples = 0, list[tuple[str, str]]()
    for place, slice_sha256 in enumerate(task.slices_sha256):
        data, table = _read_scan(task, task.first_number + place, slice_sha256, columns)
        table = labelled(table, task.meaning)
        why, is_unlabeled = reasons(table, task.spec)
        is_fit = why.is_null()
        labels.update(pc.unique(pc.list_flatten(table.column("labels"))).to_pylist())
        num_unlabeled += int(pc.sum(is_unlabeled).as_py() or 0)
        if len(examples) < EXAMPLES and (unfit := pc.indices_nonzero(pc.invert(is_fit))):
            _, sources = read_scan(open_store(task.url), task.first_number + place, ["source"])
            some = unfit.slice(0, EXAMPLES - len(examples))
            examples += zip(sources["source"].take(some).to_pylist(), why.take(some).to_pylist(), strict=True)
        hashes.append(sha256_hex(data))
        fits.append(is_fit.to_numpy(zero_copy_only=False))
        tables.append(table.drop_columns(["labels", "weights", "ext", "mode", "reason"]))
    whole, every_fit = pa.concat_tables(tables), np.concatenate(fits)
    sha256, _ = bytes_rows(whole.column("sha256"))
    return Survey(
        first_number=task.first_number,
        sha256=tuple(hashes),
        num_rows=tuple(table.num_rows for table in tables),
        is_fit=every_fit,
        sha_prefix=np.ascontiguousarray(sha256[:, :8]).view(np.uint64).reshape(-1),
        labels=sorted(labels),
        overlaps=_overlaps(task, whole, sha256, every_fit) if task.evaluation_sets else [],
        num_unlabeled=num_unlabeled,
        examples=examples,
    )


def reasons(table: pa.Table, spec: PackSpec) -> tuple[pa.Array, pa.Array]:
    """Returns why each row of a labelled scan table cannot be packed (null if it can), and whether its only fault is
    that it has no label."""
    refused = table.column("reason").combine_chunks()
    has_none = pc.fill_null(pc.equal(pc.list_value_length(table.column("labels").combine_chunks()), 0), False)
    is_unlabeled = pc.and_(pc.and_(has_none, refused.is_null()), pa.scalar(spec.unlabeled == "refuse"))
    unlabeled = pc.if_else(is_unlabeled, pa.scalar("no label"), pa.scalar(None, pa.string()))
    return pc.coalesce(refused, unlabeled, _formats(table, spec)), is_unlabeled


def _formats(table: pa.Table, spec: PackSpec) -> pa.Array:
    """Returns the reason for each row whose image cannot be stored in a shard with these settings; null for the
    others."""
    ext, mode = table.column("ext").combine_chunks(), table.column("mode").combine_chunks()
    result = pa.nulls(len(ext), pa.string())
    for kind in table.select(["ext", "mode"]).group_by(["ext", "mode"]).aggregate([]).to_pylist():
        if kind["ext"] is None:
            continue  # the scan refused these rows
        header = ImageHeader(height=1, width=1, orientation=1, **kind)
        if why := refusal(header, spec.resize):
            is_kind = pc.and_(pc.equal(ext, kind["ext"]), pc.equal(mode, kind["mode"]))
            result = pc.if_else(pc.fill_null(is_kind, False), pa.scalar(why), result)
    return result


def _overlaps(task: SurveyTask, table: pa.Table, sha256: NDArray[np.uint8], is_fit: NDArray[np.bool_]) -> list[Overlap]:
    images = load_images(task.url, task.evaluation_sets)
    hashes, has_hash = bytes_rows(table.column("phash"))
    rows = np.flatnonzero(is_fit)
    found, distance = images.closest(
        sha256[rows], hashes[rows], has_hash[rows], max_distance=task.spec.dedup.max_distance
    )
    near = np.flatnonzero(found >= 0)
    return [
        Overlap(row=int(rows[place]), match=images.match(int(found[place])), distance=int(distance[place]))
        for place in near.tolist()
    ]


def _read_scan(task: SurveyTask, number: int, slice_sha256: str, columns: list[str]) -> tuple[bytes, pa.Table]:
    store, path = open_store(task.url), scan_path(number)
    data, table = read_scan(store, number, columns)
    if not is_scanned(store, number, scan_footer(task.spec.scan_hash(), slice_sha256)):
        message = f"{store.url}/{path} is the scan of another source or of other settings"
        raise UserError(f"{message}; scan again, or delete {store.url}/plan and {store.url}/work first")
    return data, table


def unscanned_parts(store: Store, spec: PackSpec, *, url: str, num_parts: int) -> list[int]:
    """Returns the parts of the scan phase that still have to read a slice of the listing or a shard of an evaluation
    set. Returns all parts if there is no listing with these settings."""
    scan_hash = spec.scan_hash()
    try:
        listing = read_record(Listing, store.read(LISTING_PATH))
    except (MissingObjectError, ValueError):
        return list(range(num_parts))
    if listing.scan_hash != scan_hash:
        return list(range(num_parts))
    footers = [scan_footer(scan_hash, piece.sha256) for piece in listing.slices]
    is_there = each_at_once(lambda number: is_scanned(store, number, footers[number]), range(len(footers)))
    missing = {number % num_parts for number in range(len(footers)) if not is_there[number]}
    if spec.is_hashed:
        every = hash_tasks(url, find_sets(spec.dedup.against))
        missing |= {number % num_parts for number, task in enumerate(every) if not is_hashed(store, task)}
    return sorted(missing)

"""Makes the plan from the scan, in four steps: survey, duplicates, permutation and dealing. This takes about 40 bytes
of memory per image."""

import logging
import shlex
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.class_labels import Meaning
from shards.errors import UserError
from shards.hashing import PACKING, hash_array
from shards.manifest import FORMAT_VERSION, sha256_hex
from shards.output.progress import Progress
from shards.output.quantities import plural
from shards.output.terminal import printable_name
from shards.packing.config import PackSpec
from shards.packing.deal import DROPPED_SCHEMA, DealTask, GatherTask, deal, dropped_rows, gather, shards_per_file
from shards.packing.evaluation_sets import EvaluationSet, closest_matches, find_sets
from shards.packing.left_out import Duplicates, candidates, find_duplicates, rows_of_other_side
from shards.packing.listing import Listing
from shards.packing.plan import DROPPED_PATH, MATCHES_PATH, PLAN_PATH, Plan
from shards.packing.scan import read_scan, scan_path
from shards.packing.survey import EXAMPLES, SCANS_A_TASK, Survey, SurveyTask, labelled, settled, survey
from shards.reading.parallel import run_tasks
from shards.sources.kinds import FolderSource, Source
from shards.sources.names import refuse_classes_of_splits, split_of
from shards.storage.temporary import temporary_folder
from shards.store import Store
from shards.tables import table_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Surveyed:
    """A summary of all scan files. File f has the rows first_rows[f] to first_rows[f + 1] - 1."""

    files: dict[str, str]
    first_rows: NDArray[np.int64]
    is_fit: NDArray[np.bool_]
    sha_prefix: NDArray[np.uint64]
    labels: set[str]
    overlaps: pa.Table
    num_unlabeled: int
    examples: list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class _Decided:
    """The decisions about all scanned rows.

    `stays`: which rows become samples. `elsewhere`: the rows of the other split. `meaning`: what labels mean.
    `label_names`: the name of each label id.
    """

    stays: NDArray[np.bool_]
    duplicates: Duplicates
    elsewhere: NDArray[np.int64]
    meaning: Meaning
    label_names: tuple[str, ...]


def make_plan(store: Store, spec: PackSpec, listing: Listing, *, workers: int) -> Plan:
    """Deals the scanned samples to shards in the order of a keyed hash of their positions, and writes the plan. Raises
    UserError if no image can be packed."""
    meaning = settled(store, spec, len(listing.slices), workers=workers)
    sets = tuple(find_sets(spec.dedup.against))
    found = _survey(store, spec, listing, meaning, sets, workers=workers)
    num_scanned, num_refused = len(found.is_fit), int((~found.is_fit).sum()) - found.num_unlabeled
    stays = found.is_fit.copy()
    stays[found.overlaps.column("position").to_numpy()] = False
    duplicates = _duplicates(store, spec, found, stays, meaning)
    stays[duplicates.rows] = False
    if duplicates.num_relisted:
        again = plural(duplicates.num_relisted, "image")
        log.warning("%s listed again with other labels: an image has the labels of all its rows", again)
    elsewhere = _of_other_side(store, spec, found, stays, meaning)
    stays[elsewhere] = False
    num_samples = int(stays.sum())
    if not num_samples:
        raise UserError(_no_image_words(store, spec.source, found, num_refused))
    names = meaning.names if meaning.names is not None else sorted_labels(found.labels)
    if meaning.names is None:
        refuse_classes_of_splits(names)
    decided = _Decided(stays=stays, duplicates=duplicates, elsewhere=elsewhere, meaning=meaning, label_names=names)
    with temporary_folder("patchline-plan-") as folder:
        files = found.files | _deal(store, spec, found, decided, folder, workers=workers)
        files |= _write_dropped(store, spec, folder, found, sets)
    plan = Plan(
        format_version=FORMAT_VERSION,
        settings=spec.settings(),
        versions=spec.versions(),
        label_names=names,
        num_samples=num_samples,
        num_quarantined=num_scanned - num_samples,
        num_refused=num_refused,
        num_unlabeled=found.num_unlabeled,
        num_duplicates=len(duplicates.rows),
        num_relabelled=duplicates.num_relabelled,
        num_evaluation=found.overlaps.num_rows,
        num_shards=-(-num_samples // spec.samples_per_shard),
        evaluation_sets={item.url: item.fingerprint for item in sets},
        files=files,
    )
    store.write(PLAN_PATH, plan.to_bytes())
    return plan


def _no_image_words(store: Store, source: Source, found: _Surveyed, num_refused: int) -> str:
    counts = [
        (num_refused, "cannot be packed"),
        (found.num_unlabeled, "have no label (--unlabeled keep packs them without)"),
        (found.overlaps.num_rows, "are of evaluation sets (--dedup.against)"),
    ]
    said = ", ".join(f"{count} {what}" for count, what in counts if count)
    examples = [printable_name(f"  {name}: {reason}") for name, reason in found.examples[:EXAMPLES]]
    todo = f"all reasons: column reason of {store.url}/plan/scan-*"
    if isinstance(source, FolderSource) and found.num_unlabeled == len(found.is_fit):
        root = source.root.rstrip("/")
        folder = shlex.quote(root.rpartition("/")[0] if "://" in root else str(Path(root).parent))
        none = f"the classes are the folders in --source.root {source.root}, and there is none"
        flat = "take patchline pack flat for labels in file names or in a table"
        is_split = split_of(root.rpartition("/")[2])  # the folder above then has splits, not classes
        todo = (
            f"{none}; {flat}" if is_split else f"{none}; give the folder above it (--source.root {folder}), or {flat}"
        )
    return "\n".join([f"the source has no usable image: of {len(found.is_fit)}, {said}", *examples, todo])


def sorted_labels(names: set[str]) -> tuple[str, ...]:
    """Returns distinct label names in the order of their ids: by number if all are integers, otherwise as strings."""
    if all(name.removeprefix("-").isdecimal() and name.isascii() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def permutation(positions: NDArray[np.int64], *, seed: int) -> NDArray[np.intp]:
    """Returns the indices that put `positions` into their global random order. If a position is left out, the others
    keep their order."""
    return np.argsort(hash_array(positions, key=PACKING.key(seed)), kind="stable")


def _survey(
    store: Store,
    spec: PackSpec,
    listing: Listing,
    meaning: Meaning,
    sets: tuple[EvaluationSet, ...],
    *,
    workers: int,
) -> _Surveyed:
    hashes = [some.sha256 for some in listing.slices]
    tasks = (
        SurveyTask(
            url=store.url,
            spec=spec,
            first_number=begin,
            slices_sha256=tuple(hashes[begin : begin + SCANS_A_TASK]),
            meaning=meaning,
            evaluation_sets=sets,
        )
        for begin in range(0, len(hashes), SCANS_A_TASK)
    )
    surveys: dict[int, Survey] = {}
    with Progress("survey", len(hashes), unit="scan files") as progress:
        for result in run_tasks(survey, tasks, workers=workers):
            surveys[result.first_number] = result
            progress.advance(len(result.sha256))
    ordered = [surveys[first] for first in sorted(surveys)]
    return _Surveyed(
        files={
            scan_path(item.first_number + place): sha256 for item in ordered for place, sha256 in enumerate(item.sha256)
        },
        first_rows=np.cumsum([0, *(count for item in ordered for count in item.num_rows)]),
        is_fit=np.concatenate([item.is_fit for item in ordered]),
        sha_prefix=np.concatenate([item.sha_prefix for item in ordered]),
        labels=set().union(*(item.labels for item in ordered)),
        overlaps=_overlaps(ordered, sets),
        num_unlabeled=sum(item.num_unlabeled for item in ordered),
        examples=[example for item in ordered for example in item.examples],
    )


def _overlaps(surveys: list[Survey], sets: tuple[EvaluationSet, ...]) -> pa.Table:
    first_rows = np.cumsum([0, *(len(item.is_fit) for item in surveys)]).tolist()
    rows = [
        {
            "position": first_row + overlap.row,
            "kind": "evaluation",
            "reason": f"a copy of an image of {sets[overlap.match.set_number].url}",
            "match": overlap.match.source,
            "distance": overlap.distance,
            "set_number": overlap.match.set_number,
            "shard": overlap.match.shard,
            "row": overlap.match.row,
        }
        for first_row, item in zip(first_rows, surveys, strict=False)
        for overlap in item.overlaps
    ]
    fields = [(name, DROPPED_SCHEMA.field(name).type) for name in ("position", "kind", "reason", "match", "distance")]
    return pa.Table.from_pylist(
        rows, pa.schema([*fields, *((name, pa.int64()) for name in ("set_number", "shard", "row"))])
    )


def _duplicates(
    store: Store, spec: PackSpec, found: _Surveyed, stays: NDArray[np.bool_], meaning: Meaning
) -> Duplicates:
    def read(rows: NDArray[np.int64]) -> pa.Table:
        return labelled(pa.concat_tables(_rows_of_scans(store, found.first_rows, rows)), meaning)

    if spec.dedup.duplicates == "keep":
        return find_duplicates(np.empty(0, np.int64), read, policy="first")
    return find_duplicates(candidates(found.sha_prefix, stays), read, policy=spec.dedup.duplicates)


def _of_other_side(
    store: Store, spec: PackSpec, found: _Surveyed, stays: NDArray[np.bool_], meaning: Meaning
) -> NDArray[np.int64]:
    """Returns the rows that would stay, but belong to the other split."""
    rows = np.flatnonzero(stays)
    if not spec.split_test or not len(rows):
        return np.empty(0, np.int64)
    table = labelled(pa.concat_tables(_rows_of_scans(store, found.first_rows, rows, columns=("labels",))), meaning)
    return rows_of_other_side(spec, rows, found.sha_prefix, table.column("labels"))


def _rows_of_scans(
    store: Store,
    first_rows: NDArray[np.int64],
    rows: NDArray[np.int64],
    *,
    columns: Sequence[str] = ("sha256", "source", "labels", "weights"),
) -> Iterator[pa.Table]:
    """Yields these rows of the scan files, file by file. `rows` must be in rising order. Files without any of these
    rows are not read."""
    edges = np.searchsorted(rows, first_rows)
    for number in np.flatnonzero(np.diff(edges)).tolist():
        _, table = read_scan(store, number, list(columns))
        yield table.take(pa.array(rows[edges[number] : edges[number + 1]] - first_rows[number]))


def _deal(
    store: Store, spec: PackSpec, found: _Surveyed, decided: _Decided, folder: str, *, workers: int
) -> dict[str, str]:
    """Writes the plan's samples files. Returns the sha256 of each file by its path."""
    num_scans = len(found.first_rows) - 1
    with Progress("deal", num_scans, unit="scan files") as progress:
        for count in run_tasks(deal, _deal_tasks(store, spec, found, decided, folder), workers=workers):
            progress.advance(count)
    num_files = _num_files(spec, decided)
    files = (
        GatherTask(url=store.url, number=number, samples_per_shard=spec.samples_per_shard, folder=folder)
        for number in range(num_files)
    )
    written = {}
    with Progress("plan", num_files, unit="samples files") as progress:
        for path, sha256 in run_tasks(gather, files, workers=workers):
            written[path] = sha256
            progress.advance()
    return written


def _deal_tasks(store: Store, spec: PackSpec, found: _Surveyed, decided: _Decided, folder: str) -> Iterator[DealTask]:
    """Yields a task for every SCANS_A_TASK scan files, with the decisions about their rows."""
    num_scans = len(found.first_rows) - 1
    slots, drops = _slots(decided.stays, seed=spec.seed), _drops(spec, found, decided)
    merged = decided.duplicates.labels
    merged_rows = sorted(merged)
    for begin in range(0, num_scans, SCANS_A_TASK):
        end = min(begin + SCANS_A_TASK, num_scans)
        first, after = int(found.first_rows[begin]), int(found.first_rows[end])
        rows = merged_rows[bisect_left(merged_rows, first) : bisect_left(merged_rows, after)]
        inside = pc.and_(pc.greater_equal(drops["position"], first), pc.less(drops["position"], after))
        yield DealTask(
            url=store.url,
            spec=spec,
            numbers=tuple(range(begin, end)),
            first_position=first,
            slots=slots[first:after],
            drops=drops.filter(inside),
            merged={row: merged[row] for row in rows},
            meaning=decided.meaning,
            label_names=decided.label_names,
            num_files=_num_files(spec, decided),
            folder=folder,
        )


def _num_files(spec: PackSpec, decided: _Decided) -> int:
    """Returns the number of samples files of the plan."""
    return -(-int(decided.stays.sum()) // (shards_per_file(spec.samples_per_shard) * spec.samples_per_shard))


def _slots(stays: NDArray[np.bool_], *, seed: int) -> NDArray[np.int64]:
    """Returns the slot of each scanned row in the plan; -1 if it is dropped."""
    positions = np.flatnonzero(stays)
    slots = np.full(len(stays), -1, np.int64)
    slots[positions[permutation(positions, seed=seed)]] = np.arange(len(positions))
    return slots


def _drops(spec: PackSpec, found: _Surveyed, decided: _Decided) -> pa.Table:
    duplicates = decided.duplicates
    num_rows, num_elsewhere = len(duplicates.rows), len(decided.elsewhere)
    side = "training" if spec.split == "test" else "test"
    copies = pa.table(
        {
            "position": pa.array(duplicates.rows, pa.int64()),
            "kind": pa.repeat("duplicate", num_rows),
            "reason": pa.repeat("the same bytes as an image before it", num_rows),
            "match": duplicates.kept_sources,
            "distance": pa.array(np.zeros(num_rows), pa.int32()),
        }
    )
    others = pa.table(
        {
            "position": pa.array(decided.elsewhere, pa.int64()),
            "kind": pa.repeat("split", num_elsewhere),
            "reason": pa.repeat(f"in the {side} split", num_elsewhere),
        }
    )
    overlaps = found.overlaps.select(copies.schema.names)
    return pa.concat_tables([copies, overlaps, others], promote_options="default")


def _write_dropped(
    store: Store, spec: PackSpec, folder: str, found: _Surveyed, sets: tuple[EvaluationSet, ...]
) -> dict[str, str]:
    dropped = dropped_rows(folder)
    written = {DROPPED_PATH: table_bytes(dropped)}
    if sets:
        written[MATCHES_PATH] = table_bytes(closest_matches(store, spec, dropped, found.overlaps, sets))
    for path, data in written.items():
        store.write(path, data)
    return {path: sha256_hex(data) for path, data in written.items()}

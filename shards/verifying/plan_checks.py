"""Compares a dataset with its plan: the samples of each shard, and the tables of the whole dataset. Each check yields
faults."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import pyarrow as pa

from shards.config_values import Difference, shown_value
from shards.images.config import Resize
from shards.images.resize import is_untouched
from shards.index import LABELS_SCHEMA, QUARANTINE_SCHEMA, IndexRow, LeftOut, ShardCommit
from shards.manifest import Manifest
from shards.orientation import UPRIGHT
from shards.packing.deal import quarantine_table
from shards.packing.plan import DROPPED_PATH, AdoptedRecord, Plan, plan_record
from shards.packing.write_shard import PlannedSample
from shards.storage.objects import StoreFile
from shards.store import MissingObjectError, Store
from shards.tables import TableSchema, arrow_faults, open_checked, refuse_values

_SETTINGS = ("split", "samples_per_block")
_ROWS_AT_ONCE = 1 << 16
_MOST_SCANNED = 1 << 32  # each image takes a byte of memory
_RULES = TableSchema(schema=pa.schema([("position", pa.int64())]))


def check_planned(
    rows: Sequence[IndexRow], commit: ShardCommit, planned: Sequence[PlannedSample], *, resize: Resize
) -> Iterator[str]:
    """Checks that every sample that the plan assigns to this shard is in it, in the plan's order, or is listed as left
    out."""
    left_out = {item.position for item in commit.left_out}
    for position in sorted(left_out - {item.position for item in planned}):
        yield f"it lists position {position} as left out, which the plan did not deal to it"
    sources = {item.position: item.source for item in planned}
    for item in commit.left_out:
        if item.source != sources.get(item.position, item.source):
            yield f"it lists position {item.position} as left out under another name than the plan's"
    expected = {
        (f"{item.slot:010d}", item.source): item
        for item in sorted(planned, key=lambda item: item.slot)
        if item.position not in left_out
    }
    found = [(row.key, row.source) for row in rows]
    for key, source in sorted(set(expected) - set(found)):
        yield f"sample {key} ({source}) of the plan is neither in it nor listed as left out"
    for key, source in sorted(set(found) - set(expected)):
        yield f"sample {key} ({source}) is not what the plan dealt to it"
    if set(found) == set(expected) and found != list(expected):
        yield "its samples are not in the plan's order, or not once each"
    for row, place in zip(rows, found, strict=True):
        if place in expected:
            for change in _changes(row, expected[place], resize):
                yield f"sample {row.key} ({row.source}) has {change.field} {change.now}, by the plan {change.before}"


def _changes(row: IndexRow, planned: PlannedSample, resize: Resize) -> list[Difference]:
    """Returns the fields in which the index differs from the plan. A resized copy has its own bytes, and a size that is
    computed from the plan's."""
    pairs: dict[str, tuple[object, object]] = {
        "labels": (row.labels, planned.labels),
        "weights": (row.weights, planned.weights),
    }
    if is_untouched(planned.header(), resize):
        pairs |= {
            "format": (row.ext, planned.ext),
            "height and width": ((row.height, row.width), (planned.height, planned.width)),
            "orientation": (row.orientation, planned.orientation),
            "size": (row.size, planned.size),
            "crc32": (row.crc32, planned.crc32),
        }
    else:
        pairs |= {
            "format": (row.ext, "jpg"),
            "sides": (tuple(sorted((row.height, row.width))), _copied_sides(planned, resize)),
            "orientation": (row.orientation, UPRIGHT),
        }
    return [Difference(field=name, before=there, now=here) for name, (here, there) in pairs.items() if here != there]


def _copied_sides(planned: PlannedSample, resize: Resize) -> tuple[int, int]:
    """Returns the shorter and the longer side of a copy, which may have been rotated."""
    short, long = sorted((planned.height, planned.width))
    if not resize.short_side or short <= resize.short_side:
        return short, long
    return resize.short_side, (2 * long * resize.short_side + short) // (2 * short)


def check_manifest(manifest: Manifest, plan: bytes) -> Iterator[str]:
    """Checks what the manifest repeats from the plan, or from the record of adopted tars. Raises ValueError if `plan`
    is not valid."""
    record = plan_record(plan, is_adopted=manifest.adopted)
    names, settings = record.label_names, record.settings
    if manifest.num_classes != len(names):
        yield f"num_classes is {manifest.num_classes}, the plan has {len(names)} classes"
    for name in _SETTINGS:
        if name in settings and getattr(manifest, name) != settings[name]:
            yield f"{name} is {getattr(manifest, name)!r}, by the plan {settings[name]!r}"
    limits, by_plan = asdict(manifest.limits), settings.get("limits")
    if isinstance(by_plan, dict) and any(limits.get(name) != value for name, value in by_plan.items()):
        yield f"limits are {limits}, by the plan {shown_value(settings['limits'])}"
    if isinstance(record, AdoptedRecord):
        for name in ("num_samples", "num_quarantined"):
            if getattr(manifest, name) != getattr(record, name):
                yield f"{name} is {getattr(manifest, name)}, by the plan {getattr(record, name)}"
        return
    for path, sha256 in record.files.items():
        if manifest.files.get(path) != sha256:
            yield f"the sha256 of {path} is not the plan's"


def check_label_table(table: pa.Table, names: Sequence[str], counts: Mapping[int, int]) -> Iterator[str]:
    """Checks that labels.parquet has the plan's class names, and the same number of samples of each class as the
    indexes."""
    expected = [(label, name, counts.get(label, 0)) for label, name in enumerate(names)]
    if table.num_rows != len(expected):
        yield f"has {table.num_rows} rows, the plan has {len(expected)} classes"
    columns = (table.column(name).to_pylist() for name in LABELS_SCHEMA.names)
    for row, (found, wanted) in enumerate(zip(zip(*columns, strict=True), expected, strict=False)):
        if found != wanted:
            yield f"row {row} has label, name, num_samples {found}, they should be {wanted}"


def check_quarantine(table: pa.Table, dropped: pa.Table, left_out: Sequence[LeftOut]) -> Iterator[str]:
    """Checks that quarantine.parquet lists exactly the samples that the plan dropped or the shards left out, each
    once."""
    found, expected = table.select(QUARANTINE_SCHEMA.names), quarantine_table(dropped, left_out)
    if found.cast(QUARANTINE_SCHEMA).equals(expected):
        return
    here, there = found.column("position").to_numpy(), expected.column("position").to_numpy()
    for position in np.setdiff1d(there, here).tolist():
        yield f"position {position} is not in it, but was dropped by the plan or left out by a shard"
    for position in np.setdiff1d(here, there).tolist():
        yield f"position {position} is in it, but was neither dropped by the plan nor left out by a shard"
    wanted_rows = expected.filter(pa.array(np.isin(there, here))).to_pylist()
    rows = {row["position"]: row for row in wanted_rows}
    for row in found.filter(pa.array(np.isin(here, there))).to_pylist():
        wanted = rows.pop(row["position"], None)
        if wanted is None:
            yield f"position {row['position']} is in it more than once"
        elif different := [name for name, value in row.items() if value != wanted[name]]:
            yield f"position {row['position']} has another {', '.join(different)} than the plan or its shard"
    if not np.array_equal(here, np.sort(here)):
        yield "its rows are not in the order of their positions"


def check_adopted_quarantine(table: pa.Table, num_scanned: int) -> Iterator[str]:
    """Checks that every position lies within the scanned samples and appears once. For adopted tars, there is no other
    file of refused samples to compare with."""
    positions = table.column("position").to_numpy()
    if len(np.unique(positions)) != len(positions):
        yield "a position is in it more than once"
    if len(positions) and not 0 <= positions.min() <= positions.max() < num_scanned:
        yield f"has positions outside 0 to {num_scanned - 1}"


def check_positions(store: Store, plan: Plan) -> Iterator[str]:
    """Finds positions that are planned or dropped more than once, or never. Positions number the scanned images from
    0."""
    num_scanned = plan.num_samples + plan.num_quarantined
    if num_scanned > _MOST_SCANNED:
        yield f"it has {num_scanned} images; the check of positions takes at most {_MOST_SCANNED:,}"
        return
    times = np.zeros(num_scanned, np.uint8)
    for path in plan.files:
        if not path.startswith("plan/samples-") and path != DROPPED_PATH:
            continue
        try:
            with arrow_faults(), open_checked(StoreFile(store, path), _RULES) as file:
                table = file.read(["position"], rows=_ROWS_AT_ONCE)
            refuse_values(table, _RULES)
        except MissingObjectError:
            return  # `_files` in verify.py reports it
        except ValueError as error:
            yield f"{path} cannot be read: {error}"
            return
        positions = table.column("position").to_numpy()
        if len(positions) and not 0 <= positions.min() <= positions.max() < num_scanned:
            yield f"{path} has positions outside 0 to {num_scanned - 1}"
            return
        np.add.at(times, positions, 1)
    for position in np.flatnonzero(times != 1).tolist():
        how_often = "in no shard and not among the dropped" if not times[position] else "in more than one place"
        yield f"the image at position {position} is {how_often}"

"""Proof from the plan's own files that every scanned image is in exactly one shard or among the dropped ones."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from shards.packing.plan import DROPPED_PATH, Plan
from shards.storage.store_file import StoreFile
from shards.store import MissingObjectError, Store
from shards.tables import TableSchema, arrow_faults, open_checked, refuse_values

_ROWS_AT_ONCE = 1 << 16
_MOST_SCANNED = 1 << 32  # a byte of memory for each
_RULES = TableSchema(schema=pa.schema([("position", pa.int64())]))


def misplaced(store: Store, plan: Plan) -> Iterator[str]:
    """Positions that are planned or dropped more than once, or never. Positions run from 0 to the images scanned."""
    num_scanned = plan.num_samples + plan.num_quarantined
    if num_scanned > _MOST_SCANNED:
        yield f"it has {num_scanned} images; positions are checked of {_MOST_SCANNED:,} at most"
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
            return  # reported with the files
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

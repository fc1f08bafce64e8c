"""Proof from the plan's own files that every scanned image is in exactly one shard or among the dropped ones."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shards.packing.plan import DROPPED_PATH, Plan
from shards.storage.store_file import StoreFile
from shards.store import MissingObjectError, Store


def misplaced(store: Store, plan: Plan) -> Iterator[str]:
    """Positions that are planned or dropped more than once, or never. Positions run from 0 to the images scanned."""
    num_scanned = plan.num_samples + plan.num_quarantined
    times = np.zeros(num_scanned, np.uint8)
    for path in plan.files:
        if not path.startswith("plan/samples-") and path != DROPPED_PATH:
            continue
        try:
            with pq.ParquetFile(StoreFile(store, path)) as file:
                positions = file.read(columns=["position"], use_threads=False).column("position").to_numpy()
        except (MissingObjectError, pa.ArrowInvalid, KeyError):
            return  # reported with the files
        if len(positions) and not 0 <= positions.min() <= positions.max() < num_scanned:
            yield f"{path} has positions outside 0 to {num_scanned - 1}"
            return
        np.add.at(times, positions, 1)
    for position in np.flatnonzero(times != 1).tolist():
        how_often = "in no shard and not among the dropped" if not times[position] else "in more than one place"
        yield f"the image at position {position} is {how_often}"

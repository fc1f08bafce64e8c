"""Thumbnails of matches with evaluation sets: both images of the closest and of the most doubtful pairs.

They are made with the plan, while the source and the evaluation sets can be read; the card shows them.
"""

import pyarrow as pa
import pyarrow.compute as pc

from shards.dataset import open_dataset
from shards.errors import StorageError, UserError
from shards.images.thumbnails import thumbnail
from shards.packing.config import PackSpec
from shards.packing.evaluation_sets import EvaluationSet
from shards.packing.staging import reader_of
from shards.sources.entry import ImageBytes
from shards.store import MissingObjectError, Store

MOST_MATCHES = 48
_UNREADABLE = (OSError, ValueError, KeyError, IndexError, EOFError, MissingObjectError, UserError, StorageError)

_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("evaluation", pa.string()),
        ("evaluation_set", pa.string()),
        ("distance", pa.int32()),
        ("thumbnail", pa.binary()),  # JPEG; null if the image could not be read again
        ("evaluation_thumbnail", pa.binary()),
    ]
)


def closest_matches(
    store: Store, spec: PackSpec, dropped: pa.Table, overlaps: pa.Table, sets: tuple[EvaluationSet, ...]
) -> pa.Table:
    """Chooses at most MOST_MATCHES pairs, nearest first: half of them the closest, half the farthest that still
    match."""
    ordered = overlaps.sort_by([("distance", "ascending"), ("position", "ascending")])
    if ordered.num_rows > MOST_MATCHES:
        half = MOST_MATCHES // 2
        ordered = pa.concat_tables([ordered.slice(0, half), ordered.slice(ordered.num_rows - half)])
    reader = reader_of(store, spec)
    rows = []
    for item in ordered.to_pylist():
        ours = dropped.filter(pc.equal(dropped["position"], item["position"])).to_pylist()[0]
        [image] = reader.read_many([ours["locator"].decode("utf-8", "surrogateescape")])
        rows.append(
            {
                "source": ours["source"],
                "evaluation": item["match"],
                "evaluation_set": sets[item["set_number"]].url,
                "distance": item["distance"],
                "thumbnail": _small(image),
                "evaluation_thumbnail": _small(_evaluation_image(sets[item["set_number"]], item)),
            }
        )
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def _small(image: ImageBytes) -> bytes | None:
    made = thumbnail(image) if isinstance(image, bytes) else None
    return made.data if made else None


def _evaluation_image(item: EvaluationSet, match: dict[str, int]) -> ImageBytes:
    try:
        dataset = open_dataset(item.url)
        rows = dataset.sample_rows(match["shard"])
        first = int(rows.offset[match["row"]])
        path = dataset.shard_path(match["shard"])
        return dataset.shard_store.read_range(path, first, first + int(rows.size[match["row"]]))
    except _UNREADABLE as error:
        return OSError(str(error))

"""The pictures on a dataset's card: which samples are shown, and small JPEG copies of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.card.tally import first_labels
from shards.dataset import Dataset
from shards.hashing import derive_key, hash_array
from shards.images.config import MAX_IMAGE_BYTES
from shards.images.thumbnails import Thumbnail, picture, thumbnail
from shards.packing.matches import MOST_MATCHES
from shards.packing.plan import MATCHES_PATH
from shards.storage.ahead import in_order
from shards.storage.objects import MissingObjectError, StoreFile
from shards.tables import TableSchema, arrow_faults, open_checked, refuse_values

READS_AHEAD = 8
MATCHES_RULES = TableSchema(
    schema=pa.schema(
        [
            ("source", pa.string()),
            ("evaluation", pa.string()),
            ("evaluation_set", pa.string()),
            ("distance", pa.int32()),
            ("thumbnail", pa.binary()),
            ("evaluation_thumbnail", pa.binary()),
        ]
    ),
    may_be_null=frozenset({"thumbnail", "evaluation_thumbnail"}),
)
_CANDIDATES = 4096
_MOSAIC = 0x6D6F7361  # "mosa": keeps this choice apart from other uses of the hash


@dataclass(frozen=True, kw_only=True)
class Pick:
    """A sample chosen for the mosaic: where its bytes are."""

    shard: int
    row: int
    offset: int
    size: int
    labels: tuple[int, ...]
    source: str
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One picture of the mosaic; `shard_path` is the path of its tar."""

    pick: Pick
    shard_path: str
    thumbnail: Thumbnail


@dataclass(frozen=True, kw_only=True)
class CardMatch:
    """An image that was left out, and the evaluation image that it looks like; a picture may be missing."""

    source: str
    evaluation: str
    evaluation_set: str
    distance: int
    thumbnail: Thumbnail | None
    evaluation_thumbnail: Thumbnail | None


class Mosaic:
    """Chooses `num_tiles` samples, always the same ones, spread over the shards and over the classes.

    `shard_samples` is int64[num_shards].
    """

    def __init__(self, shard_samples: NDArray[np.int64], *, num_tiles: int, num_classes: int) -> None:
        num_samples = int(shard_samples.sum())
        num_tiles = min(num_tiles, num_samples)
        # as many from a shard as it has of num_tiles evenly spaced sample ids
        sample_ids = ((2 * np.arange(num_tiles) + 1) * num_samples) // (2 * max(num_tiles, 1))
        shards = np.searchsorted(np.cumsum(shard_samples), sample_ids, side="right")
        self._wanted: NDArray[np.int64] = np.bincount(shards, minlength=len(shard_samples))
        self._num_shown = np.zeros(num_classes + 1, np.int64)  # per class; the last is for samples without a label
        self._picks: list[Pick] = []

    def wants(self, shard: int) -> bool:
        """Whether any sample of a shard is chosen."""
        return bool(self._wanted[shard])

    def add(self, shard: int, table: pa.Table) -> None:
        """Choose from a shard's index (columns key, offset, size, labels, source): classes shown least come first."""
        by_hash = np.argsort(hash_array(np.arange(table.num_rows), key=derive_key(_MOSAIC, shard)), kind="stable")
        rows = by_hash[:_CANDIDATES]
        labels = first_labels(table.column("labels").combine_chunks())[rows].clip(-1, len(self._num_shown) - 2)
        is_free = np.ones(len(rows), np.bool_)
        for _ in range(min(int(self._wanted[shard]), len(rows))):
            place = int(np.argmin(np.where(is_free, self._num_shown[labels], np.iinfo(np.int64).max)))
            is_free[place] = False
            self._num_shown[labels[place]] += 1
            self._picks.append(_pick(shard, int(rows[place]), table))

    def picks(self) -> list[Pick]:
        """What was chosen, by class."""
        return sorted(self._picks, key=lambda pick: (pick.labels, pick.shard, pick.row))


def read_tiles(dataset: Dataset, picks: Sequence[Pick]) -> Iterator[Tile]:
    """The pictures, without those that cannot be read or decoded."""

    def read(pick: Pick) -> bytes:
        return dataset.shard_store.read_range(dataset.shard_path(pick.shard), pick.offset, pick.offset + pick.size)

    picks = [pick for pick in picks if pick.size <= MAX_IMAGE_BYTES]  # no loader reads larger ones either
    images = in_order(read, picks, threads=READS_AHEAD, window=READS_AHEAD)
    for pick, image in zip(picks, images, strict=True):
        if isinstance(image, (MissingObjectError, EOFError)):
            continue  # verify reports what is missing
        if isinstance(image, Exception):
            raise image
        if small := picture(image):
            yield Tile(pick=pick, shard_path=dataset.shard_path(pick.shard), thumbnail=small)


def read_matches(dataset: Dataset) -> tuple[CardMatch, ...]:
    """The closest matches with evaluation sets, closest first; empty if the plan looked for none."""
    if MATCHES_PATH not in dataset.manifest.files:
        return ()
    file = StoreFile(dataset.store, MATCHES_PATH)
    with dataset.naming(MATCHES_PATH), arrow_faults(), open_checked(file, MATCHES_RULES) as opened:
        batches = opened.batches(MATCHES_RULES.schema.names, rows=MOST_MATCHES)
        table = pa.Table.from_batches([*islice(batches, 1)], MATCHES_RULES.schema)
        table.validate(full=True)
        refuse_values(table, MATCHES_RULES)
    rows = sorted(table.to_pylist(), key=lambda row: int(row["distance"]))
    return tuple(
        CardMatch(
            source=row["source"],
            evaluation=row["evaluation"],
            evaluation_set=row["evaluation_set"],
            distance=row["distance"],
            thumbnail=thumbnail(row["thumbnail"] or b""),
            evaluation_thumbnail=thumbnail(row["evaluation_thumbnail"] or b""),
        )
        for row in rows
    )


def _pick(shard: int, row: int, table: pa.Table) -> Pick:
    found = table.slice(row, 1).to_pylist()[0]
    return Pick(
        shard=shard,
        row=row,
        offset=found["offset"],
        size=found["size"],
        labels=tuple(found["labels"] or ()),
        source=found["source"] or "",
        key=found["key"] or "",
    )

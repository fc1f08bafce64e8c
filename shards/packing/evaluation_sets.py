"""Finds the images of a collection that must be left out because they are in an evaluation set, or look like an image
of one.

The ViT paper removes the test images of its downstream tasks from its pre-training data (section 4.1). An evaluation
set is a packed (or adopted) dataset; the scan phase hashes it into one file per shard, and the plan compares the
collection with these hashes.

Thumbnails of the closest and of the most doubtful matches are made with the plan, while the source and the evaluation
sets can still be read; the card shows them.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.dataset import Dataset, open_dataset
from shards.errors import ImageRefusedError, StorageError, UserError
from shards.images.config import HASH_BITS, PERCEPTUAL_HASH
from shards.images.decoding_cost import refuse_costly
from shards.images.near_duplicates import EvaluationIndex, evaluation_hashes
from shards.images.resize import thumbnail
from shards.packing.config import PackSpec
from shards.packing.scan import reader_of
from shards.sources.entry import ImageBytes
from shards.store import MissingObjectError, Store, open_store
from shards.tables import MOST_ROWS, TableSchema, read_checked, table_bytes

HASH_BYTES = HASH_BITS // 8
VIEWS = ("straight", "mirrored", "inner", "inner_mirrored")
_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("source", pa.string()),
        ("sha256", pa.binary(32)),
        # Made by evaluation_hashes. Null if the image has no structure or cannot be decoded: only an exact copy
        # matches.
        *((name, pa.binary(HASH_BYTES)) for name in VIEWS),
    ]
)
_RULES = TableSchema(schema=_SCHEMA, may_be_null=frozenset(VIEWS))
_MADE_OF = b"patchline.evaluation"
MOST_MATCHES = 48
_UNREADABLE = (OSError, ValueError, KeyError, IndexError, EOFError, MissingObjectError, UserError, StorageError)
_MATCHES_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("evaluation", pa.string()),
        ("evaluation_set", pa.string()),
        ("distance", pa.int32()),
        ("thumbnail", pa.binary()),  # JPEG; null if the image could not be read again
        ("evaluation_thumbnail", pa.binary()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """An evaluation set: the dataset at `url`, as it was when this command began."""

    url: str
    fingerprint: str
    num_shards: int


@dataclass(frozen=True, kw_only=True)
class HashTask:
    """A task: one shard of an evaluation set to hash, for the packing at `url`."""

    url: str
    evaluation_set: EvaluationSet
    number: int
    shard: int


@dataclass(frozen=True, kw_only=True)
class EvaluationMatch:
    """An evaluation image: the number of its set, and its place in the set."""

    set_number: int
    shard: int
    row: int
    source: str


def find_sets(urls: tuple[str, ...]) -> list[EvaluationSet]:
    """Opens the sets at these URLs. Raises UserError if one is missing."""
    found = [open_dataset(url) for url in urls]
    return [
        EvaluationSet(url=url, fingerprint=dataset.fingerprint, num_shards=len(dataset.manifest.shards))
        for url, dataset in zip(urls, found, strict=True)
    ]


def hash_tasks(url: str, sets: Sequence[EvaluationSet]) -> Iterator[HashTask]:
    """Yields a task for every shard of every set."""
    for number, item in enumerate(sets):
        for shard in range(item.num_shards):
            yield HashTask(url=url, evaluation_set=item, number=number, shard=shard)


def hash_shard(task: HashTask) -> int:
    """Writes the hashes of a shard's images unless they exist. Returns the number of shards done, which is 1."""
    store = open_store(task.url)
    if _read_hashes(store, task) is None:
        dataset = open_dataset(task.evaluation_set.url)
        if dataset.fingerprint != task.evaluation_set.fingerprint:
            message = f"the evaluation set {dataset.url} has changed since this command began"
            raise UserError(f"{message}; run it again")
        table = pa.Table.from_pylist(list(_records(dataset, task.shard)), schema=_SCHEMA)
        write_hashes(store, task, table)
    return 1


class EvaluationImages:
    """The hashes of all evaluation sets, for comparing images with them."""

    def __init__(self, tables: list[tuple[int, int, pa.Table]]) -> None:
        self._places = [(number, shard, table) for number, shard, table in tables]
        self._starts = np.cumsum([0, *(table.num_rows for _, _, table in tables)])
        self._sha256, _ = _rows_of_bytes(tables, "sha256")
        self._order = np.argsort(_prefix(self._sha256), kind="stable")
        views = [_rows_of_bytes(tables, name) for name in VIEWS]
        self._images = np.concatenate([np.flatnonzero(known) for _, known in views])
        self._index = EvaluationIndex(np.concatenate([hashes[known] for hashes, known in views]))

    @property
    def num_images(self) -> int:
        """The number of images of all sets."""
        return int(self._starts[-1])

    def closest(
        self, sha256: NDArray[np.uint8], hashes: NDArray[np.uint8], has_hash: NDArray[np.bool_], *, max_distance: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Returns the evaluation image that each of n images is a copy of (-1: none), and the distance between the two
        in bits.

        `sha256` and `hashes` are uint8[n, 32]. Images with equal bytes have distance 0, even if they have no hash.
        """
        image = np.full(len(sha256), -1, np.int64)
        distance = np.zeros(len(sha256), np.int32)
        hashed = np.flatnonzero(has_hash)
        rows, bits = self._index.closest(np.ascontiguousarray(hashes[hashed]), max_distance=max_distance)
        near = rows >= 0
        image[hashed[near]] = self._images[rows[near]]
        distance[hashed[near]] = bits[near]
        exact, same = self._equal(sha256)
        image[exact], distance[exact] = same, 0
        return image, distance

    def match(self, image: int) -> EvaluationMatch:
        """Returns the set and the place of an evaluation image, given its number."""
        place = int(np.searchsorted(self._starts, image, side="right")) - 1
        number, shard, table = self._places[place]
        row = image - int(self._starts[place])
        return EvaluationMatch(
            set_number=number,
            shard=shard,
            row=table.column("row")[row].as_py(),
            source=table.column("source")[row].as_py(),
        )

    def _equal(self, sha256: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the rows of `sha256` that equal the sha256 of an evaluation image, and the number of each row's
        evaluation image."""
        known, wanted = _prefix(self._sha256)[self._order], _prefix(sha256)
        place = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
        if not len(known):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        candidates = self._order[place]
        rows = np.flatnonzero((self._sha256[candidates] == sha256).all(axis=1))
        return rows, candidates[rows]


@lru_cache(maxsize=1)
def load_images(url: str, sets: tuple[EvaluationSet, ...]) -> EvaluationImages:
    """Loads the hashes that the scan phase wrote for the packing at `url`. Each process loads them once."""
    store, tables = open_store(url), []
    for task in hash_tasks(url, sets):
        if (table := _read_hashes(store, task)) is None:
            message = f"{store.url}/{_path(task)} is missing or of another evaluation set"
            raise UserError(f"{message}; run --phase scan with every part first")
        tables.append((task.number, task.shard, table))
    return EvaluationImages(tables)


def _path(task: HashTask) -> str:
    return f"work/evaluation-{task.number:02d}-{task.shard:06d}.parquet"


def write_hashes(store: Store, task: HashTask, table: pa.Table) -> None:
    """Writes the hashes of a shard's images, with a record of what they were made from."""
    store.write(_path(task), table_bytes(table.replace_schema_metadata({_MADE_OF: _made_of(task)})))


def _made_of(task: HashTask) -> bytes:
    return f"{task.evaluation_set.fingerprint} {task.shard} {PERCEPTUAL_HASH}".encode()


def is_hashed(store: Store, task: HashTask) -> bool:
    """Returns whether the hashes of a shard's images exist and are up to date."""
    return _read_hashes(store, task) is not None


def _read_hashes(store: Store, task: HashTask) -> pa.Table | None:
    try:
        table = read_checked(store.read(_path(task)), _RULES, most_rows=MOST_ROWS)
    except (MissingObjectError, ValueError):
        return None
    return table if (table.schema.metadata or {}).get(_MADE_OF) == _made_of(task) else None


def _records(dataset: Dataset, shard: int) -> Iterator[dict[str, object]]:
    rows = dataset.sample_rows(shard)
    for row, (offset, size) in enumerate(zip(rows.offset.tolist(), rows.size.tolist(), strict=True)):
        image = dataset.shard_store.read_range(dataset.shard_path(shard), offset, offset + size)
        try:
            refuse_costly(image, dataset.manifest.limits)
            hashes = evaluation_hashes(image) or (None,) * len(VIEWS)
        except ImageRefusedError:
            hashes = (None,) * len(VIEWS)
        facts = {"row": row, "source": dataset.source_of(shard, row), "sha256": hashlib.sha256(image).digest()}
        yield facts | dict(zip(VIEWS, hashes, strict=True))


def _rows_of_bytes(tables: list[tuple[int, int, pa.Table]], name: str) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Returns a column of all tables as uint8[n, bytes], and where it is not null."""
    columns = [bytes_rows(table.column(name)) for _, _, table in tables]
    return np.concatenate([item[0] for item in columns]), np.concatenate([item[1] for item in columns])


def bytes_rows(column: pa.ChunkedArray) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Returns a column of fixed-size binary as uint8[n, bytes] (nulls are zeros), and where it is not null."""
    width = column.type.byte_width
    array = column.combine_chunks()
    array = array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks)
    filled = array.fill_null(bytes(width))
    data = np.frombuffer(filled.buffers()[1], np.uint8)[filled.offset * width :][: len(filled) * width]
    return data.reshape(len(filled), width), array.is_valid().to_numpy(zero_copy_only=False)


def _prefix(sha256: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(sha256[:, :8]).view(np.uint64).reshape(-1)


def closest_matches(
    store: Store, spec: PackSpec, dropped: pa.Table, overlaps: pa.Table, sets: tuple[EvaluationSet, ...]
) -> pa.Table:
    """Returns at most MOST_MATCHES pairs with thumbnails, closest first: half of them the closest, half the farthest
    that still match. A thumbnail is null if its image cannot be read again."""
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
    return pa.Table.from_pylist(rows, schema=_MATCHES_SCHEMA)


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

"""Gathers the facts and pictures of a dataset's card from the dataset's files, one shard's index at a time."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.card.tally import TALLY_COLUMNS, Tally, first_labels
from shards.dataset import Dataset
from shards.hashing import derive_key, hash_array
from shards.images.config import MAX_IMAGE_BYTES
from shards.images.resize import Thumbnail, picture, thumbnail
from shards.index import QUARANTINE_RULES, QUARANTINE_SCHEMA, general_reasons, read_index, read_sample_rows
from shards.manifest import QUARANTINE_PATH, Manifest, index_path
from shards.output.progress import Progress
from shards.packing.evaluation_sets import MOST_MATCHES
from shards.packing.plan import MATCHES_PATH, PLAN_PATH, AdoptedRecord, Plan, plan_record
from shards.sample_rows import refuse_rows
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
CARD_PATH = "card.html"
TOP_CLASSES = 20
MOST_GROUPS = 500
EXAMPLES = 3
_ROWS_AT_ONCE = 1 << 16
_QUARANTINE_COLUMNS = ("phase", "kind", "reason", "source", "match", "distance")
_QUARANTINE_RULES = TableSchema(
    schema=pa.schema([QUARANTINE_SCHEMA.field(name) for name in _QUARANTINE_COLUMNS]),
    may_be_null=QUARANTINE_RULES.may_be_null,
)
_MODE_RULES = TableSchema(schema=pa.schema([("mode", pa.string())]), may_be_null=frozenset({"mode"}))


@dataclass(frozen=True, kw_only=True)
class Pick:
    """A sample chosen for the mosaic, and where its bytes are."""

    shard: int
    row: int
    offset: int
    size: int
    labels: tuple[int, ...]
    source: str
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A picture of the mosaic. `shard_path`: the path of the tar with the sample."""

    pick: Pick
    shard_path: str
    thumbnail: Thumbnail


@dataclass(frozen=True, kw_only=True)
class CardMatch:
    """An image that was left out, and the evaluation image that it looks like. Either thumbnail may be missing."""

    source: str
    evaluation: str
    evaluation_set: str
    distance: int
    thumbnail: Thumbnail | None
    evaluation_thumbnail: Thumbnail | None


class Mosaic:
    """Chooses `num_tiles` samples, spread over the shards and the classes. The same dataset always gives the same
    samples.

    `shard_samples`: the number of samples of each shard, int64[num_shards].
    """

    def __init__(self, shard_samples: NDArray[np.int64], *, num_tiles: int, num_classes: int) -> None:
        num_samples = int(shard_samples.sum())
        num_tiles = min(num_tiles, num_samples)
        # Each shard shows as many samples as it contains of num_tiles evenly spaced sample ids.
        sample_ids = ((2 * np.arange(num_tiles) + 1) * num_samples) // (2 * max(num_tiles, 1))
        shards = np.searchsorted(np.cumsum(shard_samples), sample_ids, side="right")
        self._wanted: NDArray[np.int64] = np.bincount(shards, minlength=len(shard_samples))
        self._num_shown = np.zeros(num_classes + 1, np.int64)  # per class; the last is for samples without a label
        self._picks: list[Pick] = []

    def wants(self, shard: int) -> bool:
        """Returns whether any sample of a shard is chosen."""
        return bool(self._wanted[shard])

    def add(self, shard: int, table: pa.Table) -> None:
        """Chooses samples from a shard's index (columns key, offset, size, labels, source), preferring the classes
        shown least so far."""
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
        """Returns the chosen samples, sorted by class."""
        return sorted(self._picks, key=lambda pick: (pick.labels, pick.shard, pick.row))


def read_tiles(dataset: Dataset, picks: Sequence[Pick]) -> Iterator[Tile]:
    """Yields the pictures of the chosen samples, except those that are missing, larger than MAX_IMAGE_BYTES, or cannot
    be decoded."""

    def read(pick: Pick) -> bytes:
        return dataset.shard_store.read_range(dataset.shard_path(pick.shard), pick.offset, pick.offset + pick.size)

    picks = [pick for pick in picks if pick.size <= MAX_IMAGE_BYTES]  # no loader reads larger images
    images = in_order(read, picks, threads=READS_AHEAD, window=READS_AHEAD)
    for pick, image in zip(picks, images, strict=True):
        if isinstance(image, (MissingObjectError, EOFError)):
            continue  # `patchline verify` reports missing bytes
        if isinstance(image, Exception):
            raise image
        if small := picture(image):
            yield Tile(pick=pick, shard_path=dataset.shard_path(pick.shard), thumbnail=small)


def read_matches(dataset: Dataset) -> tuple[CardMatch, ...]:
    """Reads the matches with evaluation sets that packing has kept for the card, closest first. Returns () if packing
    did not look for matches."""
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


@dataclass(frozen=True, kw_only=True)
class LeftOutImage:
    """One image in quarantine. `match`: the image that it is a copy of (empty: none)."""

    source: str
    reason: str
    match: str
    distance: int | None


@dataclass(frozen=True, kw_only=True)
class QuarantineGroup:
    """The images that were left out in the same phase for the same kind of reason."""

    phase: str
    kind: str
    reason: str
    count: int
    examples: tuple[LeftOutImage, ...]


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Everything that the card shows. `url`: the URL of the dataset.

    `class_counts`: the number of samples of each class, int64[num_classes]. `modes`: the number of images of each pixel
    format, by Pillow's name.
    """

    url: str
    fingerprint: str
    manifest: Manifest
    plan: Plan | AdoptedRecord
    num_blocks: int
    class_names: tuple[str, ...]
    class_counts: NDArray[np.int64]
    tally: Tally
    modes: Counter[str]
    tiles: tuple[Tile, ...]
    quarantine: tuple[QuarantineGroup, ...]
    matches: tuple[CardMatch, ...]


def gather_facts(dataset: Dataset, *, num_tiles: int) -> CardFacts:
    """Gathers the facts. Reads every index file once, and the bytes of `num_tiles` samples. Raises UserError if a file
    is damaged."""
    manifest = dataset.manifest
    labels = dataset.label_table
    counts = labels.column("num_samples").to_numpy().astype(np.int64)
    top = np.argsort(-counts, kind="stable")[:TOP_CLASSES]
    tally = Tally(top_classes=top[counts[top] > 0], num_classes=len(counts))
    sizes = manifest.shard_column("num_samples")
    mosaic = Mosaic(sizes, num_tiles=num_tiles, num_classes=len(counts))
    _look_at_samples(dataset, tally, mosaic)
    with dataset.naming(PLAN_PATH):
        plan = plan_record(dataset.checked_file(PLAN_PATH), is_adopted=manifest.adopted)
    return CardFacts(
        url=dataset.url,
        fingerprint=dataset.fingerprint,
        manifest=manifest,
        plan=plan,
        num_blocks=dataset.blocks.shard.size,
        class_names=tuple(labels.column("name").to_pylist()),
        class_counts=counts,
        tally=tally,
        modes=_modes(dataset),
        tiles=tuple(read_tiles(dataset, mosaic.picks())),
        quarantine=_quarantine(dataset),
        matches=read_matches(dataset),
    )


def _look_at_samples(dataset: Dataset, tally: Tally, mosaic: Mosaic) -> None:
    """Counts the samples and chooses those of the mosaic. Reads every index file once."""
    shards = dataset.manifest.shards
    with Progress("card", len(shards), unit="shards") as progress:
        for shard, data in enumerate(_index_files(dataset)):
            with dataset.naming(index_path(shard)):
                refuse_rows(read_sample_rows(data), shards[shard], num_classes=dataset.num_classes)
                tally.add(read_index(data, TALLY_COLUMNS))
                if mosaic.wants(shard):
                    mosaic.add(shard, read_index(data, ("key", "offset", "size", "labels", "source")))
            progress.advance()


def _index_files(dataset: Dataset) -> Iterator[bytes]:
    """Yields every index file. Several are read ahead."""
    shards = range(len(dataset.manifest.shards))
    read = in_order(
        lambda shard: dataset.checked_file(index_path(shard)), shards, threads=READS_AHEAD, window=READS_AHEAD
    )
    for data in read:
        if isinstance(data, Exception):
            raise data
        yield data


def _batches(dataset: Dataset, path: str, rules: TableSchema) -> Iterator[pa.Table]:
    """Yields the columns that the rules name, in pieces, so that a large table is never in memory as a whole."""
    columns = rules.schema.names
    with dataset.naming(path), arrow_faults(), open_checked(StoreFile(dataset.store, path), rules) as file:
        for batch in file.batches(columns, rows=_ROWS_AT_ONCE):
            table = pa.Table.from_batches([batch])
            table.validate(full=True)
            refuse_values(table, rules)
            yield table


def _modes(dataset: Dataset) -> Counter[str]:
    modes: Counter[str] = Counter()
    for path in sorted(path for path in dataset.manifest.files if path.startswith("plan/samples-")):
        for table in _batches(dataset, path, _MODE_RULES):
            for item in pc.value_counts(table.column("mode")).to_pylist():
                modes[item["values"] or ""] += item["counts"]
    return modes


def _quarantine(dataset: Dataset) -> tuple[QuarantineGroup, ...]:
    """Groups the left-out images by phase, kind and the general part of the reason, with the largest group first. After
    MOST_GROUPS groups, all others form one group."""
    counts: Counter[tuple[str, str, str]] = Counter()
    examples: dict[tuple[str, str, str], list[LeftOutImage]] = {}
    for table in _batches(dataset, QUARANTINE_PATH, _QUARANTINE_RULES):
        whole = _grouped(table)
        groups = whole.group_by(["phase", "kind", "group"]).aggregate([([], "count_all")]).to_pylist()
        for item in groups:
            key = item["phase"], item["kind"], item["group"]
            shown = key if key in counts or len(counts) < MOST_GROUPS else ("", "refused", "other reasons")
            counts[shown] += item["count_all"]
            held = examples.setdefault(shown, [])
            if len(held) < EXAMPLES:
                held += _examples(whole, key, EXAMPLES - len(held))
    return tuple(
        QuarantineGroup(phase=key[0], kind=key[1], reason=key[2], count=count, examples=tuple(examples[key]))
        for key, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )


def _grouped(table: pa.Table) -> pa.Table:
    reason = pc.fill_null(table.column("reason"), "")
    general = general_reasons(reason)
    # the reason of a match names the evaluation set, whose URL must stay complete
    return table.append_column("group", pc.if_else(pc.equal(table.column("kind"), "evaluation"), reason, general))


def _examples(table: pa.Table, key: tuple[str, str, str], count: int) -> list[LeftOutImage]:
    is_group = [
        pc.equal(table.column(name), value) for name, value in zip(("phase", "kind", "group"), key, strict=True)
    ]
    rows = table.filter(pc.and_(pc.and_(is_group[0], is_group[1]), is_group[2])).slice(0, count).to_pylist()
    return [
        LeftOutImage(
            source=row["source"] or "", reason=row["reason"] or "", match=row["match"] or "", distance=row["distance"]
        )
        for row in rows
    ]

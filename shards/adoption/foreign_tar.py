"""Reads an existing tar once, from start to end, to compute its sha256 and to gather what the index needs about every
sample."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import version

import pyarrow as pa
from isal.isal_zlib import crc32

from shards.adoption.foreign_samples import (
    NO_LABEL,
    FoundSample,
    RefusalCause,
    SampleRules,
    TarFault,
    Unlabeled,
    cause_of,
    find_samples,
)
from shards.class_labels import Meaning, UnknownLabelError, WrittenLabels
from shards.class_names import read_label_names
from shards.errors import ImageRefusedError, UserError
from shards.files.typed_json import read_record
from shards.images.config import PACKED_FORMATS
from shards.images.image_header import read_header
from shards.index import INDEX_SCHEMA
from shards.manifest import sha256_hex
from shards.packing.config import DatasetSettings
from shards.sources.entry import printable
from shards.sources.tar_members import read_members
from shards.storage.ahead import stored_pieces
from shards.store import MissingObjectError, Store, open_store
from shards.tables import MOST_ROWS, TableSchema, read_checked, table_bytes

ADOPTED_SCHEMA = pa.schema(
    [
        *(INDEX_SCHEMA.field(name) for name in ("key", "offset", "size", "ext", "height", "width", "orientation")),
        ("labels", pa.list_(pa.string())),  # as written in the tar
        *(INDEX_SCHEMA.field(name) for name in ("crc32", "source")),
        ("reason", pa.string()),  # null: the sample is not refused
        ("cause", pa.string()),  # a RefusalCause, if an option may fix it
    ]
)
_RULES = TableSchema(schema=ADOPTED_SCHEMA, may_be_null=frozenset(ADOPTED_SCHEMA.names))
_FACTS_KEY = b"patchline.adopted.4"  # a new number makes older descriptions invalid


@dataclass(frozen=True, kw_only=True)
class AdoptSpec(DatasetSettings):
    """The settings of an adoption."""

    rules: SampleRules
    """Which members of a sample are its image and its label."""

    def known_labels(self) -> tuple[str, ...] | None:
        """Returns the allowed classes, or None if any class is allowed."""
        return _label_names(self.labels_file) if self.labels_file else None

    def settings(self) -> dict[str, object]:
        """Returns the settings as plan.json records them, with the class names instead of their file."""
        settings: dict[str, object] = json.loads(json.dumps(asdict(self)))
        return settings | {"labels_file": list(self.known_labels() or ())}

    def hash(self) -> str:
        """Returns the sha256 of everything that determines which samples are found in a tar. The meaning of their
        labels is not included, since it is decided later."""
        names = ("rules", "limits")
        decides = {name: value for name, value in self.settings().items() if name in names}
        return sha256_hex(json.dumps(decides | {"pillow": version("pillow")}, sort_keys=True).encode())


@dataclass(frozen=True, kw_only=True)
class TarTask:
    """A task: describe tar `number` at `tars_url` in the work folder of `index_url`."""

    tars_url: str
    index_url: str
    spec: AdoptSpec
    spec_hash: str
    number: int
    path: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class TarFacts:
    """A summary of a tar.

    `num_fit`: the number of samples that are not refused. `labels`: all their labels, as written. `num_labelled`,
    `num_vectors`: as in `WrittenLabels`. `modified`: when a local tar was last changed, in nanoseconds since 1970. A
    tar that has changed since then is described again, even if its size is the same.
    """

    path: str
    num_bytes: int
    modified: int
    sha256: str
    spec_hash: str
    num_fit: int
    num_refused: int
    labels: tuple[str, ...]
    num_labelled: int
    num_vectors: dict[str, int]

    def written(self) -> WrittenLabels:
        """Returns the labels of the samples that are not refused."""
        num_vectors = {int(length): count for length, count in self.num_vectors.items()}
        return WrittenLabels(labels=frozenset(self.labels), num_labelled=self.num_labelled, num_vectors=num_vectors)


@dataclass(frozen=True, kw_only=True)
class LabelTask:
    """A task: read the labels in the description of tar `number` in the work folder of `index_url`. `meaning`: what
    they mean. `unlabeled`: what happens to samples that have none."""

    index_url: str
    number: int
    meaning: Meaning
    unlabeled: Unlabeled


@dataclass(frozen=True, kw_only=True)
class TarLabels:
    """What the labels of a tar mean.

    The samples that are not refused (fit) have `num_labels` labels, of which `num_integers` are integers. `num_odd` of
    these samples have a label that is not an integer; `integers` are the labels of the others.
    """

    num_fit: int
    num_refused: int
    labels: tuple[str, ...]
    num_labels: int
    num_integers: int
    num_odd: int
    integers: tuple[str, ...]

    def of_integers(self) -> "TarLabels":
        """Returns the labels of the same tar if every sample with a label that is not an integer is refused."""
        return replace(
            self, num_fit=self.num_fit - self.num_odd, num_refused=self.num_refused + self.num_odd, labels=self.integers
        )


def read_tar(task: TarTask) -> tuple[int, TarFacts]:
    """Describes a tar in the work folder, unless a valid description of it is there. Returns the tar's number and its
    facts."""
    store = open_store(task.index_url)
    facts = _facts_there(store, task)
    if facts is None:
        modified = _modified(task)
        table, sha256 = _read(task)
        facts = _facts(task, table, sha256, modified)
        footer = {_FACTS_KEY: json.dumps(asdict(facts), sort_keys=True).encode()}
        store.write(adopted_path(task.number), table_bytes(table.replace_schema_metadata(footer)))
    return task.number, facts


def adopted_path(number: int) -> str:
    """Returns the path of a tar's description, which exists until the manifest is written."""
    return f"work/adopted-{number:06d}.parquet"


def adopted_rows(
    store: Store, number: int, meaning: Meaning, *, unlabeled: Unlabeled, integers_only: bool = False
) -> pa.Table:
    """Reads the description of a tar: one row per sample, including refused ones, with the classes that its labels
    mean.

    Here a sample is also refused if a label is not a class or, with `integers_only`, not an integer, or if it has no
    label and `unlabeled` is "refuse". These reasons are not in the stored description, since they depend on all tars.
    """
    table = _read_adopted(store, number)
    rows = table.select(["labels", "reason", "cause"]).to_pylist()
    for row in rows:
        if row["reason"] is None:
            row.update(_meant(row["labels"], meaning, may_be_none=unlabeled == "keep"))
        odd = _odd(row["labels"]) if integers_only and row["reason"] is None else None
        if odd is not None:
            row.update(reason=f"label {odd!r} is not an integer, others are", cause=RefusalCause.NOT_INTEGER.value)
    for name in ("labels", "reason", "cause"):
        column = pa.array([row[name] for row in rows], ADOPTED_SCHEMA.field(name).type)
        table = table.set_column(table.schema.get_field_index(name), ADOPTED_SCHEMA.field(name), column)
    return table


def read_labels(task: LabelTask) -> tuple[int, TarLabels]:
    """Reads what the labels of a described tar mean. Returns the tar's number and the labels."""
    table = adopted_rows(open_store(task.index_url), task.number, task.meaning, unlabeled=task.unlabeled)
    fit = table.filter(table["reason"].is_null())["labels"].to_pylist()
    even = [some for some in fit if _odd(some) is None]
    labels = [label for some in fit for label in some]
    return task.number, TarLabels(
        num_fit=len(fit),
        num_refused=table.num_rows - len(fit),
        labels=tuple(sorted(set(labels))),
        num_labels=len(labels),
        num_integers=sum(is_integer(label) for label in labels),
        num_odd=len(fit) - len(even),
        integers=tuple(sorted({label for some in even for label in some})),
    )


def _meant(written: list[str], meaning: Meaning, *, may_be_none: bool) -> dict[str, object]:
    """Returns the classes of a sample, or why it is refused, as columns of its row. `may_be_none`: it may have no
    label."""
    try:
        labels, _ = meaning.of(written)
    except UnknownLabelError as error:
        return {"reason": str(error), "cause": RefusalCause.UNKNOWN_LABEL.value}
    except ImageRefusedError as error:
        return {"reason": str(error), "cause": None}
    return {"labels": labels} if labels or may_be_none else {"reason": NO_LABEL, "cause": RefusalCause.NO_LABEL.value}


def _odd(labels: Sequence[str]) -> str | None:
    """Returns the first label that is not an integer; None if all are integers."""
    return next((label for label in labels if not is_integer(label)), None)


def _read_adopted(store: Store, number: int) -> pa.Table:
    return read_checked(store.read(adopted_path(number)), _RULES, most_rows=MOST_ROWS)


def is_integer(label: str) -> bool:
    """Returns whether a label is an integer, and so may be the number of a class."""
    return label.isascii() and label.isdecimal()


@lru_cache(maxsize=4)
def _label_names(path: str) -> tuple[str, ...]:
    return read_label_names(path)


def _modified(task: TarTask) -> int:
    """Returns when a local tar was last changed. Returns 0 for a tar in a bucket, and for a missing tar, which is
    reported when it is read."""
    path = open_store(task.tars_url).local_path(task.path)
    return path.stat().st_mtime_ns if path is not None and path.exists() else 0


def _facts(task: TarTask, table: pa.Table, sha256: str, modified: int) -> TarFacts:
    fit = table.filter(table["reason"].is_null())
    written = WrittenLabels.of(fit["labels"].to_pylist())
    return TarFacts(
        path=task.path,
        num_bytes=task.num_bytes,
        modified=modified,
        sha256=sha256,
        spec_hash=task.spec_hash,
        num_fit=fit.num_rows,
        num_refused=table.num_rows - fit.num_rows,
        labels=tuple(sorted(written.labels)),
        num_labelled=written.num_labelled,
        num_vectors={str(length): count for length, count in sorted(written.num_vectors.items())},
    )


def _facts_there(store: Store, task: TarTask) -> TarFacts | None:
    """Returns the facts from a tar's description; None if there is no description, or if it is damaged, or is of
    another tar or of other settings."""
    try:
        table = _read_adopted(store, task.number)
        facts = read_record(TarFacts, (table.schema.metadata or {}).get(_FACTS_KEY, b""))
    except (MissingObjectError, ValueError):
        return None
    now = _modified(task) or facts.modified
    said, is_now = (facts.path, facts.num_bytes, facts.spec_hash), (task.path, task.num_bytes, task.spec_hash)
    return facts if said == is_now and facts == _facts(task, table, facts.sha256, now) else None


def _read(task: TarTask) -> tuple[pa.Table, str]:
    """Returns one row per sample, and the tar's sha256."""
    rules, limits = task.spec.rules, task.spec.limits
    digest = hashlib.sha256()
    rows = _Rows(task)
    store = open_store(task.tars_url)
    try:
        with closing(stored_pieces(store, task.path, 0, task.num_bytes, digest=digest)) as pieces:
            members = read_members(pieces, wanted=lambda _: True, max_bytes=limits.max_bytes, with_data=rules.is_needed)
            for found in find_samples(members, rules):
                rows.add(found)
            pieces.skip(task.num_bytes)
    except (EOFError, MissingObjectError) as error:
        raise UserError(f"{store.url}/{task.path} changed while it was indexed: {error}; index again") from error
    return pa.Table.from_pylist(rows.finished(), schema=ADOPTED_SCHEMA), digest.hexdigest()


class _Rows:
    """The rows of a tar: one for each sample, refused or not, and one for each fault of the tar."""

    def __init__(self, task: TarTask) -> None:
        self._task = task
        self._rows: list[dict[str, object]] = []
        self._fault = ""  # the first fault; other readers find no sample after it
        self._is_lost = False  # whether other readers fail on this tar, so that all samples are refused

    def add(self, found: FoundSample | TarFault) -> None:
        """Adds one sample or fault, in the order of the tar."""
        if isinstance(found, TarFault):
            self._rows.append({"source": self._task.path, "reason": found.reason})
            self._fault = self._fault or found.reason
            self._is_lost = self._is_lost or found.is_fatal
            return
        if self._fault and not found.reason:
            found = replace(found, reason="after a fault of its tar, where other readers stop")
        row: dict[str, object] = {
            "key": printable(found.key),
            "source": printable(f"{self._task.path}/{found.name}"),
            "reason": found.reason or None,
            "cause": found.cause,
        }
        if not found.reason:
            try:
                row |= self._facts(found)
            except ImageRefusedError as error:
                row |= {"reason": str(error), "cause": cause_of(error)}
        self._rows.append(row)

    def finished(self) -> list[dict[str, object]]:
        """Returns all rows, once the whole tar has been read."""
        later: set[object] = set()
        for row in reversed(self._rows):
            if self._is_lost and row["reason"] is None:
                row["reason"] = "its tar breaks off, or has a member where other readers fail"
            if (key := row.get("key")) and key in later and row["reason"] is None:
                row["reason"] = "another sample of the same key follows in its tar"
            later.add(key)
        return self._rows

    def _facts(self, sample: FoundSample) -> dict[str, object]:
        header = read_header(sample.image, self._task.spec.limits)
        if header.ext not in PACKED_FORMATS:
            raise ImageRefusedError(f"a {header.ext} image; allowed in shards are {', '.join(PACKED_FORMATS)}")
        return {
            "offset": sample.offset,
            "size": len(sample.image),
            "ext": sample.suffix,
            "height": header.height,
            "width": header.width,
            "orientation": header.orientation,
            "labels": sample.labels,
            "crc32": crc32(sample.image),
        }

"""The manifest of a dataset. manifest.json is written last, so a dataset that has one is complete. It has the sha256 of
every file."""

import hashlib
import json
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any

from shards.config_values import Range, allowed_instead, shown_value
from shards.files.typed_json import is_unicode, not_plain, not_sha256, parse_json, record_from, records_from
from shards.images.config import DEFAULT_LIMITS, ImageLimits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT_VERSION = 2  # 2 added weights and orientation to the index, and kinds to the quarantine list
TABLE_FORMAT_VERSION = 3  # 3: the shards and the sha256 of their indices are in SHARDS_PATH
MANIFEST_PATH = "manifest.json"
SHARDS_PATH = "shards.parquet"  # only in datasets of many shards
BLOCKS_PATH = "blocks.parquet"
ROWS_PATH = "rows.bin"  # only in large datasets: what reading needs from every index
LABELS_PATH = "labels.parquet"
QUARANTINE_PATH = "quarantine.parquet"
QUARANTINE_CSV_PATH = "quarantine.csv"
MOST_CLASSES = 1 << 24
MOST_SHARD_SAMPLES = 1 << 24
MOST_SAMPLES = 1 << 40
MOST_TAR_BYTES = 1 << 50
_MOST_CHARACTERS = 1 << 16  # the longest text
_FOR_PEOPLE = ("description", "licence")
_WRITTEN_IF_SET = (*_FOR_PEOPLE, "unlabeled")
_INDEX_PATH = re.compile(r"index/shard-\d{6,}\.parquet")
_LINE_FOR_PEOPLE = re.compile(rb'^ "(?:description|licence)": "(?:[^"\\]|\\.)*",\n', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """One shard: its tar (whose path is relative to `shards_url` or, if that is empty, to the dataset) and the ids of
    its samples."""

    path: str
    first_sample_id: Annotated[int, Range(0, MOST_SAMPLES)]
    num_samples: Annotated[int, Range(0, MOST_SHARD_SAMPLES)]
    sha256: str
    num_bytes: Annotated[int, Range(1, MOST_TAR_BYTES)]


class ShardColumns(Sequence[ShardRecord]):
    """The shards as columns. A record is made only when it is used, since 300,000 records take 200 MB."""

    @abstractmethod
    def column(self, name: str) -> "NDArray[np.int64]":
        """Returns int64[num_shards]: a field of every shard."""


ReadTable = Callable[[Mapping[str, str]], tuple[ShardColumns, Mapping[str, str]]]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a dataset. `files`: the sha256 of every file except the shards and the manifest itself.

    `format_version`: FORMAT_VERSION or TABLE_FORMAT_VERSION. `shards_url`: where the shards are; empty if they are
    beside the manifest. The index of tars made by others may be in another place than the tars. `adopted`: whether the
    tars were made by others and may have members that are not images. `unlabeled`: whether images may have no label.
    `limits`: the limits that its images were checked against, which decoders use too. `description` and `licence` are
    for people. These two, `unlabeled` and `limits` are written only if they differ from their defaults.
    """

    format_version: int
    plan_hash: str
    split: str
    num_samples: Annotated[int, Range(0, MOST_SAMPLES)]
    num_classes: Annotated[int, Range(0, MOST_CLASSES)]
    num_quarantined: Annotated[int, Range(0, MOST_SAMPLES)]
    samples_per_block: Annotated[int, Range(1, MOST_SAMPLES)]
    shards: Sequence[ShardRecord]
    files: Mapping[str, str]
    shards_url: str = ""
    adopted: bool = False
    unlabeled: bool = False
    limits: ImageLimits = DEFAULT_LIMITS
    description: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        _refuse_version(self.format_version)
        is_table = isinstance(self.shards, ShardColumns)
        held = int(self.shard_column("num_samples").sum()) if is_table else sum(one.num_samples for one in self.shards)
        if self.num_samples != held:
            raise ValueError(f"num_samples is {self.num_samples}, but its shards hold another number")

    def shard_column(self, name: str) -> "NDArray[np.int64]":
        """Returns int64[num_shards]: `first_sample_id`, `num_samples` or `num_bytes` of every shard."""
        if isinstance(self.shards, ShardColumns):
            return self.shards.column(name)
        import numpy as np  # noqa: PLC0415 - many commands do not need it

        return np.array([getattr(shard, name) for shard in self.shards], dtype=np.int64)

    def to_bytes(self) -> bytes:
        """Returns JSON with sorted keys, so that equal datasets have equal manifests."""
        is_table = self.format_version == TABLE_FORMAT_VERSION
        written = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _WRITTEN_IF_SET:
            if not written[name]:
                del written[name]
        written["limits"] = asdict(self.limits)
        if self.limits == DEFAULT_LIMITS:
            del written["limits"]
        if is_table:
            del written["shards"]
            written["files"] = {path: one for path, one in self.files.items() if not _INDEX_PATH.fullmatch(path)}
        else:
            written["shards"] = [asdict(shard) for shard in self.shards]
        return json.dumps(written, sort_keys=True, indent=1).encode() + b"\n"

    @staticmethod
    def from_bytes(data: bytes, *, read_table: ReadTable | None = None) -> "Manifest":
        """Reads manifest.json. Raises ValueError for another format version and for impossible values.

        A dataset of many shards lists them in a second file. `read_table` reads it: it gets the `files` of
        manifest.json, and returns the shards and the sha256 of every file. Errors that it raises are passed on.
        """
        found = parse_json(data)
        if not isinstance(found, dict):
            raise ValueError(f"not a manifest: it is {shown_value(found)}; allowed: an object")
        _refuse_version(found.get("format_version"))
        is_table = found["format_version"] == TABLE_FORMAT_VERSION
        _refuse_fields(found, is_table=is_table)
        _refuse_files(found["files"])
        if "limits" in found:
            found["limits"] = record_from(ImageLimits, found["limits"], where="limits.")
        if not is_table:
            shards = records_from(ShardRecord, found["shards"], name="shards")
            refuse_paths([shard.path for shard in shards])
            _refuse_shards(shards)
            return Manifest(**found | {"shards": shards})
        if listed := next(filter(_INDEX_PATH.fullmatch, found["files"]), None):
            raise ValueError(f"files has {shown_value(listed)}; allowed: other files, since {SHARDS_PATH} has it")
        if read_table is None:
            raise ValueError(f"its shards are in {SHARDS_PATH}, which is not at hand")
        table, files = read_table(found["files"])
        return Manifest(**found | {"shards": table, "files": files})


def fingerprint_of(manifest: bytes) -> str:
    """Returns the sha256 of manifest.json without description and licence, since changing these does not make another
    dataset."""
    return sha256_hex(_LINE_FOR_PEOPLE.sub(b"", manifest))


def sha256_hex(data: bytes) -> str:
    """Returns the sha256 as written in manifests and plans."""
    return hashlib.sha256(data).hexdigest()


def shard_path(shard: int) -> str:
    """Returns the path at which packing writes a shard's tar."""
    return f"shards/shard-{shard:06d}.tar"


def index_path(shard: int) -> str:
    """Returns the path of a shard's index."""
    return f"index/shard-{shard:06d}.parquet"


def _refuse_version(version: Any) -> None:
    allowed = (FORMAT_VERSION, TABLE_FORMAT_VERSION)
    if type(version) is not int or version not in allowed:
        raise ValueError(f"format version {shown_value(version)}, this version reads {allowed[0]} and {allowed[1]}")


def _refuse_fields(found: dict[str, Any], *, is_table: bool) -> None:
    """Raises ValueError for the first field that is missing, unknown, of the wrong type or out of its range."""
    declared = {field.name: field for field in fields(Manifest) if not (is_table and field.name == "shards")}
    if unknown := sorted(found.keys() - declared.keys()):
        raise ValueError(f"not a manifest: {shown_value(unknown[0])} is not a field; allowed: {', '.join(declared)}")
    for name, field in declared.items():
        if name not in found and field.default is MISSING:
            raise ValueError(f"not a manifest: {name} is missing")
        if name not in found or name in ("shards", "files", "limits"):
            continue
        value = found[name]
        if allowed := allowed_instead(value, field.type):
            raise ValueError(f"{name} is {shown_value(value)}; {allowed}")
        if isinstance(value, str) and not (len(value) <= _MOST_CHARACTERS and is_unicode(value)):
            raise ValueError(f"{name} is {shown_value(value)}; allowed: at most {_MOST_CHARACTERS:,} characters")
    if "\0" in (url := found.get("shards_url", "")):
        raise ValueError(f"shards_url is {shown_value(url)}; allowed: a folder or s3://bucket/prefix")
    if not_sha256([found["plan_hash"]]) is not None:
        raise ValueError(f"plan_hash is {shown_value(found['plan_hash'])}; allowed: 64 hex digits")


def refuse_paths(paths: list[str]) -> None:
    """Raises ValueError if the paths of shards are not plain relative paths, or if one appears twice."""
    _refuse_path(not_plain(paths), what="the path of a shard")
    if len(set(paths)) < len(paths):
        [(twice, _)] = Counter(paths).most_common(1)
        raise ValueError(f"the shard {shown_value(twice)} is there twice; allowed: each path once")


def _refuse_shards(shards: tuple[ShardRecord, ...]) -> None:
    """Raises ValueError if the sha256 of a shard is not 64 hex digits, or if sample ids do not continue from shard to
    shard."""
    if (wrong := not_sha256([shard.sha256 for shard in shards])) is not None:
        raise ValueError(f"the sha256 of a shard is {shown_value(wrong)}; allowed: 64 hex digits")
    *starts, _ = accumulate([shard.num_samples for shard in shards], initial=0)
    if [shard.first_sample_id for shard in shards] == starts:
        return
    shard, start = next(pair for pair in zip(shards, starts, strict=True) if pair[0].first_sample_id != pair[1])
    what = f"first_sample_id of {shown_value(shard.path)} is {shard.first_sample_id}"
    raise ValueError(f"{what}; allowed: {start}, the number of samples before it")


def _refuse_files(files: Any) -> None:
    if not isinstance(files, dict):
        raise ValueError(f"files is {shown_value(files)}; allowed: an object")
    _refuse_path(not_plain(list(files)), what="the path of a file")
    if not set(map(type, files.values())) <= {str}:
        path, sha256 = next(item for item in files.items() if not isinstance(item[1], str))
        raise ValueError(f"the sha256 of {shown_value(path)} is {shown_value(sha256)}; allowed: 64 hex digits")
    if (wrong := not_sha256(list(files.values()))) is not None:
        raise ValueError(f"the sha256 of a file is {shown_value(wrong)}; allowed: 64 hex digits")


def _refuse_path(path: str | None, *, what: str) -> None:
    if path is not None:
        raise ValueError(f"{what} is {shown_value(path)}; allowed: plain relative paths, FOLDER/NAME without ..")

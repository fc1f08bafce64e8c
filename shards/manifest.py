"""manifest.json: written last, so a dataset that has one is complete. It fixes every byte by sha256."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass

FORMAT_VERSION = 2  # 2: weights and orientation in the index, kinds in the quarantine list
MANIFEST_PATH = "manifest.json"
BLOCKS_PATH = "blocks.parquet"
LABELS_PATH = "labels.parquet"
QUARANTINE_PATH = "quarantine.parquet"

_FOR_PEOPLE = ("description", "licence")
_LINE_FOR_PEOPLE = re.compile(rb'^ "(?:description|licence)": "(?:[^"\\]|\\.)*",\n', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """One shard: its tar (path relative to the dataset) and the sample ids that it holds."""

    path: str
    first_sample_id: int
    num_samples: int
    sha256: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a dataset. `files` has the sha256 of every file but the shards and the manifest itself.

    `shards_url` is where the shards are, empty if they are beside the manifest; the index of tars made by others may be
    elsewhere. `adopted`: the tars were made by others and may have members that are not images. `description` and
    `licence` are for people; if empty, they are not written.
    """

    format_version: int
    plan_hash: str
    split: str
    num_samples: int
    num_classes: int
    num_quarantined: int
    samples_per_block: int
    shards: tuple[ShardRecord, ...]
    files: dict[str, str]
    shards_url: str = ""
    adopted: bool = False
    description: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            message = f"the dataset has format version {self.format_version}; this version reads"
            raise ValueError(f"{message} {FORMAT_VERSION}")
        if self.num_samples != sum(shard.num_samples for shard in self.shards):
            raise ValueError(f"num_samples is {self.num_samples}, but its shards hold another number")
        if not (isinstance(self.description, str) and isinstance(self.licence, str)):
            raise ValueError("its description or licence is not text")

    def to_bytes(self) -> bytes:
        """JSON with sorted keys: equal datasets have equal manifests."""
        fields = asdict(self)
        for name in _FOR_PEOPLE:
            if not fields[name]:
                del fields[name]
        return json.dumps(fields, sort_keys=True, indent=1).encode() + b"\n"

    @staticmethod
    def from_bytes(data: bytes) -> "Manifest":
        """Raises ValueError for anything but a manifest of this format version."""
        try:
            fields = json.loads(data)
            if fields.get("format_version") != FORMAT_VERSION:
                message = f"format version {fields.get('format_version')!r}, this version reads {FORMAT_VERSION}"
                raise ValueError(message)
            shards = tuple(ShardRecord(**record) for record in fields.pop("shards"))
            return Manifest(**fields, shards=shards)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a manifest: {error}") from error


def fingerprint_of(manifest: bytes) -> str:
    """sha256 of manifest.json without description and licence: changing these does not make another dataset."""
    return sha256_hex(_LINE_FOR_PEOPLE.sub(b"", manifest))


def sha256_hex(data: bytes) -> str:
    """sha256 as written in manifests and plans."""
    return hashlib.sha256(data).hexdigest()


def shard_path(shard: int) -> str:
    """Path of a shard's tar, as packing writes it."""
    return f"shards/shard-{shard:06d}.tar"


def index_path(shard: int) -> str:
    """Path of a shard's index."""
    return f"index/shard-{shard:06d}.parquet"

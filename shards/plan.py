"""Second phase of packing: the frozen plan. Which image becomes which sample of which shard, and from what.

plan.json fixes all of it by sha256 and is written last; its own sha256 is the plan's hash, which every shard
records.
"""

import json
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shards.errors import UserError
from shards.hashing import derive_key, hash_array
from shards.index import read_table, table_bytes
from shards.manifest import FORMAT_VERSION, sha256_hex
from shards.scan import is_scan_of, quarantined, scan_path, slices
from shards.sources import Source, tool_versions
from shards.store import MissingObjectError, Store

PLAN_PATH = "plan/plan.json"
SHARDS_PER_FILE = 256
_PERMUTATION = 0x7061636B  # "pack": keeps this permutation apart from others of the same seed

_DEALT_COLUMNS = ["position", "locator", "source", "ext", "height", "width", "size", "crc32"]


@dataclass(frozen=True, kw_only=True)
class PackSpec:
    """What is packed, and how: everything that decides a byte of the dataset."""

    source: Source
    split: str
    samples_per_shard: int
    samples_per_block: int
    seed: int

    def __post_init__(self) -> None:
        if self.samples_per_shard < 1 or self.samples_per_block < 1:
            sizes = f"samples_per_shard {self.samples_per_shard}, samples_per_block {self.samples_per_block}"
            raise UserError(f"{sizes}: both must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}; allowed are 0 to 2**63 - 1")

    def settings(self) -> dict[str, object]:
        """As plan.json records them."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The content of plan.json. `files` has the sha256 of every other file below plan/."""

    format_version: int
    settings: dict[str, object]
    versions: dict[str, str]
    label_names: tuple[str, ...]
    num_samples: int
    num_quarantined: int
    num_shards: int
    files: dict[str, str]

    @cached_property
    def hash(self) -> str:
        """sha256 of plan.json."""
        return sha256_hex(self.to_bytes())

    def to_bytes(self) -> bytes:
        """JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True, indent=1).encode() + b"\n"

    @staticmethod
    def from_bytes(data: bytes) -> "Plan":
        """Raises ValueError for anything but a plan of this format version."""
        try:
            fields = json.loads(data)
            if fields["format_version"] != FORMAT_VERSION:
                raise ValueError(f"plan of format version {fields['format_version']}, not {FORMAT_VERSION}")
            return Plan(**fields | {"label_names": tuple(fields["label_names"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a plan: {error}") from error


def read_plan(store: Store, spec: PackSpec) -> Plan | None:
    """The plan at the store, None before there is one; a UserError where it is of another packing."""
    try:
        plan = Plan.from_bytes(store.read(PLAN_PATH))
    except MissingObjectError:
        return None
    except ValueError as error:
        raise UserError(f"{store.url}/{PLAN_PATH} is {error}; delete the folder and pack again") from error
    asked = json.loads(json.dumps(spec.settings()))
    different = sorted(name for name in asked if plan.settings.get(name) != asked[name])
    if different:
        named = ", ".join(f"{name} {plan.settings.get(name)!r} (now {asked[name]!r})" for name in different)
        raise UserError(f"{store.url} is planned with other settings: {named}; use these, or another --out")
    return plan


def refuse_other_versions(plan: Plan, source: Source) -> None:
    """Other library versions could write other bytes into one dataset."""
    if (here := tool_versions(source)) != plan.versions:
        message = f"the plan was made with {plan.versions}, here are {here}"
        raise UserError(f"{message}; install the plan's versions, or pack anew into another --out")


def make_plan(store: Store, spec: PackSpec) -> Plan:
    """Deal the scanned samples to shards, in the order of a keyed hash of their positions."""
    scans, files, bad = [], {}, 0
    for part in slices(spec.source):
        path = scan_path(part.number)
        data = _read_scan(store, path)
        if not is_scan_of(data, spec.source, part):
            message = f"{store.url}/{path} is the scan of another source, or the source has changed since"
            raise UserError(f"{message}; delete {store.url}/plan and scan again")
        scans.append(read_table(data, columns=[*_DEALT_COLUMNS, "label_name", "reason"]))
        files[path] = sha256_hex(data)
        bad += quarantined(data).num_rows
    if not scans or bad == sum(scan.num_rows for scan in scans):
        raise UserError(f"the source has no usable image ({bad} were refused); see {store.url}/plan/scan-*")
    table = pa.concat_tables(scans)
    names = spec.source.known_labels() or sorted_labels(table.column("label_name"))
    table = table.filter(table.column("reason").is_null())
    num_shards = -(-table.num_rows // spec.samples_per_shard)
    files |= _deal(store, _with_labels(table, names), spec, num_shards)
    plan = Plan(
        format_version=FORMAT_VERSION,
        settings=json.loads(json.dumps(spec.settings())),
        versions=tool_versions(spec.source),
        label_names=names,
        num_samples=table.num_rows,
        num_quarantined=bad,
        num_shards=num_shards,
        files=files,
    )
    store.write(PLAN_PATH, plan.to_bytes())
    return plan


def sorted_labels(names: pa.ChunkedArray) -> tuple[str, ...]:
    """Distinct label names in the order of their ids: by number where all are integers, else as strings."""
    distinct = [name for name in pc.unique(names).to_pylist() if name is not None]
    if all(name.removeprefix("-").isdecimal() and name.isascii() for name in distinct):
        return tuple(sorted(distinct, key=lambda name: (int(name), name)))
    return tuple(sorted(distinct))


def permutation(positions: NDArray[np.int64], *, seed: int) -> NDArray[np.intp]:
    """Indices that put `positions` into their global random order. Dropping one never moves the others."""
    return np.argsort(hash_array(positions, key=derive_key(seed, _PERMUTATION)), kind="stable")


def samples_path(shard: int) -> str:
    """The file that holds the plan of a shard, as its row group shard % SHARDS_PER_FILE."""
    return f"plan/samples-{shard // SHARDS_PER_FILE:05d}.parquet"


def _read_scan(store: Store, path: str) -> bytes:
    try:
        return store.read(path)
    except MissingObjectError:
        message = f"{store.url}/{path} is missing: the scan is not complete"
        raise UserError(f"{message}; run --phase scan with every part first") from None


def _with_labels(table: pa.Table, names: tuple[str, ...]) -> pa.Table:
    labels = pc.index_in(table.column("label_name"), value_set=pa.array(names, pa.string()))
    return table.select(_DEALT_COLUMNS).append_column("label", labels.cast(pa.int32())).combine_chunks()


def _deal(store: Store, table: pa.Table, spec: PackSpec, num_shards: int) -> dict[str, str]:
    order = permutation(table.column("position").to_numpy(), seed=spec.seed)
    written = {}
    for first in range(0, num_shards, SHARDS_PER_FILE):
        begin, end = first * spec.samples_per_shard, (first + SHARDS_PER_FILE) * spec.samples_per_shard
        slots = pa.array(np.arange(begin, min(end, table.num_rows)), pa.int64())
        dealt = table.take(pa.array(order[begin:end])).add_column(0, "slot", slots)
        data = table_bytes(dealt, row_group_size=spec.samples_per_shard)
        store.write(samples_path(first), data)
        written[samples_path(first)] = sha256_hex(data)
    return written

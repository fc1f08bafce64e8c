"""Runs the phases of packing one by one, for tests of single phases."""

from dataclasses import replace

from shards.packing.config import PackSpec
from shards.packing.evaluation_sets import find_sets, hash_shard, hash_tasks
from shards.packing.listing import Listing, listed
from shards.packing.plan import Plan
from shards.packing.planning import make_plan
from shards.packing.scan import ScanTask, scan_slice
from shards.sources.kinds import Source
from shards.store import Store


def pack_spec(source: Source, **changes: object) -> PackSpec:
    """Shards of 4 samples, blocks of 2, seed 1, unless changed."""
    spec = PackSpec(source=source, split="train", samples_per_shard=4, samples_per_block=2, seed=1)
    return replace(spec, **changes)  # type: ignore[arg-type]


def scanned(store: Store, spec: PackSpec) -> Listing:
    """Lists and scans a whole source, and hashes the evaluation sets."""
    listing = listed(store, spec.source, scan_hash=spec.scan_hash())
    for number, some in enumerate(listing.slices):
        scan_slice(ScanTask(url=store.url, spec=spec, number=number, slice_sha256=some.sha256))
    for task in hash_tasks(store.url, find_sets(spec.dedup.against)):
        hash_shard(task)
    return listing


def planned(store: Store, spec: PackSpec) -> Plan:
    """Scans a source and plans its packing."""
    return make_plan(store, spec, scanned(store, spec), workers=1)

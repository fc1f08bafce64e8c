"""What a packing still lacks, by what lies at the store: a gate between the phases decides by it what runs again."""

from collections.abc import Callable, Sequence
from functools import partial

from shards.files.typed_json import read_record
from shards.images.config import PERCEPTUAL_HASH
from shards.index import read_commit
from shards.manifest import index_path, shard_path
from shards.packing.config import PackSpec
from shards.packing.evaluation_sets import find_sets, hash_tasks, is_hashed
from shards.packing.listing import LISTING_PATH, Listing
from shards.packing.plan import Plan
from shards.packing.scan import is_scanned, scan_footer
from shards.pool import Pool
from shards.store import MissingObjectError, Store

_READERS = 8  # of small files, at the same time


def shards_of_part(part: int, num_parts: int, *, num_shards: int) -> range:
    """The shards of one task: a contiguous range of the plan, as long as those of the others or one longer."""
    return range(part * num_shards // num_parts, (part + 1) * num_shards // num_parts)


def unpacked_parts(store: Store, plan: Plan, *, num_parts: int) -> list[int]:
    """The parts of the phase shards that have a shard which is not committed by this plan."""

    def is_missing(shard: int) -> bool:
        try:
            commit = read_commit(store.read(index_path(shard)))
            return commit.plan_hash != plan.hash or store.size(shard_path(shard)) != commit.tar_bytes
        except (MissingObjectError, ValueError):
            return True

    missing = _each(is_missing, range(plan.num_shards))
    return [
        part
        for part in range(num_parts)
        if any(missing[shard] for shard in shards_of_part(part, num_parts, num_shards=plan.num_shards))
    ]


def unscanned_parts(store: Store, spec: PackSpec, *, url: str, num_parts: int) -> list[int]:
    """The parts of the phase scan that have a slice of the listing, or a shard of an evaluation set, to read yet. All
    of them without a listing made with these settings."""
    scan_hash = spec.scan_hash()
    try:
        listing = read_record(Listing, store.read(LISTING_PATH))
    except (MissingObjectError, ValueError):
        return list(range(num_parts))
    if listing.scan_hash != scan_hash:
        return list(range(num_parts))
    footers = [scan_footer(scan_hash, piece.sha256) for piece in listing.slices]
    found = _each(lambda number: is_scanned(store, number, footers[number]), range(len(footers)))
    missing = {number % num_parts for number, is_there in enumerate(found) if not is_there}
    if spec.is_hashed:
        every = hash_tasks(url, find_sets(spec.dedup.against), hash_name=PERCEPTUAL_HASH)
        missing |= {number % num_parts for number, task in enumerate(every) if not is_hashed(store, task)}
    return sorted(missing)


def _each(ask: Callable[[int], bool], numbers: Sequence[int]) -> list[bool]:
    """The answers in order, a few at the same time."""
    pool = Pool(_READERS, name="missing")
    try:
        return [future.result() for future in [pool.submit(partial(ask, number)) for number in numbers]]
    finally:
        pool.close()

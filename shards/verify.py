"""Reads a dataset back and lists everything that is not as its manifest says."""

from collections.abc import Iterator
from dataclasses import dataclass

from shards import shard_checks as checks
from shards.dataset import Dataset, open_dataset
from shards.index import BlockTable, read_blocks, read_commit, read_rows
from shards.manifest import BLOCKS_PATH, MANIFEST_PATH, index_path, sha256_hex
from shards.plan import PLAN_PATH, Plan
from shards.progress import Progress
from shards.store import MissingObjectError

# A limit on what one damaged shard may list; the count is always given.
MAX_FAULTS_A_CHECK = 10


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong, and in which object of the dataset."""

    where: str
    what: str


def verify_dataset(url: str, *, deep: bool = False) -> list[Fault]:
    """All faults; none in a good dataset. `deep` decodes every image too. UserError where no dataset is."""
    dataset = open_dataset(url)
    faults = [*_files(dataset), *_sample_ids(dataset), *_plan(dataset), *_strangers(dataset)]
    blocks = _readable_blocks(dataset)
    with Progress("verify", len(dataset.manifest.shards), unit="shards") as progress:
        for shard in range(len(dataset.manifest.shards)):
            faults += _shard(dataset, shard, blocks, deep=deep)
            progress.advance(note=f"{len(faults)} faults")
    return faults


def _files(dataset: Dataset) -> Iterator[Fault]:
    for path, expected in dataset.manifest.files.items():
        try:
            if sha256_hex(dataset.store.read(path)) != expected:
                yield Fault(where=path, what="its sha256 is not the manifest's")
        except MissingObjectError:
            yield Fault(where=path, what="is missing")


def _sample_ids(dataset: Dataset) -> Iterator[Fault]:
    following = 0
    for record in dataset.manifest.shards:
        if record.first_sample_id != following:
            what = f"first sample id of {record.path} is {record.first_sample_id}, it should be {following}"
            yield Fault(where=MANIFEST_PATH, what=what)
        following = record.first_sample_id + record.num_samples


def _plan(dataset: Dataset) -> Iterator[Fault]:
    manifest = dataset.manifest
    try:
        plan = Plan.from_bytes(dataset.store.read(PLAN_PATH))
    except MissingObjectError:
        return  # listed with the files
    except ValueError as error:
        yield Fault(where=PLAN_PATH, what=str(error))
        return
    scanned = plan.num_samples + plan.num_quarantined
    if manifest.num_samples + manifest.num_quarantined != scanned:
        packed = f"{manifest.num_samples} samples and {manifest.num_quarantined} in quarantine"
        yield Fault(where=MANIFEST_PATH, what=f"{packed} are not the {scanned} images of the plan")
    if plan.hash != manifest.plan_hash:
        yield Fault(where=PLAN_PATH, what="its hash is not the manifest's plan hash")


def _strangers(dataset: Dataset) -> Iterator[Fault]:
    known = {record.path for record in dataset.manifest.shards} | set(dataset.manifest.files)
    for folder in ("shards", "index"):
        for path in dataset.store.list(folder):
            if path not in known:
                yield Fault(where=path, what="is not in the manifest")


def _readable_blocks(dataset: Dataset) -> BlockTable | None:
    try:
        return read_blocks(dataset.store.read(BLOCKS_PATH))
    except (MissingObjectError, ValueError, KeyError, OSError):
        return None  # listed with the files


def _shard(dataset: Dataset, shard: int, blocks: BlockTable | None, *, deep: bool) -> list[Fault]:
    manifest, record = dataset.manifest, dataset.manifest.shards[shard]
    try:
        index = dataset.store.read(index_path(shard))
        rows, commit = read_rows(index), read_commit(index)
        tar = dataset.store.read(record.path)
    except MissingObjectError as error:
        is_listed = error.path in manifest.files
        return [] if is_listed else [Fault(where=error.path, what="is missing")]
    except (ValueError, KeyError, OSError) as error:
        return [Fault(where=index_path(shard), what=f"cannot be read: {error}")]
    found = [
        checks.check_commit(record, commit, rows, manifest.plan_hash),
        checks.check_labels(rows, manifest.num_classes),
        checks.check_tar(record, tar),
        checks.check_checksums(rows, tar),
        checks.check_members(rows, tar),
        checks.check_webdataset(rows, tar),
    ]
    if blocks is not None:
        size = manifest.samples_per_block
        found.append(
            checks.check_blocks(rows, commit.data_end, record, shard=shard, blocks=blocks, samples_per_block=size)
        )
    if deep:
        found.append(checks.check_decode(rows, tar))
    return [Fault(where=record.path, what=what) for check in found for what in _shortened(check)]


def _shortened(faults: Iterator[str]) -> list[str]:
    listed = list(faults)
    more = len(listed) - MAX_FAULTS_A_CHECK
    return listed[:MAX_FAULTS_A_CHECK] + ([f"and {more} more of this kind"] if more > 0 else [])

"""`patchline pack`: an image collection becomes shards, in four phases that can each be continued."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from jobs.record import write_record
from shards.errors import UserError
from shards.images.image_header import Limits
from shards.images.perceptual import PERCEPTUAL_HASH
from shards.images.resize import Resize
from shards.manifest import MANIFEST_PATH, Manifest
from shards.packing.evaluation_sets import HashTask, find_sets, hash_shard, hash_tasks
from shards.packing.listing import Listing, listed
from shards.packing.merge import discard_work, merge, refuse_quarantine
from shards.packing.pack import ShardTask, pack_shard, samples_of_shard
from shards.packing.plan import Plan, read_plan, refuse_other_versions
from shards.packing.planning import make_plan
from shards.packing.scan import ScanTask, scan_slice
from shards.packing.spec import Dedup, PackSpec
from shards.packing.summary import packed_words, refused_words
from shards.parallel import run_tasks
from shards.progress import Progress
from shards.quantities import plural
from shards.sources.archives import ClassTarsSource, TarOfTarsSource
from shards.sources.kinds import DigitsSource, FlatSource, FolderSource, ManifestSource, ParquetSource, Source
from shards.store import MissingObjectError, Store, open_store

log = logging.getLogger(__name__)
Phase = Literal["all", "scan", "plan", "shards", "merge"]


@dataclass(frozen=True, kw_only=True)
class PackJob:
    """What to pack and where to. `part` I/N is the share of a job array's task in the scan and shards phases.

    `labels_file` has one class name a line, in the order of their ids (empty: the names that the source has, sorted).
    `max_quarantined` is the share of images that may be refused before the job stops; duplicates do not count.
    `run_dir`: where job.yaml goes (empty: nowhere; it is not part of the dataset, whose bytes do not depend on who
    packed it).
    """

    out: str = ""
    source: (
        DigitsSource | FolderSource | FlatSource | ParquetSource | ManifestSource | ClassTarsSource | TarOfTarsSource
    ) = field(default_factory=FolderSource)
    split: str = "train"
    labels_file: str = ""
    samples_per_shard: int = 1000
    samples_per_block: int = 64
    seed: int = 0
    limits: Limits = field(default_factory=Limits)
    dedup: Dedup = field(default_factory=Dedup)
    resize: Resize = field(default_factory=Resize)
    workers: int = 1
    phase: Phase = "all"
    part: str = "0/1"
    max_quarantined: float = 0.01
    run_dir: str = ""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"--workers is {self.workers}; allowed are 1 and more")
        if not 0 <= self.max_quarantined <= 1:
            raise UserError(f"--max-quarantined is {self.max_quarantined:g}; allowed are 0 to 1")
        if self.share[1] > 1 and self.phase not in ("scan", "shards"):
            raise UserError(f"--part {self.part} needs --phase scan or --phase shards; all else is one task")

    @property
    def share(self) -> tuple[int, int]:
        """`part` as numbers."""
        first, _, count = self.part.partition("/")
        if not (first.isdecimal() and count.isdecimal() and int(first) < int(count)):
            raise UserError(f"--part is {self.part!r}; allowed is I/N with I from 0 to N-1, e.g. 0/8")
        return int(first), int(count)

    def spec(self) -> PackSpec:
        """What decides the bytes: neither workers nor parts do."""
        return PackSpec(
            source=source_of_split(self.source, self.split),
            split=self.split,
            samples_per_shard=self.samples_per_shard,
            samples_per_block=self.samples_per_block,
            seed=self.seed,
            labels_file=self.labels_file,
            limits=self.limits,
            dedup=self.dedup,
            resize=self.resize,
        )


def run(job: PackJob) -> int:
    """Run the phases asked for; the exit code."""
    if not job.out:
        raise UserError("--out is missing; give a folder or s3://bucket/prefix")
    store, spec, began = open_store(job.out), job.spec(), time.monotonic()
    if job.run_dir:
        write_record(Path(job.run_dir), stage="pack", job=job)
    plan = read_plan(store, spec)
    if plan is not None and _is_complete(store, plan):
        discard_work(store)  # where the command was killed just before
        log.info("%s is packed already: %d samples; its source was not read again", store.url, plan.num_samples)
        return 0
    if job.phase in ("all", "scan") and plan is None:
        _scan(job, spec, store)
    if job.phase in ("all", "plan"):
        plan = plan or _planned(job, spec, store)
        _refuse_quarantine(plan, job, store)
    if job.phase in ("all", "shards"):
        _shards(job, spec, _needed(plan, store))
    if job.phase in ("all", "merge"):
        manifest = merge(store, spec, _needed(plan, store), max_quarantined=job.max_quarantined)
        log.info("%s", packed_words(store, manifest, seconds=time.monotonic() - began))
    if job.phase in ("scan", "shards"):
        log.info("%s: phase %s, part %s is done", store.url, job.phase, job.part)
    return 0


def source_of_split(source: Source, split: str) -> Source:
    """The source with `split` put in: the digits' own split, `{split}` in the names of files and lists."""
    if isinstance(source, DigitsSource):
        if split not in ("train", "test"):
            raise UserError(f"--split is {split!r}; the digits have train and test")
        if source.split not in ("train", split):
            raise UserError(f"--source.split is {source.split!r} but --split is {split!r}; set --split alone")
        return replace(source, split=split)  # type: ignore[arg-type]
    if isinstance(source, ParquetSource | ManifestSource):
        return replace(source, files=tuple(path.replace("{split}", split) for path in source.files))
    return source


def _scan(job: PackJob, spec: PackSpec, store: Store) -> None:
    part, num_parts = job.share
    find_sets(spec.dedup.against)  # a wrong URL is to be said now, not after all images are read
    listing = listed(store, spec.source, scan_hash=spec.scan_hash(), anew=job.phase == "all")
    amounts, unit = listing.amounts()
    mine = range(part, len(listing.slices), num_parts)
    tasks = (
        ScanTask(url=job.out, spec=spec, number=number, slice_sha256=listing.slices[number].sha256) for number in mine
    )
    with Progress("scan", sum(amounts[number] for number in mine), unit=unit) as progress:
        for number in run_tasks(scan_slice, tasks, workers=job.workers):
            progress.advance(amounts[number])
    if spec.is_hashed:
        _hash_evaluation_sets(job, spec)


def _hash_evaluation_sets(job: PackJob, spec: PackSpec) -> None:
    part, num_parts = job.share
    every = list(hash_tasks(job.out, find_sets(spec.dedup.against), hash_name=PERCEPTUAL_HASH))
    tasks: Iterator[HashTask] = iter(every[part::num_parts])
    with Progress("evaluation sets", len(every[part::num_parts]), unit="shards") as progress:
        for count in run_tasks(hash_shard, tasks, workers=job.workers):
            progress.advance(count)


def _planned(job: PackJob, spec: PackSpec, store: Store) -> Plan:
    listing: Listing = listed(store, spec.source, scan_hash=spec.scan_hash())
    plan = make_plan(store, spec, listing, workers=job.workers)
    images = f"{plural(plan.num_samples, 'image')} of {plural(len(plan.label_names), 'class')}"
    log.info("plan: %s into %s", images, plural(plan.num_shards, "shard"))
    if plan.num_relabelled:
        log.info("%s with other labels than the image they copy", plural(plan.num_relabelled, "duplicate"))
    return plan


def _refuse_quarantine(plan: Plan, job: PackJob, store: Store) -> None:
    """Where too much of the source is refused, the first reasons are said before the error."""
    try:
        refuse_quarantine(plan, max_quarantined=job.max_quarantined, url=store.url)
    except UserError:
        log.info("%s", refused_words(store))
        raise


def _shards(job: PackJob, spec: PackSpec, plan: Plan) -> None:
    refuse_other_versions(plan, spec)
    part, num_parts = job.share
    mine = range(part, plan.num_shards, num_parts)
    tasks = (
        ShardTask(
            url=job.out,
            plan_hash=plan.hash,
            spec=spec,
            shard=shard,
            samples_sha256=plan.files[samples_of_shard(shard, spec)],
            max_quarantined=job.max_quarantined,
        )
        for shard in mine
    )
    most = min(plan.num_samples, len(mine) * spec.samples_per_shard)
    with Progress("shards", most, unit="images") as progress:
        for count in run_tasks(pack_shard, tasks, workers=job.workers):
            progress.advance(count)


def _needed(plan: Plan | None, store: Store) -> Plan:
    if plan is None:
        raise UserError(f"{store.url} has no plan yet; run --phase scan and --phase plan first")
    return plan


def _is_complete(store: Store, plan: Plan) -> bool:
    try:
        return Manifest.from_bytes(store.read(MANIFEST_PATH)).plan_hash == plan.hash
    except (MissingObjectError, ValueError):
        return False

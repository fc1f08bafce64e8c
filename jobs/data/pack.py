"""`patchline pack`: packs an image collection into shards, in four phases that can each be continued."""

import logging
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

from jobs import exit_codes
from jobs.record import write_record
from jobs.settings.data import PackJob, Phase
from shards.errors import StorageError, UnreachableError, UserError
from shards.manifest import Manifest
from shards.manifest_table import read_manifest
from shards.output.progress import Progress
from shards.output.quantities import plural
from shards.packing.config import PackSpec
from shards.packing.deal import read_dropped
from shards.packing.evaluation_sets import HashTask, find_sets, hash_shard, hash_tasks
from shards.packing.listing import LISTING_PATH, Listing, listed
from shards.packing.merge import (
    class_warnings,
    class_words,
    describe,
    discard_work,
    is_refused,
    merge,
    packed_words,
    refuse_quarantine,
    refused_words,
    write_quarantine_csv,
)
from shards.packing.plan import DROPPED_PATH, PLAN_PATH, Plan, has_shards, read_plan, refuse_other_versions
from shards.packing.planning import make_plan
from shards.packing.scan import ScanTask, scan_slice
from shards.packing.write_shard import ShardTask, pack_shard, samples_of_shard, shards_of_part
from shards.reading.parallel import run_tasks
from shards.sources.kinds import DigitsSource, ManifestSource, ParquetSource, Source, VtabSource
from shards.sources.names import split_in, split_of
from shards.sources.vtab import VtabSplit
from shards.store import MissingObjectError, Store, open_store

__all__ = ["PackJob", "Phase", "complete", "must_scan_again", "run", "sides_of", "source_of_split", "spec_of"]

log = logging.getLogger(__name__)


def run(job: PackJob) -> int:
    """Runs the requested phases and returns the exit code. An interruption keeps what is finished and returns 75."""
    if not job.out:
        raise UserError("--out is missing; give a folder or s3://bucket/prefix")
    try:
        return max(_phases(side) for side in sides_of(job))
    except KeyboardInterrupt:
        log.info("stopped; what is packed so far stays in %s; run the same command to continue", job.out)
        return exit_codes.CONTINUE


def sides_of(job: PackJob) -> list[PackJob]:
    """Returns a job for each split that is packed: the test split's, if the job sets one aside, then the job itself."""
    return [test_side(job), job] if job.split_test and job.split == "train" else [job]


def test_side(job: PackJob) -> PackJob:
    """Returns the job that packs the test split that a job sets aside. The returned job writes no record, because the
    record of `job` covers both splits."""
    out = f"{job.out.rstrip('/')}-test"
    against = tuple(url for url in job.dedup.against if url.rstrip("/") != out)
    return replace(job, out=out, split="test", dedup=replace(job.dedup, against=against), run_dir="")


def _refuse_folder_of_images(job: PackJob) -> None:
    """Raises UserError if the dataset would be written into the folder of its images."""
    root = getattr(job.source, "root", "") or getattr(job.source, "originals", "")
    if root and "://" not in root + job.out and Path(root).resolve() == Path(job.out).resolve():
        name = shlex.quote(f"data/{Path(root).resolve().name}")
        raise UserError(f"--out is {job.out!r}, the folder of the images; give another, such as --out {name}")


def _phases(job: PackJob) -> int:
    _refuse_folder_of_images(job)
    store, spec, began = open_store(job.out), spec_of(job), time.monotonic()
    if job.run_dir:
        write_record(Path(job.run_dir), stage="pack", job=job)
    may_replan = job.phase in ("all", "scan", "plan")
    plan = read_plan(store, spec, may_replan=may_replan)
    if plan and job.phase in ("all", "scan") and must_scan_again(store, plan, job):
        # The same command again after a refusal: the images were repaired, perhaps without another size.
        _discard(store, plan)
        plan = None
    if plan is None and may_replan:
        store.delete(PLAN_PATH)  # there is none, or a new one replaces it
    if plan is not None and (packed := complete(store, plan)):
        discard_work(store)  # in case an earlier command was killed just before this
        log.info("%s is already packed: %d samples; its source was not read again", store.url, plan.num_samples)
        describe(store, packed, job.about())
        return exit_codes.DONE
    if job.phase in ("all", "scan") and plan is None:
        _mention_other_split(job)
        _scan(job, spec, store)
    with _was_reachable():
        if job.phase in ("all", "plan"):
            plan = plan or _planned(job, spec, store)
            _refuse_quarantine(plan, job, store)
        if job.phase in ("all", "shards"):
            plan = _needed(plan, store)
            refuse_quarantine(plan, max_quarantined=job.max_quarantined, url=store.url, is_alone=True)
            _shards(job, spec, plan)
        if job.phase in ("all", "merge"):
            manifest = merge(store, spec, _needed(plan, store), max_quarantined=job.max_quarantined)
            describe(store, manifest, job.about())
            log.info("%s", packed_words(store, manifest, seconds=time.monotonic() - began))
    if job.phase in ("scan", "shards"):
        log.info("%s: phase %s, part %s is done", store.url, job.phase, job.part)
    return exit_codes.DONE


def must_scan_again(store: Store, plan: Plan, job: PackJob) -> bool:
    """Whether the plan was refused, so that the images have to be scanned and planned again."""
    return is_refused(plan, max_quarantined=job.max_quarantined) and not has_shards(store)


def _discard(store: Store, plan: Plan) -> None:
    """Removes a plan with its scan and the listing. Stops once another task of the scan has removed plan.json, which
    goes last, because that task then scans again."""
    for path in (*plan.files, LISTING_PATH, PLAN_PATH):
        if store.exists(PLAN_PATH):
            store.delete(path)


@contextmanager
def _was_reachable() -> Iterator[None]:
    """Turns the error of an unreachable store into a storage fault, because the scan could reach that store."""
    try:
        yield
    except UnreachableError as error:
        raise StorageError(str(error)) from error


def spec_of(job: PackJob) -> PackSpec:
    """Returns all settings that decide the bytes of the shards. Workers and parts are not among them. With
    --split-test, the test split is taken from the source's training split."""
    settings = {field.name: getattr(job, field.name) for field in fields(PackSpec)}
    settings["source"] = source_of_split(job.source, "train" if job.split_test else job.split)
    return PackSpec(**settings)


def source_of_split(source: Source, split: str) -> Source:
    """Returns the source for this split. Sets the split of a source that has splits; otherwise replaces `{split}` in
    file names with the split's name. Raises UserError if the source does not have the split, or if --source.split names
    another one."""
    if isinstance(source, DigitsSource | VtabSource):
        if isinstance(source, DigitsSource) and split not in ("train", "test"):
            raise UserError(f"--split is {split!r}; the digits have train and test")
        if isinstance(source, VtabSource) and split not in get_args(VtabSplit):
            raise UserError(f"--split is {split!r}; a task of VTAB-1k has {', '.join(get_args(VtabSplit))}")
        if source.split not in ("train", split):
            raise UserError(f"--source.split is {source.split!r} but --split is {split!r}; set --split alone")
        return replace(source, split=split)  # type: ignore[arg-type]
    if isinstance(source, ParquetSource | ManifestSource):
        source = replace(source, files=tuple(path.replace("{split}", split) for path in source.files))
    if isinstance(source, ManifestSource):
        return replace(source, split_rows=source.split_rows.replace("{split}", split))
    return source


def _mention_other_split(job: PackJob) -> None:
    """Warns if the source is named after a split other than the dataset's."""
    if job.split_test:
        return
    source = job.source
    named = source.files if isinstance(source, ParquetSource | ManifestSource) else (getattr(source, "root", ""),)
    splits = {split_in(path.rstrip("/").rpartition("/")[2]) for path in named}
    said, given = splits.pop() if len(splits) == 1 else "", split_of(job.split)
    if said and given and said != given:
        message = "the source is named like the split %s, the dataset's split is %s; to change that: --split %s"
        log.warning(message, said, job.split, said)


def _scan(job: PackJob, spec: PackSpec, store: Store) -> None:
    part, num_parts = job.share
    find_sets(spec.dedup.against)  # reports a wrong URL before all images are read
    listing = listed(store, spec.source, scan_hash=spec.scan_hash(), relist=job.phase == "all")
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
    every = list(hash_tasks(job.out, find_sets(spec.dedup.against)))
    tasks: Iterator[HashTask] = iter(every[part::num_parts])
    with Progress("evaluation sets", len(every[part::num_parts]), unit="shards") as progress:
        for count in run_tasks(hash_shard, tasks, workers=job.workers):
            progress.advance(count)


def _planned(job: PackJob, spec: PackSpec, store: Store) -> Plan:
    listing: Listing = listed(store, spec.source, scan_hash=spec.scan_hash())
    plan = make_plan(store, spec, listing, workers=job.workers)
    images = f"{plural(plan.num_samples, 'image')} of {class_words(plan.label_names)}"
    log.info("plan: %s into %s", images, plural(plan.num_shards, "shard"))
    if plan.num_unlabeled:
        images = plural(plan.num_unlabeled, "image")
        log.warning("without a label and left out: %s; --unlabeled keep packs them", images)
    for warning in class_warnings(plan.label_names):
        log.warning("%s", warning)
    if plan.num_relabelled:
        copies = plural(plan.num_relabelled, "duplicate")
        more = "; --dedup.duplicates merge keeps these labels too" if spec.dedup.duplicates == "first" else ""
        log.warning("%s with other labels than the original%s", copies, more)
    return plan


def _refuse_quarantine(plan: Plan, job: PackJob, store: Store) -> None:
    """Raises UserError if too much of the source is refused. Before that, writes a list of all refused samples and logs
    the first reasons."""
    try:
        refuse_quarantine(plan, max_quarantined=job.max_quarantined, url=store.url, is_alone=job.phase == "plan")
    except UserError:
        dropped = read_dropped(store.read(DROPPED_PATH))
        write_quarantine_csv(store, dropped.drop_columns(["locator"]))
        log.info("%s", refused_words(store, dropped))
        raise


def _shards(job: PackJob, spec: PackSpec, plan: Plan) -> None:
    refuse_other_versions(plan, spec)
    part, num_parts = job.share
    mine = shards_of_part(part, num_parts, num_shards=plan.num_shards)
    tasks = (
        ShardTask(
            url=job.out,
            plan_hash=plan.hash,
            spec=spec,
            shard=shard,
            samples_sha256=plan.files.get(samples_of_shard(shard, spec), ""),
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


def complete(store: Store, plan: Plan) -> Manifest | None:
    """Returns the manifest if this plan is already packed, otherwise None."""
    try:
        manifest, _ = read_manifest(store)
    except (MissingObjectError, ValueError):
        return None
    return manifest if manifest.plan_hash == plan.hash else None

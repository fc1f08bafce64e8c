"""Turns existing tars into a dataset without changing them: writes an index, blocks, labels and a manifest.

There are three phases, each of which can be killed and run again. First, every tar is read once and described in the
work folder. Then the record of all tars is written to plan/plan.json; it also says whether labels must be integers.
Last, indexes, tables and the manifest are made from the descriptions.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shards.adoption.foreign_samples import RefusalCause, Unlabeled
from shards.adoption.foreign_tar import (
    AdoptSpec,
    LabelTask,
    TarFacts,
    TarLabels,
    TarTask,
    adopted_rows,
    is_integer,
    read_labels,
    read_tar,
)
from shards.adoption.tar_lists import ListedTar
from shards.class_labels import Meaning, WrittenLabels, settle
from shards.config_values import shown_text
from shards.errors import UserError
from shards.index import QUARANTINE_SCHEMA, IndexRow, ShardCommit, general_reasons, index_bytes, read_commit
from shards.manifest import FORMAT_VERSION, MANIFEST_PATH, Manifest, index_path, sha256_hex
from shards.manifest_table import read_manifest, write_manifest
from shards.output.progress import Progress
from shards.packing.merge import Merged, rows_file
from shards.packing.plan import PLAN_PATH
from shards.reading.parallel import run_tasks
from shards.sources.tar_members import BLOCK_BYTES
from shards.store import LocalStore, MissingObjectError, Store, open_store

log = logging.getLogger(__name__)
LABEL_FLAGS = "--label-key, the label's suffix, or --label-field, a field of .json"
_NO_LABELS = "--unlabeled keep to index samples without a label"
_ADVICE = {
    RefusalCause.NO_IMAGE: "--image-keys, the suffixes of the images",
    RefusalCause.NO_LABEL: f"{LABEL_FLAGS}, or {_NO_LABELS}",
    RefusalCause.UNKNOWN_LABEL: "--label-key or --label-field, or another --labels-file",
    RefusalCause.NOT_INTEGER: "the names of all classes in --labels-file",
}
MOST_NUMBERED_CLASSES = 1_000_000
_DESCRIPTION = re.compile(r"work/adopted-\d{6,}\.parquet")


@dataclass(frozen=True, kw_only=True)
class Adoption:
    """Tars at `tars_url`, and the place of their index. Each URL is a folder or an S3 prefix; often both are the
    same."""

    tars_url: str
    index_url: str
    tars: tuple[ListedTar, ...]
    spec: AdoptSpec


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What was found in all tars. `integers_only`: whether samples with a label that is not an integer are refused.
    `unlabeled`: what happens to samples without one."""

    facts: tuple[TarFacts, ...]
    meaning: Meaning
    labels: tuple[TarLabels, ...]
    integers_only: bool
    unlabeled: Unlabeled

    def rows(self, store: Store, number: int) -> pa.Table:
        """Returns the samples of a tar, with their classes or the reason why they are refused."""
        return adopted_rows(store, number, self.meaning, unlabeled=self.unlabeled, integers_only=self.integers_only)


@dataclass(frozen=True, kw_only=True)
class IndexTask:
    """A task: index tar `number` as shard `shard`. `plan_hash`: the sha256 of plan/plan.json, which has the label
    names."""

    index_url: str
    plan_hash: str
    number: int
    shard: int
    meaning: Meaning


def adopt(adoption: Adoption, *, workers: int, max_quarantined: float) -> Manifest:
    """Indexes the tars, unless that was done already, and returns the manifest. Raises UserError if more than the share
    `max_quarantined` of the samples is refused."""
    store = open_store(adoption.index_url)
    if (there := _manifest_there(store, adoption)) is not None:
        _discard_descriptions(store)  # left behind if the command was killed after writing the manifest
        log.info("%s is already indexed: %d samples; its tars were not read again", store.url, there.num_samples)
        return there
    facts = _described(adoption, workers)
    found = _settled(adoption, facts, workers)
    _refuse_quarantine(found, store, max_quarantined)
    names = label_names({label for some in found.labels for label in some.labels}, found.meaning)
    record = json.dumps(_record(adoption, found, names), sort_keys=True, indent=1).encode() + b"\n"
    plan_hash = sha256_hex(record)
    store.write(PLAN_PATH, record)
    numbers = [number for number, some in enumerate(found.labels) if some.num_fit]
    tasks = (
        IndexTask(index_url=adoption.index_url, plan_hash=plan_hash, number=number, shard=shard, meaning=found.meaning)
        for shard, number in enumerate(numbers)
    )
    with Progress("index", len(numbers), unit="tars") as progress:
        for _ in run_tasks(write_index, tasks, workers=workers):
            progress.advance()
    return _merged(adoption, store, found, names, plan_hash)


def _manifest_there(store: Store, adoption: Adoption) -> Manifest | None:
    """Returns the manifest if these tars are indexed already; None if there is no manifest. Raises UserError if the
    manifest or plan/plan.json is damaged, or describes other tars or settings."""
    try:
        manifest, _ = read_manifest(store)
        record = json.loads(store.read(PLAN_PATH))
        if not manifest.adopted:
            raise UserError(f"{store.url} is a dataset packed by patchline; give --index-url to index its tars again")
        tars = [(some["path"], some["num_bytes"]) for some in record["adopted"]]
        settings = record["settings"]
    except MissingObjectError:
        return None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        where = f"the {MANIFEST_PATH} or the {PLAN_PATH} at {store.url} is damaged, or was not written by patchline"
        raise UserError(f"{where} ({error}); give --index-url to leave it alone") from error
    is_same = tars == [(tar.path, tar.num_bytes) for tar in adoption.tars]
    if is_same and settings == adoption.spec.settings():
        return manifest
    what = "with other settings" if is_same else "when there were other tars"
    raise UserError(f"{store.url} was indexed {what}; delete its {MANIFEST_PATH} first, or give another --index-url")


def _described(adoption: Adoption, workers: int) -> list[TarFacts]:
    spec_hash = adoption.spec.hash()
    tasks = (
        TarTask(
            tars_url=adoption.tars_url,
            index_url=adoption.index_url,
            spec=adoption.spec,
            spec_hash=spec_hash,
            number=number,
            path=tar.path,
            num_bytes=tar.num_bytes,
        )
        for number, tar in enumerate(adoption.tars)
    )
    facts: dict[int, TarFacts] = {}
    num_samples = num_refused = 0
    with Progress("read tars", sum(tar.num_bytes for tar in adoption.tars) // 1_000_000, unit="MB") as progress:
        for number, some in run_tasks(read_tar, tasks, workers=workers):
            facts[number] = some
            num_samples, num_refused = num_samples + some.num_fit, num_refused + some.num_refused
            progress.advance(some.num_bytes // 1_000_000, note=f"{num_samples} samples, {num_refused} refused")
    return [facts[number] for number in range(len(facts))]


def _settled(adoption: Adoption, facts: Sequence[TarFacts], workers: int) -> _Found:
    """Decides what the labels of all tars mean. Raises UserError if they could mean two things."""
    written = WrittenLabels.joined(some.written() for some in facts)
    meaning = settle(adoption.spec.labels, written, listed=adoption.spec.known_labels())
    unlabeled = adoption.spec.rules.unlabeled
    tasks = (
        LabelTask(index_url=adoption.index_url, number=number, meaning=meaning, unlabeled=unlabeled)
        for number in range(len(facts))
    )
    labels = [some for _, some in sorted(run_tasks(read_labels, tasks, workers=workers), key=itemgetter(0))]
    if integers_only := meaning.names is None and are_mostly_integers(labels):
        labels = [some.of_integers() for some in labels]
    return _Found(
        facts=tuple(facts),
        meaning=meaning,
        labels=tuple(labels),
        integers_only=integers_only,
        unlabeled=unlabeled,
    )


def are_mostly_integers(facts: Sequence[TarLabels]) -> bool:
    """Returns whether more than half of the labels, but not all, are integers. If so, warns that the other labels are
    taken for mistakes: as names, they would turn every integer into a name, with another id."""
    num_labels, num_integers = sum(some.num_labels for some in facts), sum(some.num_integers for some in facts)
    if num_integers == num_labels or 2 * num_integers <= num_labels:
        return False
    message = "%d samples are refused: they have a label that is not an integer, but %d of %d labels are integers"
    log.warning(message, sum(some.num_odd for some in facts), num_integers, num_labels)
    return True


def _refuse_quarantine(found: "_Found", store: Store, max_quarantined: float) -> None:
    """Raises UserError if all samples are refused, or a larger share of them than `max_quarantined`."""
    refused = sum(some.num_refused for some in found.labels)
    total = refused + sum(some.num_fit for some in found.labels)
    if refused < total and refused <= max_quarantined * total:
        return
    message, more = "no sample can be adopted", ""
    if refused < total:
        message = f"{refused} of {total} samples cannot be adopted, more than the allowed share of {max_quarantined:g}"
        more = ", or raise --max-quarantined"
    worst = max(range(len(found.labels)), key=lambda number: found.labels[number].num_refused)
    if not found.labels[worst].num_refused:
        raise UserError(f"{message}: the tars are empty; give others")
    rows = found.rows(store, worst)
    reason, cause = commonest_reason(rows)
    advice = f"; give {_ADVICE[RefusalCause(cause)]}" if cause else ""
    example = rows["source"][pc.index(rows["reason"], reason).as_py()].as_py()
    raise UserError(f'{message}, most often: "{reason}", for example {example}{advice}{more}')


def commonest_reason(table: pa.Table) -> tuple[str, str | None]:
    """Finds the most common kind of reason among the refused samples of a description. Returns the most common reason
    of this kind and its cause."""
    refused = table.filter(table["reason"].is_valid())
    columns = (general_reasons(refused["reason"]), refused["reason"], refused["cause"])
    rows = list(zip(*(column.to_pylist() for column in columns), strict=True))
    [(kind, _)] = Counter(kind for kind, *_ in rows).most_common(1)
    [(commonest, _)] = Counter((reason, cause) for other, reason, cause in rows if other == kind).most_common(1)
    return commonest


def label_names(found: set[str], meaning: Meaning) -> tuple[str, ...]:
    """Returns the name of each class: the known names if there are any, otherwise the integers up to the largest label
    or, if a label is not an integer, the labels found, sorted. Raises UserError if an integer is too large to be a
    class number."""
    if meaning.names is not None:
        return meaning.names
    if not all(is_integer(label) for label in found):
        return tuple(sorted(found))
    largest = max((int(label) for label in found), default=-1)
    if largest >= MOST_NUMBERED_CLASSES:
        message = (
            f"the label {shown_text(str(largest))} is not a class number; allowed: 0 to {MOST_NUMBERED_CLASSES - 1}"
        )
        raise UserError(f"{message}; give the names in --labels-file, or another --label-field")
    if "0" not in found and largest > 0 and not meaning.first:
        log.warning(
            "no sample has label 0, so the first class is empty; if the labels count from 1: --labels.numbers from-1"
        )
    return tuple(str(number) for number in range(meaning.first, largest + 1))


def _record(adoption: Adoption, found: _Found, names: tuple[str, ...]) -> dict[str, object]:
    tars = [
        {"path": some.path, "num_bytes": some.num_bytes, "sha256": some.sha256}
        | {"num_fit": labels.num_fit, "num_refused": labels.num_refused}
        for some, labels in zip(found.facts, found.labels, strict=True)
    ]
    return {
        "format_version": FORMAT_VERSION,
        "adopted": tars,
        "settings": adoption.spec.settings(),
        "label_names": names,
        "integers_only": found.integers_only,
        "num_samples": sum(some.num_fit for some in found.labels),
        "num_quarantined": sum(some.num_refused for some in found.labels),
    }


def write_index(task: IndexTask) -> int:
    """Writes the index file of one shard unless it exists. Returns the shard's number."""
    store = open_store(task.index_url)
    if not _is_indexed(store, task):
        plan = _plan_of(task.index_url, task.plan_hash)
        table = adopted_rows(
            store, task.number, task.meaning, integers_only=plan.integers_only, unlabeled=plan.unlabeled
        )
        fit = table.filter(table["reason"].is_null()).drop_columns(["reason", "cause"])
        rows = []
        for row in fit.to_pylist():
            ids = plan.ids
            labels = dict.fromkeys(ids[label] if label in ids else ids[str(int(label))] for label in row["labels"])
            rows.append(IndexRow(**row | {"labels": tuple(labels)}))
        last = rows[-1]
        commit = ShardCommit(
            tar_sha256=plan.tars[task.number]["sha256"],
            tar_bytes=plan.tars[task.number]["num_bytes"],
            data_end=last.offset + last.size + (-last.size) % BLOCK_BYTES,
            plan_hash=task.plan_hash,
        )
        store.write(index_path(task.shard), index_bytes(task.shard, rows, commit))
    return task.shard


def _is_indexed(store: Store, task: IndexTask) -> bool:
    try:
        return read_commit(store.read(index_path(task.shard))).plan_hash == task.plan_hash
    except (MissingObjectError, ValueError):
        return False


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What plan/plan.json records. `ids`: the ids of the label names."""

    tars: list[dict[str, Any]]
    ids: dict[str, int]
    integers_only: bool
    unlabeled: Unlabeled


@lru_cache(maxsize=1)
def _plan_of(index_url: str, plan_hash: str) -> _Plan:
    data = open_store(index_url).read(PLAN_PATH)
    if sha256_hex(data) != plan_hash:
        raise UserError(f"{index_url}/{PLAN_PATH} changed meanwhile; run one patchline index at a time")
    record = json.loads(data)
    ids = {name: number for number, name in enumerate(record["label_names"])}
    return _Plan(
        tars=record["adopted"],
        ids=ids,
        integers_only=record["integers_only"],
        unlabeled=record["settings"]["rules"]["unlabeled"],
    )


def _merged(adoption: Adoption, store: Store, found: _Found, names: tuple[str, ...], plan_hash: str) -> Manifest:
    """Writes the tables and, last, the manifest."""
    merged = Merged(num_classes=len(names), files={PLAN_PATH: plan_hash})
    quarantine: list[pa.Table] = [QUARANTINE_SCHEMA.empty_table()]
    position = 0
    with rows_file(store, sum(some.num_fit for some in found.labels)) as merged.rows:
        for number, (tar, some) in enumerate(zip(found.facts, found.labels, strict=True)):
            if some.num_fit:
                index = store.read(index_path(len(merged.shards)))
                commit = read_commit(index)
                merged.add_shard(tar.path, index, commit, samples_per_block=adoption.spec.samples_per_block)
            if some.num_refused:
                quarantine.append(_refused(found.rows(store, number), position))
            position += some.num_fit + some.num_refused
    _discard_indexes(store, first=len(merged.shards))
    refused = pa.concat_tables(quarantine)
    merged.write_tables(store, names, refused)
    is_elsewhere = open_store(adoption.index_url) != open_store(adoption.tars_url)
    manifest = merged.manifest(adoption.spec, plan_hash=plan_hash, num_quarantined=refused.num_rows)
    shards_url = _lasting(adoption.tars_url) if is_elsewhere else ""
    unlabeled = adoption.spec.rules.unlabeled == "keep"
    manifest = replace(manifest, shards_url=shards_url, adopted=True, unlabeled=unlabeled)
    if is_elsewhere:
        store.discard_unfinished()
    manifest = write_manifest(store, manifest)
    _discard_descriptions(store)
    return manifest


def _refused(adopted: pa.Table, position: int) -> pa.Table:
    """Returns the refused samples of a tar as rows of the quarantine list. `position`: the position of the tar's first
    sample."""
    rows = enumerate(adopted.select(["source", "reason"]).to_pylist(), start=position)
    refused = [
        {**row, "position": place, "phase": "scan", "kind": "refused"}
        for place, row in rows
        if row["reason"] is not None
    ]
    return pa.Table.from_pylist(refused, schema=QUARANTINE_SCHEMA)


def _discard_descriptions(store: Store) -> None:
    """Removes the descriptions of tars from the work folder, which may have other files if it is beside the tars."""
    for path in [path for path in store.list("work") if _DESCRIPTION.fullmatch(path)]:
        store.delete(path)


def _discard_indexes(store: Store, *, first: int) -> None:
    """Removes the indexes from number `first` on, which an interrupted command with more tars left behind."""
    while store.exists(index_path(first)):
        store.delete(index_path(first))
        first += 1


def _lasting(url: str) -> str:
    """Returns a URL that is valid in any working directory, since the index may be read from any: for a folder, its
    full path."""
    store = open_store(url)
    return str(Path(url).absolute()) if isinstance(store, LocalStore) else store.url

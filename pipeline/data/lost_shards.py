"""Shards that can no longer be read from storage, for example because of a bad sector. A run goes on without them if
they are few.

A rank whose read of a shard has failed for longer than its patience notes that shard in the run's folder, and ends with
the error. At the next start, rank 0 reads the whole shard. If that fails, rank 0 also reads the beginning of every
other shard of the dataset. The shards that then stay unreadable for the patience of a read are lost, provided that
another shard can be read before and after: all ranks leave them out from then on, in every later start, and each of
their samples is replaced by its substitute. Of each dataset, at most the share of samples that the quarantine allows
(`max_quarantined`) may be lost in this way.
"""

import glob
import logging
import threading
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.data.quarantine import quarantine_path
from pipeline.data.training_data import TrainingData
from pipeline.ranks.collectives import broadcast_json
from pipeline.ranks.world import World
from shards.dataset import Dataset
from shards.errors import StorageError, disk_fault
from shards.files.local_files import Line, append_line, read_lines
from shards.output.terminal import printable_name
from shards.pool import Pool
from shards.store import MissingObjectError, ReadStoppedError

log = logging.getLogger(__name__)
_FILE = "shards.jsonl"
_PROBED_BYTES = 4 << 20  # at a time
_BEGINNING_BYTES = 512  # the first header of a tar
_PROBED_AT_ONCE = 64  # shards
_WITNESSES = 4  # readable shards, one of which must still be readable at the end
Shard = tuple[str, str]  # the URL of its dataset, and its path


@contextmanager
def noting_lost_shards(data: TrainingData, run_dir: Path, *, rank: int) -> Iterator[None]:
    """If an unreadable shard ends the block with an error, notes that shard."""
    try:
        yield
    except OSError as error:
        fault = disk_fault(error)
        for dataset in data.datasets if fault else ():
            path = str(fault.filename).removeprefix(f"{dataset.shard_store.url}/") if fault else ""
            if path in _num_samples(dataset):
                file = quarantine_path(run_dir, rank=rank).with_name(f"shards-rank-{rank:05d}.jsonl")
                file.parent.mkdir(exist_ok=True)
                append_line(file, {"url": dataset.url, "shard": path, "reason": error.strerror})
        raise


def without_lost_shards(data: TrainingData, run_dir: Path, *, world: World, max_share: float) -> TrainingData:
    """Returns the data without the shards that are lost. Raises StorageError if they have more than `max_share` of the
    samples of a dataset. Collective."""
    lost, fault = list[Shard](), ""
    if world.is_first:
        lost, fault = _lost_shards(data, run_dir, max_share=max_share)
    lost, fault = broadcast_json([lost, fault], device=world.device)
    if fault:
        raise StorageError(fault, todo="check the disk, copy the dataset again, or raise --data.max-quarantined")
    if not lost:
        return data
    own = [[path for url, path in lost if url == dataset.url] for dataset in data.datasets]
    return replace(data, datasets=tuple(one.without_tars(paths) for one, paths in zip(data.datasets, own, strict=True)))


def _lost_shards(data: TrainingData, run_dir: Path, *, max_share: float) -> tuple[list[Shard], str]:
    """Returns the lost shards, and why the run cannot go on without them (empty: it can). Records new ones."""
    folder = quarantine_path(run_dir, rank=0).parent
    datasets = {dataset.url: dataset for dataset in data.datasets}
    known = _shards_in(folder / _FILE, datasets)
    notes = [folder / name for name in sorted(glob.glob("shards-rank-*.jsonl", root_dir=folder))]  # noqa: PTH207
    noted = dict.fromkeys(shard for path in notes for shard in _shards_in(path, datasets) if shard not in known)
    found = _unreadable(datasets, noted, whole=noted)
    unread, urls = {*known, *found}, dict.fromkeys(url for url, _ in found)
    others = [shard for url in urls for path in _num_samples(datasets[url]) if (shard := (url, path)) not in unread]
    suspects = _unreadable(datasets, others, is_patient=False)
    readable = [shard for shard in others if shard not in suspects]
    witnesses = {url: [shard for shard in readable if shard[0] == url][:_WITNESSES] for url in urls}
    new = _unreadable(datasets, [*found, *suspects], whole=found) if all(witnesses.values()) else found
    for url in dict.fromkeys(url for url, _ in new):
        failed = _unreadable(datasets, witnesses[url], whole=witnesses[url], is_patient=False)
        if len(failed) == len(witnesses[url]):
            path = next(path for other, path in new if other == url)
            where = printable_name(f"{datasets[url].shard_store.url}/{path}")
            return [], f"storage cannot read {where}, nor any other shard of this dataset"
    for url, path in noted:
        if (url, path) not in new:
            log.info("%s can be read again", printable_name(f"{datasets[url].shard_store.url}/{path}"))
    lost = [*known, *new]
    if fault := _too_many(datasets, lost, max_share=max_share):
        return [], fault
    for (url, path), reason in new.items():
        append_line(folder / _FILE, {"url": url, "shard": path, "reason": reason})
    for note in notes:
        note.unlink(missing_ok=True)
    for url, path in lost:
        where = printable_name(f"{datasets[url].shard_store.url}/{path}")
        said = "%s could not be read and is left out of this run: its samples are replaced; %s lists it"
        log.warning(said, where, folder / _FILE)
    return lost, ""


def _too_many(datasets: dict[str, Dataset], lost: list[Shard], *, max_share: float) -> str:
    """Returns which dataset has lost more than `max_share` of its samples; empty if none has. Each dataset is judged by
    itself: a mix may draw half of its samples from a dataset with few."""
    for url, dataset in datasets.items():
        own, paths = _num_samples(dataset), [path for other, path in lost if other == url]
        num_lost, num_samples = sum(own[path] for path in paths), dataset.manifest.num_samples
        if num_lost > max_share * num_samples:
            where = printable_name(f"{dataset.shard_store.url}/{paths[-1]}")
            return (
                f"{num_lost:,} of {num_samples:,} samples are in shards that cannot be read, more than the allowed "
                f"{max_share:.2%}, the last of them {where}"
            )
    return ""


def _shards_in(path: Path, datasets: dict[str, Dataset]) -> list[Shard]:
    """Returns the shards of these datasets that a file lists."""

    def is_usable(line: Line) -> bool:
        dataset = datasets.get(str(line.get("url")))
        return dataset is not None and str(line.get("shard")) in _num_samples(dataset)

    lines = read_lines(path, is_usable=is_usable).objects
    return list(dict.fromkeys((str(line["url"]), str(line["shard"])) for line in lines))


def _num_samples(dataset: Dataset) -> dict[str, int]:
    """Returns the number of samples of each shard, by its path."""
    return {shard.path: shard.num_samples for shard in dataset.manifest.shards}


def _unreadable(
    datasets: dict[str, Dataset], shards: Collection[Shard], *, whole: Collection[Shard] = (), is_patient: bool = True
) -> dict[Shard, str]:
    """Reads the beginnings of these shards, many at a time, and the rest of those in `whole`. Returns the reason for
    each shard of which a disk fault prevents that. `is_patient`: whether a read that fails is repeated until its
    patience is over."""
    with closing(Pool(_PROBED_AT_ONCE, name="probe")) as pool:
        futures = {
            (url, path): pool.submit(
                partial(_why_unreadable, datasets[url], path, is_whole=(url, path) in whole, is_patient=is_patient)
            )
            for url, path in shards
        }
        return {shard: reason for shard, future in futures.items() if (reason := future.result())}


def _why_unreadable(dataset: Dataset, path: str, *, is_whole: bool, is_patient: bool) -> str:
    """Reads a shard. Returns the reason if a disk fault prevents that. Returns an empty string if the shard can be
    read, or if it is missing or too short."""
    store, stop = dataset.shard_store, threading.Event()
    if not is_patient:
        stop.set()  # the first failure ends the read
    try:
        end = store.size(path) if is_whole else _BEGINNING_BYTES
        for first in range(0, end, _PROBED_BYTES):
            store.read_range(path, first, min(first + _PROBED_BYTES, end), stop=stop)
    except (MissingObjectError, EOFError):
        return ""
    except ReadStoppedError as error:
        return str(error)
    except OSError as error:
        if not disk_fault(error):
            raise
        return error.strerror or str(error)
    return ""

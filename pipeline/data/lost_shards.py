"""Shards that can no longer be read from storage, for example because of a bad sector. A run goes on without them if
they are few.

A rank whose read of a shard has failed for longer than its patience notes that shard in the run's folder, and ends with
the error. At the next start, rank 0 reads the whole shard. If that fails twice while another shard of the dataset can
be read, the shard is lost: all ranks leave it out from then on, in every later start, and each of its samples is
replaced by its substitute. At most the share of all samples that the quarantine allows (`max_quarantined`) may be lost
in this way.
"""

import glob
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pipeline.data.quarantine import quarantine_path
from pipeline.data.training_data import TrainingData
from pipeline.ranks.collectives import broadcast_json
from pipeline.ranks.world import World
from shards.dataset import Dataset
from shards.errors import StorageError, disk_fault
from shards.files.local_files import Line, append_line, read_lines
from shards.output.terminal import printable_name
from shards.store import MissingObjectError

log = logging.getLogger(__name__)
_FILE = "shards.jsonl"
_PROBED_BYTES = 16 << 20  # at a time
_ALWAYS_ALLOWED = 10  # samples, as in the quarantine
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
    """Returns the data without the shards that are lost. Raises StorageError if they have more than ten samples and
    more than `max_share` of all samples. Collective."""
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
    new = {shard: reason for shard in noted if (reason := _why_unreadable(datasets[shard[0]], shard[1]))}
    for url, path in new:
        others = [other for other in _num_samples(datasets[url]) if (url, other) not in {*known, *new}]
        if not others or _why_unreadable(datasets[url], others[0]):
            where = printable_name(f"{datasets[url].shard_store.url}/{path}")
            return [], f"storage cannot read {where}, nor any other shard of this dataset"
    new = {shard: reason for shard in new if (reason := _why_unreadable(datasets[shard[0]], shard[1]))}
    for url, path in noted:
        if (url, path) not in new:
            log.info("%s can be read again", printable_name(f"{datasets[url].shard_store.url}/{path}"))
    lost = [*known, *new]
    num_lost = sum(_num_samples(datasets[url])[path] for url, path in lost)
    num_samples = sum(sum(_num_samples(dataset).values()) for dataset in datasets.values())
    if num_lost > max(_ALWAYS_ALLOWED, max_share * num_samples):
        url, path = lost[-1]
        where = printable_name(f"{datasets[url].shard_store.url}/{path}")
        return [], (
            f"{num_lost:,} of {num_samples:,} samples are in shards that cannot be read, more than the allowed "
            f"{max_share:.2%}, the last of them {where}"
        )
    for (url, path), reason in new.items():
        append_line(folder / _FILE, {"url": url, "shard": path, "reason": reason})
    for note in notes:
        note.unlink(missing_ok=True)
    for url, path in lost:
        where = printable_name(f"{datasets[url].shard_store.url}/{path}")
        said = "%s could not be read and is left out of this run: its samples are replaced; %s lists it"
        log.warning(said, where, folder / _FILE)
    return lost, ""


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


def _why_unreadable(dataset: Dataset, path: str) -> str:
    """Reads a whole shard. Returns the reason if a disk fault prevents that. Returns an empty string if the shard can
    be read, or if it is missing or too short."""
    store = dataset.shard_store
    try:
        num_bytes = store.size(path)
        for first in range(0, num_bytes, _PROBED_BYTES):
            store.read_range(path, first, min(first + _PROBED_BYTES, num_bytes))
    except (MissingObjectError, EOFError):
        return ""
    except OSError as error:
        if not disk_fault(error):
            raise
        return error.strerror or str(error)
    return ""

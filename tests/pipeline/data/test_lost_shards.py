"""Shards that storage can no longer read: all ranks leave out the same ones, and only those that stay unreadable."""

import errno
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from pipeline.data.config import DataConfig
from pipeline.data.lost_shards import noting_lost_shards, without_lost_shards
from pipeline.data.training_data import open_training_data
from pipeline.ranks.world import World
from shards.dataset import open_dataset
from shards.errors import StorageError
from shards.storage.retries import RetryConfig
from tests.rigs.processes import run_ranks

BAD, GOOD = "shards/shard-000002.tar", "shards/shard-000003.tar"
ALSO_BAD = "shards/shard-000000.tar"  # nobody has noted it


def lost_on(world: World, config: DataConfig, run_dir: Path, max_share: float) -> list[str]:
    """The shards that this rank leaves out, or the error, where only rank 0 fails to read two of them."""
    data, pread = open_training_data(config), os.pread

    def failing(descriptor: int, count: int, offset: int) -> bytes:
        if world.is_first and str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith((BAD, ALSO_BAD)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, count, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", failing)
        patch.setattr("shards.storage.local.RETRIES", RetryConfig(deadline_seconds=0.5))
        try:
            found = without_lost_shards(data, run_dir, world=world, max_share=max_share)
        except StorageError as error:
            return [str(error)]
    return [path for dataset in found.datasets for path in sorted(dataset.lost_tars)]


def note(run_dir: Path, rank: int, **line: object) -> None:
    folder = run_dir / "quarantine"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"shards-rank-{rank:05d}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_all_ranks_leave_out_what_rank_0_cannot_read_either(digits_url: str, tmp_path: Path) -> None:
    """One start finds all of them, though one is noted. Notes of other datasets, of shards that do not exist and half
    lines are ignored."""
    note(tmp_path, 1, url=digits_url, shard=BAD)
    note(tmp_path, 1, url=digits_url, shard=GOOD)
    note(tmp_path, 1, url=digits_url, shard="../x.tar")
    note(tmp_path, 0, url="elsewhere", shard=GOOD)
    note(tmp_path, 0, url=7, shard=[])
    with (tmp_path / "quarantine" / "shards-rank-00000.jsonl").open("a") as file:
        file.write('{"url"')
    (first, second) = run_ranks(lost_on, DataConfig(url=digits_url), tmp_path, 1e-6, num_ranks=2)
    assert first == second
    assert "samples are in shards that cannot be read, more than the allowed 0.00%, the last of them" in first[0]
    assert f"{digits_url}/{ALSO_BAD}; check the disk" in first[0]
    assert not (tmp_path / "quarantine" / "shards.jsonl").exists(), "it may be repaired"
    assert run_ranks(lost_on, DataConfig(url=digits_url), tmp_path, 0.5, num_ranks=2) == [[ALSO_BAD, BAD]] * 2
    assert [path.name for path in (tmp_path / "quarantine").iterdir()] == ["shards.jsonl"]
    assert run_ranks(lost_on, DataConfig(url=digits_url), tmp_path, 0.5, num_ranks=1) == [[ALSO_BAD, BAD]]


def test_each_dataset_of_a_mix_is_judged_by_itself(digits_url: str, tmp_path: Path) -> None:
    """A run may draw most of its samples from a small dataset."""
    (tmp_path / "other").symlink_to(digits_url)
    mix = DataConfig(mix=((digits_url, 1), (str(tmp_path / "other"), 1)))
    note(tmp_path, 0, url=digits_url, shard=BAD)
    manifest = open_dataset(digits_url).manifest
    share = sum(shard.num_samples for shard in manifest.shards if shard.path in (BAD, ALSO_BAD)) / manifest.num_samples
    (said,) = run_ranks(lost_on, mix, tmp_path, 0.9 * share, num_ranks=1)
    assert "more than the allowed" in said[0]
    assert run_ranks(lost_on, mix, tmp_path, 1.1 * share, num_ranks=1) == [[ALSO_BAD, BAD]]


def lost_where_all_fail(world: World, url: str, run_dir: Path, num_reads: int) -> str:
    """The error where no shard can be read more than `num_reads` times, and BAD never."""
    data, pread, reads = open_training_data(DataConfig(url=url)), os.pread, Counter[str]()

    def failing(descriptor: int, count: int, offset: int) -> bytes:
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        reads[name] += 1
        if name.endswith(".tar") and (name.endswith(BAD) or reads[name] > num_reads):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, count, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", failing)
        patch.setattr("shards.storage.local.RETRIES", RetryConfig(deadline_seconds=0.5))
        with pytest.raises(StorageError) as caught:
            without_lost_shards(data, run_dir, world=world, max_share=1.0)
    return str(caught.value)


@pytest.mark.parametrize("num_reads", [0, pytest.param(1, id="the outage begins after the others were read")])
def test_a_shard_is_not_lost_while_the_whole_store_fails(digits_url: str, tmp_path: Path, num_reads: int) -> None:
    note(tmp_path, 0, url=digits_url, shard=BAD)
    (said,) = run_ranks(lost_where_all_fail, digits_url, tmp_path, num_reads, num_ranks=1)
    assert said.startswith(f"storage cannot read {digits_url}/{BAD}, nor any other shard of this dataset")
    assert not (tmp_path / "quarantine" / "shards.jsonl").exists()


def test_only_disks_that_fail_on_a_shard_are_noted(digits_url: str, tmp_path: Path) -> None:
    data = open_training_data(DataConfig(url=digits_url))
    for number, name in (
        (errno.EIO, f"{digits_url}/MANIFEST.json"),
        (errno.EACCES, f"{digits_url}/{BAD}"),
        (errno.EIO, None),
    ):
        with pytest.raises(OSError, match="x"), noting_lost_shards(data, tmp_path, rank=3):
            raise OSError(number, "x", name)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="x"), noting_lost_shards(data, tmp_path, rank=3):
        raise OSError(errno.ESTALE, "x", f"{digits_url}/{BAD}")
    noted = json.loads((tmp_path / "quarantine" / "shards-rank-00003.jsonl").read_text())
    assert noted == {"url": digits_url, "shard": BAD, "reason": "x"}

"""What a packing lacks is told from the store: after every part, and after files were lost."""

from dataclasses import replace
from pathlib import Path

from jobs.data.pack import run, spec_of
from jobs.settings.data import PackJob
from shards.packing.missing import shards_of_part, unpacked_parts, unscanned_parts
from shards.packing.plan import read_plan
from shards.sources.kinds import DigitsSource
from shards.store import open_store

PARTS = 3


def test_parts_are_contiguous_and_cover_everything() -> None:
    for num_shards in range(12):
        for num_parts in range(1, 9):
            ranges = [shards_of_part(part, num_parts, num_shards=num_shards) for part in range(num_parts)]
            assert [shard for each in ranges for shard in each] == list(range(num_shards))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_missing_parts_are_named(tmp_path: Path) -> None:
    url = str(tmp_path / "digits")
    job = PackJob(source=DigitsSource(), out=url, samples_per_shard=300)
    store, spec = open_store(url), spec_of(job)
    assert unscanned_parts(store, spec, url=url, num_parts=PARTS) == [0, 1, 2]
    for part in (0, 2):
        run(replace(job, phase="scan", part=f"{part}/{PARTS}"))
    assert set(unscanned_parts(store, spec, url=url, num_parts=PARTS)) <= {1}, "a small source has one slice"
    run(replace(job, phase="scan", part=f"1/{PARTS}"))
    assert unscanned_parts(store, spec, url=url, num_parts=PARTS) == []
    other = spec_of(replace(job, split="test"))
    assert unscanned_parts(store, other, url=url, num_parts=PARTS) == [0, 1, 2], "a scan with other settings"
    run(replace(job, phase="plan"))
    plan = read_plan(store, spec)
    assert plan is not None
    assert unpacked_parts(store, plan, num_parts=PARTS) == [0, 1, 2]
    run(replace(job, phase="shards", part=f"1/{PARTS}"))
    assert unpacked_parts(store, plan, num_parts=PARTS) == [0, 2]
    for part in (0, 2):
        run(replace(job, phase="shards", part=f"{part}/{PARTS}"))
    assert unpacked_parts(store, plan, num_parts=PARTS) == []
    last = sorted((tmp_path / "digits" / "shards").glob("*.tar"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    assert unpacked_parts(store, plan, num_parts=PARTS) == [2], "a tar of another length"

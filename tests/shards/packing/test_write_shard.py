"""A shard is a plain USTAR archive with the same bytes everywhere, correct offsets and a commit record."""

import hashlib
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import webdataset as wds

from jobs.data.pack import run, spec_of
from jobs.settings.data import PackJob
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.index import index_bytes, read_commit
from shards.manifest import index_path, shard_path
from shards.packing.plan import read_plan
from shards.packing.survey import unscanned_parts
from shards.packing.write_shard import (
    MOST_MEMBER_BYTES,
    ShardTask,
    TarWriter,
    committed,
    header,
    pack_shard,
    planned_samples,
    shards_of_part,
    unpacked_parts,
)
from shards.sources.kinds import DigitsSource, FolderSource
from shards.store import Store, open_store
from shards.tables import table_bytes
from tests.rigs.datasets import index_rows, packed_folders
from tests.rigs.images import class_folders
from tests.rigs.packing import pack_spec, planned
from tests.rigs.tables import read_table

MEMBERS = {"a.jpg": b"x" * 700, "a.cls": b"3", "empty.json": b"", "b.png": b"y" * 512, "large.jpg": b"z" * 100_001}
PARTS = 3


@pytest.fixture
def task(tmp_path: Path) -> ShardTask:
    """The first shard (of 6 images) of a plan of 12."""
    root = class_folders(tmp_path / "images", num_classes=2, images_a_class=6)
    spec = pack_spec(FolderSource(root=str(root)), samples_per_shard=6)
    store = open_store(str(tmp_path / "out"))
    plan = planned(store, spec)
    [(_, samples)] = [item for item in plan.files.items() if "samples" in item[0]]
    return ShardTask(
        url=store.url, plan_hash=plan.hash, spec=spec, shard=0, samples_sha256=samples, max_quarantined=0.0
    )


@pytest.fixture
def store(task: ShardTask) -> Store:
    return open_store(task.url)


def test_a_shard_is_committed_by_its_index(task: ShardTask, store: Store) -> None:
    assert committed(store, task.plan_hash, 0) is None
    assert pack_shard(task) == 6
    commit = committed(store, task.plan_hash, 0)
    assert commit is not None
    assert commit.tar_bytes == store.size(shard_path(0))


def test_a_committed_shard_is_not_written_again(task: ShardTask, store: Store) -> None:
    pack_shard(task)
    tar = Path(store.url, shard_path(0))
    before = tar.stat().st_mtime_ns
    pack_shard(task)
    assert tar.stat().st_mtime_ns == before


@pytest.mark.parametrize("loss", ["index", "tar", "short tar", "other plan"])
def test_anything_less_is_packed_again(task: ShardTask, store: Store, loss: str) -> None:
    pack_shard(task)
    tar, index = store.read(shard_path(0)), store.read(index_path(0))
    if loss == "index":
        store.delete(index_path(0))
    elif loss == "tar":
        store.delete(shard_path(0))
    elif loss == "short tar":
        store.write(shard_path(0), tar[:-512])
    else:
        store.write(index_path(0), index_bytes(0, [], replace(read_commit(index), plan_hash="0" * 64)))
    assert committed(store, task.plan_hash, 0) is None
    pack_shard(task)
    assert (store.read(shard_path(0)), store.read(index_path(0))) == (tar, index)


def test_one_lost_image_leaves_its_slot_out(task: ShardTask, store: Store, tmp_path: Path) -> None:
    lost, *_ = samples = planned_samples(store, 0, samples_per_shard=6)
    (tmp_path / "images" / lost.source).unlink()
    pack_shard(task)
    commit = read_commit(store.read(index_path(0)))
    assert [(item.source, item.position) for item in commit.left_out] == [(lost.source, lost.position)]
    assert f"{lost.slot:010d}.".encode() not in store.read(shard_path(0))
    assert f"{samples[1].slot:010d}".encode() in store.read(shard_path(0))


def test_a_changed_image_is_left_out(task: ShardTask, store: Store, tmp_path: Path) -> None:
    changed = tmp_path / "images" / planned_samples(store, 0, samples_per_shard=6)[2].source
    changed.write_bytes(changed.read_bytes()[:-1] + b"\0")
    pack_shard(task)
    (item,) = read_commit(store.read(index_path(0))).left_out
    assert item.reason == "the image has changed since the scan"


def test_a_source_that_went_away_empties_no_shard(task: ShardTask, store: Store, tmp_path: Path) -> None:
    (tmp_path / "images").rename(tmp_path / "away")
    with pytest.raises(UserError, match="6 of 6 images of shard 0"):
        pack_shard(task)
    assert list(store.list("shards")) == list(store.list("index")) == []
    (tmp_path / "away").rename(tmp_path / "images")
    assert pack_shard(task) == 6


def test_plain_webdataset_reads_what_the_index_points_at(tmp_path: Path) -> None:
    dataset = open_dataset(str(packed_folders(tmp_path)))
    seen = []
    for shard in range(len(dataset.manifest.shards)):
        rows, tar = index_rows(dataset, shard), Path(dataset.url, dataset.shard_path(shard))
        samples = list(wds.WebDataset(str(tar), shardshuffle=False))
        assert [sample["__key__"] for sample in samples] == [row.key for row in rows]
        for row, sample in zip(rows, samples, strict=True):
            image = (tmp_path / "images" / row.source).read_bytes()
            assert sample[row.ext] == image
            assert tar.read_bytes()[row.offset : row.offset + row.size] == image
            assert (int(sample["cls"]),) == row.labels == (int(row.source[1]),)
            facts = json.loads(sample["json"])
            assert (facts["labels"], facts["source"]) == (list(row.labels), row.source)
            seen.append(row.source)
    assert len(seen) == len(set(seen)) == 15


def test_an_image_that_is_back_is_packed_after_all(task: ShardTask, store: Store, tmp_path: Path) -> None:
    pack_shard(task)
    whole = store.read(shard_path(0)), store.read(index_path(0))
    store.delete(index_path(0))
    lost = tmp_path / "images" / planned_samples(store, 0, samples_per_shard=6)[2].source
    data = lost.read_bytes()
    lost.unlink()
    pack_shard(task)
    assert len(read_commit(store.read(index_path(0))).left_out) == 1
    lost.write_bytes(data)
    pack_shard(task)
    assert (store.read(shard_path(0)), store.read(index_path(0))) == whole


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_samples_that_are_not_the_plans_are_refused(task: ShardTask, store: Store, damage: str) -> None:
    path = "plan/samples-00000.parquet"
    if damage == "missing":
        store.delete(path)
    else:
        table = read_table(store.read(path))
        labels = pa.array([[0]] * table.num_rows, table.column("labels").type)
        place = table.schema.get_field_index("labels")
        store.write(path, table_bytes(table.set_column(place, "labels", labels), row_group_size=6))
    with pytest.raises(UserError, match=rf"{path} (is missing|does not match the plan).*--phase plan"):
        pack_shard(task)
    assert not store.exists(index_path(0))


def test_a_plan_that_declares_too_much_is_refused_before_it_is_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shards.tables._MOST_BYTES", 10)
    with pytest.raises(ValueError, match=r"it declares .* decompressed bytes; allowed: 0 to 10"):
        planned_samples(store, 0, samples_per_shard=6)


def written() -> tuple[bytes, TarWriter, dict[str, int]]:
    """The archive of MEMBERS, its writer, and each member's offset."""
    file = io.BytesIO()
    tar = TarWriter(file)
    offsets = {name: tar.add(name, data) for name, data in MEMBERS.items()}
    tar.finish()
    return file.getvalue(), tar, offsets


def test_tarfile_reads_it_and_offsets_are_of_the_data() -> None:
    data, _, offsets = written()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for item, (name, content) in zip(archive, MEMBERS.items(), strict=True):
            assert (item.name, item.offset_data, item.size) == (name, offsets[name], len(content))
    for name, content in MEMBERS.items():
        assert data[offsets[name] : offsets[name] + len(content)] == content


def test_hash_and_size_are_of_what_was_written() -> None:
    data, tar, _ = written()
    assert tar.num_bytes == len(data)
    assert tar.sha256() == hashlib.sha256(data).hexdigest()


def test_nothing_of_the_machine_is_in_it() -> None:
    data, _, _ = written()
    assert data == written()[0]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        facts = {(item.mtime, item.uid, item.gid, item.uname, item.gname, item.mode) for item in archive}
    assert facts == {(0, 0, 0, "", "", 0o644)}


def test_the_bytes_are_those_of_tarfile() -> None:
    expected = io.BytesIO()
    for name, content in MEMBERS.items():
        expected.write(tarfile_header(name, len(content)) + content + bytes(-len(content) % 512))
    assert written()[0] == expected.getvalue() + bytes(1024)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("0000000001.jpg", 110_123),
        pytest.param("empty", 0, id="no content"),
        pytest.param("x" * 100, MOST_MEMBER_BYTES, id="the longest name and the largest content"),
        pytest.param("\u00e4/\u6f22.json", 7, id="not ASCII"),
    ],
)
def test_headers_are_those_of_tarfile(name: str, num_bytes: int) -> None:
    assert header(name, num_bytes) == tarfile_header(name, num_bytes)


def tarfile_header(name: str, num_bytes: int) -> bytes:
    """The header as the standard library makes it."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = num_bytes, 0o644
    return member.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")


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

"""Every check finds its own kind of fault, and none in a good shard, whose tar is mapped from a folder or from S3."""

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from shards.dataset import Dataset, open_dataset
from shards.index import IndexRow, read_commit
from shards.manifest import index_path
from shards.sample_rows import BlockTable
from shards.store import MissingObjectError, open_store
from shards.verifying import shard_checks as checks
from shards.verifying.shard_checks import mapped_tar
from tests.rigs.datasets import index_rows, packed_folders
from tests.rigs.images import half_missing, noisy_jpeg

Rows = list[IndexRow]
Change = Callable[[Rows, bytearray], Rows]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return open_dataset(str(packed_folders(Path(tmp_path_factory.mktemp("checks")))))


def unchanged(rows: Rows, tar: bytearray) -> Rows:
    """A good shard."""
    return rows


def flipped_pixel(rows: Rows, tar: bytearray) -> Rows:
    """One bit inside an image."""
    tar[rows[1].offset + rows[1].size // 2] ^= 1
    return rows


def flipped_class(rows: Rows, tar: bytearray) -> Rows:
    """Another class in the tar than in the index."""
    tar[tar.index(b".cls") - 10 + 512] = ord("9")
    return rows


def renamed(rows: Rows, tar: bytearray) -> Rows:
    """The index has another key for the first sample."""
    return [replace(rows[0], key="9999999999"), *rows[1:]]


def shifted(rows: Rows, tar: bytearray) -> Rows:
    """Offsets that miss by a byte."""
    return [replace(row, offset=row.offset + 1) for row in rows]


def broken_header(rows: Rows, tar: bytearray) -> Rows:
    """A tar header whose checksum is wrong."""
    tar[rows[2].offset - 512] ^= 1
    return rows


def wrong_size(rows: Rows, tar: bytearray) -> Rows:
    """Heights that are not the images'."""
    return [replace(row, height=row.height + 1) for row in rows]


def not_an_image(rows: Rows, tar: bytearray) -> Rows:
    """Zeros where an image was."""
    begin, end = rows[0].offset, rows[0].offset + rows[0].size
    tar[begin:end] = bytes(end - begin)
    return rows


CHECKS: dict[str, Callable[[Rows, bytes], Iterator[str]]] = {
    "checksums": checks.check_checksums,
    "members": partial(checks.check_members, is_ours=True),
    "webdataset": partial(checks.check_webdataset, is_ours=True),
    "decode": checks.check_decode,
}


@pytest.mark.parametrize(
    ("change", "found_by"),
    [
        (flipped_pixel, {"checksums"}),
        (flipped_class, {"webdataset"}),
        (renamed, {"members", "webdataset"}),
        (shifted, {"checksums", "members", "decode"}),
        (broken_header, {"members", "webdataset"}),
        (wrong_size, {"decode"}),
        (not_an_image, {"checksums", "decode"}),
        (unchanged, set()),
    ],
)
def test_each_fault_is_found(dataset: Dataset, change: Change, found_by: set[str]) -> None:
    tar = bytearray(dataset.store.read(dataset.shard_path(0)))
    rows = change(index_rows(dataset, 0), tar)
    found = {name for name, check in CHECKS.items() if list(check(rows, bytes(tar)))}
    # A flipped bit may or may not disturb a decoder.
    assert found - {"decode"} == found_by - {"decode"}
    assert change is flipped_pixel or found == found_by


def test_a_jpeg_of_which_a_part_is_missing_is_found(dataset: Dataset) -> None:
    data = half_missing(noisy_jpeg())
    row = replace(index_rows(dataset, 0)[0], offset=0, size=len(data), height=300, width=400, source="a.jpg")
    (found,) = checks.check_decode([row], data)
    assert found.startswith("row 0 (a.jpg) is damaged: Corrupt JPEG data: ")


def test_json_members_say_the_same_as_the_index(dataset: Dataset) -> None:
    rows, tar = index_rows(dataset, 0), dataset.store.read(dataset.shard_path(0))
    first = rows[0]
    assert not list(checks.check_json(rows, tar))
    changed = {
        "labels": replace(first, labels=(7,)),
        "orientation": replace(first, orientation=first.orientation + 1),
        "height": replace(first, height=first.height + 1),
        "width": replace(first, width=first.width + 1),
        "source": replace(first, source="x"),
        "weights": replace(first, weights=(9.0,)),
    }
    for name, other in changed.items():
        assert list(checks.check_json([other, *rows[1:]], tar)) == [
            f"{first.key}.json has another {name} than row 0 of the index"
        ]
    moved = [replace(first, key="x"), *rows[1:]]
    assert list(checks.check_json(moved, tar)) == ["x.json does not follow the image of row 0, or is not JSON"]
    assert list(checks.check_json(rows, tar[: rows[3].offset]))


def test_tars_of_others_may_have_more_members(dataset: Dataset) -> None:
    rows, tar = index_rows(dataset, 0), dataset.store.read(dataset.shard_path(0))
    for check in (checks.check_members, checks.check_webdataset):
        assert not list(check(rows[1:], tar, is_ours=False))
    assert list(checks.check_members(rows[1:], tar, is_ours=True))


@pytest.mark.parametrize("kind", ["pax", "old"])
def test_a_sparse_member_is_not_filled_in_memory(kind: str) -> None:
    """It would be 8 GB."""
    size = 8_000_000_000
    records = f"34 GNU.sparse.realsize={size}\n22 GNU.sparse.map=0,0\n".encode()
    extension, member = tarfile.TarInfo("x"), tarfile.TarInfo("a.jpg")
    extension.type, extension.size = tarfile.XHDTYPE, len(records)
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    if kind == "old":
        header[156:157] = tarfile.GNUTYPE_SPARSE
        header[483:495] = f"{size:011o}\0".encode()
        header[148:156] = b" " * 8
        header[148:156] = f"{sum(header):06o}\0 ".encode()
    before = extension.tobuf(tarfile.USTAR_FORMAT) + records.ljust(512, b"\0") if kind == "pax" else b""
    found = list(checks.check_webdataset([], before + bytes(header) + bytes(1024), is_ours=False))
    assert found == ["member a.jpg is sparse: readers would fill its gaps in memory"]


def test_labels_must_be_classes(dataset: Dataset) -> None:
    rows = index_rows(dataset, 0)
    assert not list(checks.check_labels(rows, 3))
    others = [replace(rows[0], labels=labels) for labels in ((0,), (3,), (), (-1,))]
    assert list(checks.check_labels(others, 3)) == [
        "row 1 has labels [3], allowed: 0 to 2",
        "row 2 has labels [], allowed: 0 to 2",
        "row 3 has labels [-1], allowed: 0 to 2",
    ]


def test_the_whole_tar_is_fixed_by_the_manifest(dataset: Dataset) -> None:
    record, tar = dataset.manifest.shards[0], dataset.store.read(dataset.shard_path(0))
    assert not list(checks.check_tar(record, tar))
    assert len(list(checks.check_tar(record, tar + b"\0"))) == 2


def test_the_commit_record_must_fit(dataset: Dataset) -> None:
    record, rows = dataset.manifest.shards[0], index_rows(dataset, 0)
    commit, plan_hash = read_commit(dataset.store.read(index_path(0))), dataset.manifest.plan_hash
    assert not list(checks.check_commit(record, commit, rows, plan_hash))
    assert len(list(checks.check_commit(record, replace(commit, tar_bytes=1), rows, "other"))) == 2
    assert len(list(checks.check_commit(record, commit, index_rows(dataset, 3), plan_hash))) == 1


@pytest.mark.parametrize("column", ["shard", "first_byte", "end_byte", "num_samples"])
def test_the_block_table_must_fit(dataset: Dataset, column: str) -> None:
    rows, record = index_rows(dataset, 1), dataset.manifest.shards[1]
    data_end = read_commit(dataset.store.read(index_path(1))).data_end

    def faults(blocks: BlockTable) -> list[str]:
        return list(checks.check_blocks(rows, data_end, record, shard=1, blocks=blocks, samples_per_block=3))

    assert not faults(dataset.blocks)
    values = getattr(dataset.blocks, column) + (np.arange(7) == 2)  # the second shard's first block
    assert faults(replace(dataset.blocks, **{column: values}))


@pytest.mark.parametrize("data", [b"", b"x" * 100_000])
def test_a_mapped_tar_has_the_bytes_of_the_object(tmp_path: Path, s3_bucket: str, data: bytes) -> None:
    for url in (str(tmp_path), f"s3://{s3_bucket}"):
        store = open_store(url)
        store.write("shards/a.tar", data)
        with mapped_tar(store, "shards/a.tar") as tar:
            assert (len(tar), tar[: len(data)]) == (len(data), data)
        with pytest.raises(MissingObjectError), mapped_tar(store, "shards/b.tar"):
            pass

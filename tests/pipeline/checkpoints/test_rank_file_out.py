"""A rank's file, the digests of its parts and its report: on disk, past the page cache, and in a bucket."""

import ctypes
import hashlib
import io
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import pytest

from pipeline.checkpoints.rank_file_out import (
    PART_BYTES,
    DirectFile,
    PartDigests,
    Piece,
    RankReport,
    read_report,
    report_to_json,
    write_rank_file,
)
from shards.files.typed_json import sealed, unsealed
from shards.store import Store, open_store
from tests.rigs.small_disk import small_disk

FOLDER = "step-00000004/attempt-0001-a"
DATA = bytes(range(251)) * 5000  # more than a part
PIECES: tuple[Piece, ...] = (("head.weight", "master", 8, 0, 14),)
PAGE = mmap.PAGESIZE
WHOLE = 256 * PAGE


class Bytes:
    """A rank file in memory, as a file, too, or not."""

    pieces = PIECES

    def __init__(self, *, is_file: bool) -> None:
        self._is_file = is_file

    def parts(self) -> Iterable[memoryview]:
        yield from (memoryview(DATA)[:8], memoryview(DATA)[8:100], memoryview(DATA)[100:])

    def file(self) -> BinaryIO | None:
        return io.BytesIO(DATA) if self._is_file else None


def written(store: Store, *, is_file: bool = True) -> tuple[RankReport, int]:
    calls: list[None] = []
    steps = write_rank_file(store, FOLDER, Bytes(is_file=is_file), rank=7, save=2, progress=lambda: calls.append(None))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, len(calls)


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_the_report_says_what_was_written(
    kind: str, is_file: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = open_store(str(tmp_path) if kind == "folder" else f"s3://{request.getfixturevalue('s3_bucket')}/run")
    report, num_calls = written(store, is_file=is_file)
    assert store.read(f"{FOLDER}/rank-00007.safetensors") == DATA
    digests = [
        hashlib.sha256(DATA[first : first + PART_BYTES]).hexdigest() for first in range(0, len(DATA), PART_BYTES)
    ]
    assert (report.record.num_bytes, list(report.record.sha256)) == (len(DATA), digests)
    assert read_report(store, FOLDER, rank=7, save=2) == report
    assert report.pieces == PIECES
    assert num_calls >= 3, "a writer that works is heard of"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param((b'"save": 2', b'"save": 1'), "is about 'rank-00007.safetensors' of save 1", id="an earlier try"),
        pytest.param((b"rank-00007.s", b"rank-00006.s"), "is about 'rank-00006.safetensors'", id="another rank"),
        pytest.param((b'"num_bytes": ', b'"num_bytes": -'), "record.num_bytes is -", id="a size below 0"),
        pytest.param((b"[8, 0, 14]", b"[]"), "", id="unchanged"),
        pytest.param((b", 14]", b', "14"]'), "pieces.0.4 is '14'", id="text for a number"),
    ],
)
def test_a_report_of_something_else_is_refused(tmp_path: Path, change: tuple[bytes, bytes], reason: str) -> None:
    store = open_store(str(tmp_path))
    report, _ = written(store)
    store.write(f"{FOLDER}/rank-00007.json", sealed(unsealed(report_to_json(report)).replace(*change)))
    if not reason:
        assert read_report(store, FOLDER, rank=7, save=2) == report
        return
    with pytest.raises(ValueError, match=f"rank-00007.json.*{reason}"):
        read_report(store, FOLDER, rank=7, save=2)


@pytest.mark.parametrize("pieces", [(1, 2, 3), (4, 4), (9,), (0, 4, 0), (), (100, 1)])
def test_each_part_has_its_digest_however_the_file_is_written(pieces: tuple[int, ...]) -> None:
    data = bytes(range(sum(pieces)))
    digests, begin = PartDigests(4), 0
    for size in pieces:
        digests.update(memoryview(data)[begin : begin + size])
        begin += size
    expected = [hashlib.sha256(data[first : first + 4]).hexdigest() for first in range(0, len(data), 4)]
    assert (digests.num_bytes, digests.part_bytes, digests.sha256()) == (len(data), 4, tuple(expected))


def pages(num_bytes: int) -> memoryview:
    """Random bytes that begin on a page of their own."""
    memory = mmap.mmap(-1, num_bytes)
    memory[:] = os.urandom(num_bytes)
    return memoryview(memory)


def written_directly(path: Path, *pieces: memoryview) -> tuple[bool, int]:
    """Whether the last piece was to go past the page cache, and the pages that lie there now. Compares the file with
    the pieces."""
    with path.open("xb") as file:
        direct = DirectFile(file.fileno())
        for piece in pieces:
            direct.write(piece)
        os.fsync(file.fileno())
        num_cached = cached_pages(path)  # before somebody reads it
        assert path.read_bytes() == b"".join(pieces)
    return direct.is_direct, num_cached


def cached_pages(path: Path) -> int:
    """Pages of the file that lie in the page cache, see mincore(2)."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        found = (ctypes.c_ubyte * -(-size // PAGE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), found) == 0
        del first
    return sum(each & 1 for each in found)


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    with (tmp_path / "probe").open("xb") as file:
        if not DirectFile(file.fileno()).is_direct:
            pytest.skip(f"the file system of {tmp_path} knows no O_DIRECT")
    return tmp_path / "file"


def test_whole_pages_stay_out_of_the_page_cache(on_disk: Path) -> None:
    assert written_directly(on_disk, pages(WHOLE), pages(PAGE)) == (True, 0)


def test_an_end_that_is_no_whole_page_goes_through_it(on_disk: Path) -> None:
    is_direct, num_cached = written_directly(on_disk, pages(WHOLE), pages(PAGE + 1), pages(WHOLE))
    assert not is_direct
    assert 0 < num_cached <= 258, "the first piece is not there"


def test_bytes_that_begin_inside_a_page_go_through_it(on_disk: Path) -> None:
    is_direct, _ = written_directly(on_disk, pages(WHOLE), pages(WHOLE + PAGE)[1 : WHOLE + 1])
    assert not is_direct


def test_a_file_without_bytes(on_disk: Path) -> None:
    with on_disk.open("xb") as file:
        DirectFile(file.fileno()).write(memoryview(b""))
    assert on_disk.read_bytes() == b""


def test_a_file_that_knows_no_direct_writing() -> None:
    with Path("/dev/null").open("wb") as file:
        direct = DirectFile(file.fileno())
        assert not direct.is_direct
        direct.write(pages(PAGE))


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", num_bytes=8 * PAGE) as folder, (folder / "file").open("xb") as file:
        direct = DirectFile(file.fileno())
        with pytest.raises(OSError, match="No space left"):
            direct.write(pages(WHOLE))

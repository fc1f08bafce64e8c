"""Large files that are written past the page cache."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from pipeline.checkpoints.rank_file_out import DirectFile
from tests.rigs.small_disk import small_disk

PAGE = mmap.PAGESIZE
WHOLE = 256 * PAGE


def pages(num_bytes: int) -> memoryview:
    """Random bytes that begin on a page of their own."""
    memory = mmap.mmap(-1, num_bytes)
    memory[:] = os.urandom(num_bytes)
    return memoryview(memory)


def written(path: Path, *pieces: memoryview) -> tuple[bool, int]:
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
    assert written(on_disk, pages(WHOLE), pages(PAGE)) == (True, 0)


def test_an_end_that_is_no_whole_page_goes_through_it(on_disk: Path) -> None:
    is_direct, num_cached = written(on_disk, pages(WHOLE), pages(PAGE + 1), pages(WHOLE))
    assert not is_direct
    assert 0 < num_cached <= 258, "the first piece is not there"


def test_bytes_that_begin_inside_a_page_go_through_it(on_disk: Path) -> None:
    is_direct, _ = written(on_disk, pages(WHOLE), pages(WHOLE + PAGE)[1 : WHOLE + 1])
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

"""Temporary files: a full folder is named, and errors of other files are left as they are."""

import errno
import tempfile

import pytest

from shards.errors import StorageError
from shards.storage.temporary import temporary_file, temporary_folder


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_folder_is_named(number: int) -> None:
    said = rf"no space left in {tempfile.gettempdir()}, the folder for temporary files; make room there, or set TMPDIR"
    with pytest.raises(StorageError, match=said), temporary_file():
        raise OSError(number, "as the system says it")
    with pytest.raises(StorageError, match=said), temporary_folder("test-") as folder:
        raise OSError(number, "as the system says it", f"{folder}/rows")


def test_errors_of_other_files_pass() -> None:
    with pytest.raises(OSError, match="full") as raised, temporary_folder("test-"):
        raise OSError(errno.ENOSPC, "full", "/mnt/data/shard-000000.tar")
    assert raised.value.filename == "/mnt/data/shard-000000.tar"
    with pytest.raises(FileNotFoundError), temporary_file():
        raise FileNotFoundError(errno.ENOENT, "missing", "/mnt/data/labels.txt")


def test_nothing_is_left_behind() -> None:
    with temporary_file() as file, temporary_folder("test-") as folder:
        file.write(b"data")
        assert file.seek(0) == 0
        assert file.read() == b"data"
        (path := f"{folder}/rows").encode()
    with pytest.raises(FileNotFoundError):
        open(path).close()  # noqa: PTH123  # it is gone with its folder

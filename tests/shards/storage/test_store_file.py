"""A stored object as a file."""

import io
from pathlib import Path

from shards.storage.store_file import StoreFile
from shards.store import open_store


def test_it_reads_and_seeks_like_a_file(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.write("x", b"0123456789")
    file, model = StoreFile(store, "x"), io.BytesIO(b"0123456789")
    for offset, whence, size in ((0, 0, 3), (2, 1, 2), (-4, 2, 2), (0, 1, -1), (5, 0, 100), (0, 2, 1)):
        assert file.seek(offset, whence) == model.seek(offset, whence)
        assert file.read(size) == model.read(size)
        assert file.tell() == model.tell()
    assert file.readable()
    assert file.seekable()

"""A full TMPDIR is one message, which names it; other faults stay what they are."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shards.errors import TransientError, UserError
from shards.sources.big_sort import sorted_rows
from shards.sources.kinds import FolderSource
from shards.sources.tree import list_images
from shards.storage.temporary_files import room_for_temporary_files
from shards.store import open_store
from tests.rigs.images import class_folders
from tests.rigs.packing import pack_spec, planned

FULL = r"no room for temporary files in .*: No space left on device; make room there, or set TMPDIR to another folder"


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary files are on a full disk, and so is what packing writes into its temporary folder."""
    of_arrow = pa.OSFile

    def file_of_arrow(path: str, mode: str = "r") -> Any:
        return of_arrow("/dev/full" if mode == "wb" else path, mode)

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "w+b", buffering=0))  # noqa: SIM115, PTH123
    monkeypatch.setattr(pa, "OSFile", file_of_arrow)


@pytest.mark.usefixtures("full")
def test_a_long_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said to be a folder that this user may not read."""
    monkeypatch.setattr("shards.sources.big_sort.RUN_ROWS", 2)
    with pytest.raises(TransientError, match=FULL):
        list(sorted_rows((b"%d" % number,) for number in range(9)))
    root = class_folders(tmp_path / "images", num_classes=1, images_a_class=5)
    with pytest.raises(TransientError, match=FULL):
        list(list_images(str(root)))


@pytest.mark.usefixtures("full")
def test_a_plan(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images", num_classes=1, images_a_class=5)
    with pytest.raises(TransientError, match=FULL):
        planned(open_store(str(tmp_path / "out")), pack_spec(FolderSource(root=str(root))))


def test_an_upload(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"s3://{s3_bucket}")
    store.write("x", b"before")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "w+b", buffering=0))  # noqa: SIM115, PTH123
    with pytest.raises(TransientError, match=FULL), store.create("x") as file:
        file.write(b"after")
    assert store.read("x") == b"before"


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/none"])
    message = r"no temporary file can be written: No usable temporary directory found in \['/none'\]; make room in"
    with pytest.raises(TransientError, match=message), room_for_temporary_files():
        tempfile.gettempdir()


@pytest.mark.parametrize(
    "fault",
    [
        lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/out"),
        lambda: OSError(errno.EACCES, os.strerror(errno.EACCES)),
        lambda: FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/data/in"),
        lambda: UserError("a mistake"),
    ],
)
def test_other_faults_stay(fault: Callable[[], Exception]) -> None:
    error = fault()
    with pytest.raises(type(error)) as caught, room_for_temporary_files():
        raise error
    assert caught.value is error

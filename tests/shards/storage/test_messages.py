"""What storage says when it refuses or fails, each message once."""

import errno
import io
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from shards.storage.ahead import in_order
from shards.storage.local import LocalStore
from shards.storage.objects import checked_path
from shards.storage.ranges import ReusedMemory
from shards.storage.retries import RetryConfig
from shards.storage.temporary import temporary_file
from tests.rigs.messages import Row, row, table
from tests.shards.storage.test_ranges import freed
from tests.shards.storage.test_s3_read import DATA, answer, read_of


def ordered(_: Path, threads: int, window: int) -> None:
    list(in_order(str, [1], threads=threads, window=window))


def file_in_the_way(folder: Path) -> None:
    (folder / "file").write_bytes(b"")
    LocalStore(str(folder / "file")).write("x", b"")


def writing_into(tmp_path: Path, folder: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    LocalStore(str(tmp_path / folder)).write("x", b"")


def fault_of_a_disk(folder: Path, code: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:

        def fail(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(Path, "mkdir", fail)
        LocalStore(str(folder / "a")).write("x", b"")


def reading_a(folder: Path, kind: str) -> None:
    path = folder / "it"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    LocalStore(str(folder)).read("it")


def path_of_an_object(_: Path, path: str) -> None:
    checked_path(path)


def too_much_memory(_: Path) -> None:
    memory = ReusedMemory()
    memory.give_back(None)
    memory.give_back(b"bytes")
    freed(memory, 2)
    memory.take(1 << 60)


def retry_config(_: Path, values: dict[str, float]) -> None:
    RetryConfig(**values)  # type: ignore[arg-type]


def ranges_ignored(_: Path) -> None:
    read_of(lambda _: {"Body": io.BytesIO(DATA), "ContentLength": len(DATA), "ETag": "a"}, 10, 20).data()


def replaced_object(_: Path, names: tuple[str, ...]) -> None:
    number = 0

    def answered(request: dict[str, str]) -> dict[str, Any]:
        nonlocal number
        number += 1
        return answer(request, most=100, **dict.fromkeys(names, f"W/{number}"))

    read_of(answered, 0, 1000).data()


def no_temporary_folder(_: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:

        def fails() -> None:
            raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']")

        monkeypatch.setattr(tempfile, "TemporaryFile", fails)
        temporary_file().__enter__()


@table(
    # ahead
    row("threads and window: 0 1", ordered, 0, 1).says(
        "ValueError: threads is 0, window is 1: both must be at least 1"
    ),
    row("threads and window: 1 0", ordered, 1, 0).says(
        "ValueError: threads is 1, window is 0: both must be at least 1"
    ),
    # local
    row("a file in the way of a folder", file_in_the_way).says(
        "cannot write DIR/file/x: File exists; use a folder that this user may write to"
    ),
    row("a file system that takes no folders", writing_into, "/proc/nope").says(
        "cannot write /proc/nope/x: No such file or directory; use a folder that this user may write to"
    ),
    row("a name that is too long", writing_into, "name" * 100).says(
        "cannot write DIR/namename…/x: File name too long; use a folder that this user may write to"
    ),
    row("a link to itself", writing_into, "loop/x").says(
        "cannot write DIR/loop/x/x: Too many levels of symbolic links; use a folder that this user may write to"
    ),
    row("a fault of a disk, 28", fault_of_a_disk, errno.ENOSPC).says("OSError: [Errno 28] No space left on device"),
    row("a fault of a disk, 122", fault_of_a_disk, errno.EDQUOT).says("OSError: [Errno 122] Disk quota exceeded"),
    row("a fault of a disk, 5", fault_of_a_disk, errno.EIO).says("OSError: [Errno 5] Input/output error"),
    row("a fault of a disk, 116", fault_of_a_disk, errno.ESTALE).says("OSError: [Errno 116] Stale file handle"),
    *(
        row(f"not a regular file, {kind}", reading_a, kind).says(
            "InvalidDataError: DIR/it is not a regular file; give a file, not a pipe or a device"
        )
        for kind in ("pipe", "device", "socket")
    ),
    # objects
    row("path of an object: ", path_of_an_object, "").says(
        "ValueError: object path '' is not a plain relative path: use NAME or FOLDER/NAME, no .."
    ),
    row("path of an object: /etc/passwd", path_of_an_object, "/etc/passwd").says(
        "ValueError: object path '/etc/passwd' is not a plain relative path: use NAME or FOLDER/NAME, no .."
    ),
    row("path of an object: ../x", path_of_an_object, "../x").says(
        "ValueError: object path '../x' is not a plain relative path: use NAME or FOLDER/NAME, no .."
    ),
    row("path of an object: a/../../x", path_of_an_object, "a/../../x").says(
        "ValueError: object path 'a/../../x' is not a plain relative path: use NAME or FOLDER/NAME, no .."
    ),
    row("path of an object: a/./b", path_of_an_object, "a/./b").says(
        "ValueError: object path 'a/./b' is not a plain relative path: use NAME or FOLDER/NAME, no .."
    ),
    row("path of an object: a//b", path_of_an_object, "a//b").says(
        "ValueError: object path 'a//b' is not a plain relative path: it has an empty part, the one between the "
        "two slashes after 'a'; copy it to a name without //"
    ),
    row("path of an object: a\\x00b", path_of_an_object, "a\0b").says(
        "ValueError: object path 'a\\x00b' is not a plain relative path: use NAME or FOLDER/NAME, no .."
    ),
    row("the empty part of a path", lambda _: checked_path("a/b//c")).says(
        "ValueError: object path 'a/b//c' is not a plain relative path: it has an empty part, the one between the "
        "two slashes after 'a/b'; copy it to a name without //"
    ),
    # ranges
    row(
        "more memory than there is",
        too_much_memory,
    ).says("MemoryError: 1152921504606846976 bytes for a block of images: Cannot allocate memory"),
    # retries
    row("retries, {'fruitless_tries': 0}", retry_config, {"fruitless_tries": 0}).says(
        "fruitless_tries is 0; allowed: 1 or more"
    ),
    row("retries, {'backoff_seconds': -1.0", retry_config, {"backoff_seconds": -1.0}).says(
        "backoff_seconds is -1.0; allowed: 0 or more"
    ),
    row("retries, {'budget_reserve': -1.0}", retry_config, {"budget_reserve": -1.0}).says(
        "budget_reserve is -1.0; allowed: 0 or more"
    ),
    row("retries, {'budget_share': -0.1}", retry_config, {"budget_share": -0.1}).says(
        "budget_share is -0.1; allowed: 0 or more"
    ),
    # s3_read
    row("a storage that ignores ranges", ranges_ignored).says(
        "BadAnswerError: the range asked was ignored 6 times, last in s3://b/x at byte 10"
    ),
    *(
        row(f"an object that is replaced, known by, {names}", replaced_object, names).says(
            "ReplacedError: s3://b/x was replaced while it was read"
        )
        for names in (("ETag",), ("LastModified",))
    ),
    # temporary
    row("no folder for temporary files", no_temporary_folder).says(
        "StorageError: No usable temporary directory found in ['/tmp', '/var/tmp']; make room there, or set "
        "TMPDIR to another folder"
    ),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)

"""Local files are read whole, up to a bound, and only if they have an end."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shards.errors import InvalidDataError
from shards.files.local_files import open_local_file, read_local_file, read_local_text


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "ten"
    file.write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to(file)
    assert read_local_file(file, most_bytes=10) == b"0123456789"
    assert read_local_file(str(tmp_path / "link"), most_bytes=10) == b"0123456789"
    with pytest.raises(InvalidDataError, match="ten is larger than 9 bytes, the most that are read of such a file"):
        read_local_file(file, most_bytes=9)


def test_what_is_missing_or_a_folder_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_local_file(tmp_path / "missing", most_bytes=9)
    with pytest.raises(IsADirectoryError):
        read_local_file(tmp_path, most_bytes=9)
    with pytest.raises(InvalidDataError, match="null byte"):
        read_local_file("a\0b", most_bytes=9)


def test_an_open_file_gives_its_parts(tmp_path: Path) -> None:
    (tmp_path / "ten").write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to("ten")
    with open_local_file(tmp_path / "link") as file:
        assert (file.seek(8), file.read(5), file.seek(0), file.read(2)) == (8, b"89", 0, b"01")
    with pytest.raises(FileNotFoundError):
        open_local_file(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        open_local_file(tmp_path)
    with pytest.raises(InvalidDataError, match="null byte"):
        open_local_file("a\0b")


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    with pytest.raises(InvalidDataError, match="it is not a regular file; give a file"):
        read_local_file(path, most_bytes=9)
    with pytest.raises(InvalidDataError, match="it is not a regular file; give a file"):
        open_local_file(path)


def test_a_huge_file_is_refused_without_being_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))\n"
        "from shards.errors import InvalidDataError; from shards.files.local_files import read_local_file\n"
        "try: read_local_file(sys.argv[1], most_bytes=1 << 20)\n"
        "except InvalidDataError: sys.exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "huge")], check=False)
    assert done.returncode == 7


def test_text_is_utf_8_with_or_without_a_mark(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes("\ufeffäb\n".encode())
    assert read_local_text(file, most_bytes=9) == "äb\n"
    file.write_bytes(b"a\nb\xff\n")
    with pytest.raises(InvalidDataError, match=r"text is not UTF-8: byte 3 \(line 2\) is 0xff; save it as UTF-8"):
        read_local_text(file, most_bytes=9)

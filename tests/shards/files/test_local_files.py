"""Local files are read within bounds, and good lines are read whatever stands between them or at the end."""

import errno
import math
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from shards.errors import InvalidDataError
from shards.files import local_files
from shards.files.local_files import (
    KeptWrites,
    Line,
    append_line,
    append_or_say,
    is_finite,
    is_number,
    is_step,
    naming,
    open_local_file,
    read_lines,
    read_local_file,
    read_local_text,
    read_tail,
    write_whole,
)
from tests.rigs.small_disk import filled, small_disk

BAD = (
    b'{"step": 2, "lo',
    b"[1]",
    b"NaN",
    b"null",
    b'{"step": NaN}',
    b'{"step": true}',
    b'{"step": -1}',
    b'{"step": 1e999}',
    b'{"step": "2"}',
    b"{}",
    b"\xff\xfe{}",
    b'{"step": 2, "loss": "\xff"}',
    b"[" * 200_000,
    b'{"a":' * 200_000,
    b'{"step": 2, "loss": ' + b"9" * 6_000 + b"}",
    b'{"step": 2, "note": "' + b"x" * (1 << 20) + b'"}',
    b"\0" * 30,
    b" ",
)


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


def has_step(line: Line) -> bool:
    return is_step(line.get("step"))


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_line_costs_no_good_one(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3, "loss": NaN}\n')
    lines = read_lines(path, is_usable=has_step)
    assert [line["step"] for line in lines.objects] == [1, 3]
    assert lines.objects[0] == {"step": 1}
    assert math.isnan(lines.objects[1]["loss"])
    assert lines.num_unusable == 1


def test_lines_without_a_word_are_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1, "score": 2}\n{"ste\n{"step": 2}\n')
    lines = read_lines(path, is_usable=has_step, containing=b'"score"')
    assert (lines.objects, lines.num_unusable) == ([{"step": 1, "score": 2}], 0)


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "lines.jsonl", is_usable=has_step).objects == []


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device", "too large"])
def test_what_is_no_file_of_lines_is_refused(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.jsonl"
    monkeypatch.setattr(local_files, "MOST_FILE_BYTES", 100)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b'{"step": 1}\n' * 10)
    with pytest.raises(InvalidDataError, match=r"lines\.jsonl .*; move it away"):
        read_lines(path, is_usable=has_step)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, (True, True, True)),
        (-3, (True, True, False)),
        (0.5, (True, True, False)),
        (float("nan"), (True, False, False)),
        (float("inf"), (True, False, False)),
        (10**400, (True, False, False)),
        (True, (False, False, False)),
        ("3", (False, False, False)),
        (None, (False, False, False)),
    ],
)
def test_values(value: object, expected: tuple[bool, bool, bool]) -> None:
    assert (is_number(value), is_finite(value), is_step(value)) == expected


def test_a_full_disk_says_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device: '/runs/a'"), naming(Path("/runs/a")):
        Path("/dev/full").write_text("x")
    with pytest.raises(FileNotFoundError, match="missing"), naming(Path("/runs/a")):
        (tmp_path / "missing").read_text()


def test_a_line_is_appended_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, {"a": 1})
    append_line(path, {"b": 2})
    assert path.read_text() == '{"a": 1}\n{"b": 2}\n'
    with path.open("a") as file:
        file.write('{"torn": ')
    append_line(path, {"c": float("nan")})
    assert path.read_text().splitlines()[2:] == ['{"torn": ', '{"c": NaN}']


def test_writes_that_find_no_room_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", num_bytes=64 << 10) as folder:
        path, filler = folder / "lines.jsonl", filled(folder)
        writes = KeptWrites(path)
        for number in range(1000):  # far more than one page
            writes.do(partial(append_line, path, {"number": number}))
        append_or_say(folder / "others.jsonl", {"a": 1}, what="a finding")
        filler.unlink()
        writes.settle()
        found = read_lines(path, is_usable=lambda line: "number" in line)
    assert [line["number"] for line in found.objects] == list(range(1000)), "in order, and each once"
    assert "others.jsonl cannot be written: No space left on device; it lacks this: a finding" in caplog.text


def test_kept_writes_are_bounded_and_other_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "_MOST_KEPT", 2)
    writes = KeptWrites(tmp_path / "a")
    for _ in range(2):
        writes.do(partial(Path("/dev/full").write_text, "x"))
    with pytest.raises(OSError, match="No space left"):
        writes.do(partial(Path("/dev/full").write_text, "x"))
    with pytest.raises(FileNotFoundError):
        KeptWrites(tmp_path / "a").do(partial((tmp_path / "missing" / "a").write_text, "x"))


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "DONE"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    full = mock.patch.object(Path, "replace", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with full, pytest.raises(OSError, match=r"No space left on device: '.*/DONE'"):
        write_whole(path, b"three")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def ends_with_step(line: Line) -> bool:
    return type(line.get("step")) is int


@pytest.mark.parametrize(
    ("data", "most_bytes", "step"),
    [
        pytest.param(b'{"step": 1}\n{"step": 2}\n', 100, 2, id="whole"),
        pytest.param(b'{"step": 1}\n{"step": 2, "lo', 100, 1, id="half a line at the end"),
        pytest.param(b'{"step": 1}\n\x00\xff\n[3]\n\n', 100, 1, id="lines of others at the end"),
        pytest.param(b'{"step": 1}\n{"step": "x"}\n', 100, 1, id="a line that is not usable"),
        pytest.param(b'{"step": 1}\n{"step": 2}\n', 14, 2, id="only the end is read"),
        pytest.param(b'{"a": 1, "step": 12}\n', 20, None, id="a line that begins before the end"),
        pytest.param(b'{"step": 12}', 12, 12, id="the only line, without a line break"),
        pytest.param(b"", 100, None, id="empty"),
    ],
)
def test_the_last_usable_line(tmp_path: Path, data: bytes, most_bytes: int, step: int | None) -> None:
    (tmp_path / "file").write_bytes(data)
    tail = read_tail(tmp_path / "file", most_bytes=most_bytes)
    assert tail
    found = tail.last(ends_with_step)
    assert (found or {}).get("step") == step
    assert (tail.num_bytes, len(tail.data)) == (len(data), min(len(data), most_bytes))


@pytest.mark.parametrize(
    ("data", "step"),
    [
        pytest.param('{"step": 1, "score": 2}\n{"step": 3}\n', 1, id="further back"),
        pytest.param('{"step": 1, "score": 2}\n{"step": 3, "score": 4}', 3, id="the last one, without a line break"),
        pytest.param(
            '{"step": 1, "score": 2}\n{"score": "step"}\n{"step": 3}\n', 1, id="behind one that is not usable"
        ),
        pytest.param('{"step": 1, "score": 2}\n{"step": 3, "score', 1, id="half a mark"),
        pytest.param('{"step": 3}\n', None, id="none"),
    ],
)
def test_only_lines_with_a_mark_are_parsed(tmp_path: Path, data: str, step: int | None) -> None:
    (tmp_path / "file").write_text(data)
    tail = read_tail(tmp_path / "file", most_bytes=100)
    assert tail
    found = tail.last(ends_with_step, containing=b'"score"')
    assert (found or {}).get("step") == step


def test_a_mark_in_a_line_that_begins_before_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"step": 1, "score": 2}\n{"step": 3}\n')
    tail = read_tail(tmp_path / "file", most_bytes=24)
    assert tail
    assert tail.last(ends_with_step, containing=b'"score"') is None


def test_what_is_no_file(tmp_path: Path) -> None:
    assert read_tail(tmp_path / "missing", most_bytes=10) is None
    with pytest.raises(IsADirectoryError):
        read_tail(tmp_path, most_bytes=10)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidDataError, match="not a regular file"):
        read_tail(tmp_path / "pipe", most_bytes=10)

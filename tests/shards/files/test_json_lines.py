"""Good lines are read whatever stands between them."""

import errno
import os
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
    read_lines,
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


def has_step(line: Line) -> bool:
    return is_step(line.get("step"))


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_line_costs_no_good_one(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3, "loss": NaN}\n')
    lines = read_lines(path, is_usable=has_step)
    assert [line["step"] for line in lines.objects] == [1, 3]
    assert lines.texts == [b'{"step": 1}', b'{"step": 3, "loss": NaN}']
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

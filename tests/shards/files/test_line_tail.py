"""The last usable line of a file, whatever a killed process left at its end."""

import os
from pathlib import Path

import pytest

from shards.errors import InvalidDataError
from shards.files.local_files import Line, read_tail


def has_step(line: Line) -> bool:
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
    found = tail.last(has_step)
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
    found = tail.last(has_step, containing=b'"score"')
    assert (found or {}).get("step") == step


def test_a_mark_in_a_line_that_begins_before_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"step": 1, "score": 2}\n{"step": 3}\n')
    tail = read_tail(tmp_path / "file", most_bytes=24)
    assert tail
    assert tail.last(has_step, containing=b'"score"') is None


def test_what_is_no_file(tmp_path: Path) -> None:
    assert read_tail(tmp_path / "missing", most_bytes=10) is None
    with pytest.raises(IsADirectoryError):
        read_tail(tmp_path, most_bytes=10)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidDataError, match="not a regular file"):
        read_tail(tmp_path / "pipe", most_bytes=10)

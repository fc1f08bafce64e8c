"""RUN/loggers.json names a run at its services for good."""

import json
from pathlib import Path

import pytest

from pipeline.training.reporting.logger_choice import logger_id, read_logger_id
from shards.errors import InvalidDataError


def test_it_is_made_once(tmp_path: Path) -> None:
    assert read_logger_id(tmp_path) == ""
    made = logger_id(tmp_path)
    assert len(made) == 16
    assert logger_id(tmp_path) == read_logger_id(tmp_path) == made
    assert logger_id(tmp_path / "..") != made
    assert [path.name for path in tmp_path.iterdir()] == ["loggers.json"]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="half"),
        pytest.param(b'{"id": 5}', id="a number"),
        pytest.param(b'{"id": "../../elsewhere1"}', id="a path"),
        pytest.param(b"{\"id\": \"a' or 'b' = 'b\"}", id="a condition of a search"),
        pytest.param(b'{"id": "0123456789abcdef", "more": 1}', id="an unknown field"),
        pytest.param(json.dumps({"id": "a" * 5000}).encode(), id="long"),
        pytest.param(b"\xff", id="not UTF-8"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, bad: bytes) -> None:
    (tmp_path / "loggers.json").write_bytes(bad)
    with pytest.raises(InvalidDataError, match=r"loggers\.json is damaged \(.*restore it, or move it away"):
        logger_id(tmp_path)
    assert (tmp_path / "loggers.json").read_bytes() == bad


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loggers.json").mkdir()
    with pytest.raises(InvalidDataError, match="is damaged"):
        read_logger_id(tmp_path)

"""Loggers are chosen by the job, what is missing is one message at the start, and RUN/loggers.json names a run for
good."""

import importlib.machinery
import json
import threading
from importlib import util
from pathlib import Path

import pytest
import yaml

from pipeline.training.reporting import loggers
from pipeline.training.reporting.loggers import following, logger_id, read_logger_id, refuse_unusable_loggers
from pipeline.training.settings.job import LoggersConfig, TrainingJob
from shards.errors import InvalidDataError, UserError
from tests.rigs.processes import patchline
from tests.rigs.training import pretrain_words


@pytest.mark.parametrize("library", ["mlflow", "wandb"])
def test_a_missing_library_is_one_message(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = util.find_spec

    def spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
        return None if name == library else found(name)

    monkeypatch.setattr(loggers, "find_spec", spec_of)
    with pytest.raises(UserError) as caught:
        refuse_unusable_loggers(LoggersConfig(**{library: True}), tmp_path, opens=False)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"--loggers.{library} needs the package {library}, which is not installed: pip install 'patchline[{library}]', "
        f"or leave out --loggers.{library}"
    )


def test_without_loggers_nothing_is_started_or_written(tmp_path: Path) -> None:
    refuse_unusable_loggers(LoggersConfig(), tmp_path, opens=True)
    num_threads = threading.active_count()
    with following(TrainingJob(run_dir=str(tmp_path)), text="", settings={}, is_done=lambda: True):
        assert threading.active_count() == num_threads
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(util.find_spec("wandb") is None, reason="wandb is not installed (extra test)")
def test_a_damaged_id_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    (tmp_path / "loggers.json").write_text("{}")
    with pytest.raises(InvalidDataError, match=r"loggers\.json is damaged"):
        refuse_unusable_loggers(LoggersConfig(wandb=True), tmp_path, opens=True)
    refuse_unusable_loggers(LoggersConfig(), tmp_path, opens=True)


def test_the_loggers_of_a_run_may_change(digits_url: str, tmp_path: Path) -> None:
    """No part of what a run is: recorded, and free."""
    words = pretrain_words(digits_url, tmp_path, "--steps", "4", "--loggers.project", "one")
    assert patchline(*words).code == 0
    assert yaml.safe_load((tmp_path / "job.yaml").read_text())["job"]["loggers"]["project"] == "one"
    again = patchline(*words[:-1], "two")
    assert again.code == 0
    assert "already done" in again.errors


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
    with pytest.raises(InvalidDataError):
        logger_id(tmp_path)
    assert (tmp_path / "loggers.json").read_bytes() == bad

"""Loggers are chosen by the job; what is missing is one message at the start."""

import importlib.machinery
from importlib import util
from pathlib import Path

import pytest
import yaml

from pipeline.training.reporting import logger_choice
from pipeline.training.reporting.logger_choice import open_loggers, refuse_unusable_loggers
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.loggers import LoggersConfig
from shards.errors import InvalidDataError, UserError
from tests.rigs.processes import patchline
from tests.rigs.training import pretrain_words


@pytest.mark.parametrize("library", ["mlflow", "wandb"])
def test_a_missing_library_is_one_message(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = util.find_spec

    def spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
        return None if name == library else found(name)

    monkeypatch.setattr(logger_choice, "find_spec", spec_of)
    with pytest.raises(UserError) as caught:
        refuse_unusable_loggers(LoggersConfig(**{library: True}), tmp_path, opens=False)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"--loggers.{library} needs the package {library}, which is not installed: pip install 'patchline[{library}]', "
        f"or leave out --loggers.{library}"
    )


def test_without_loggers_nothing_is_started_or_written(tmp_path: Path) -> None:
    refuse_unusable_loggers(LoggersConfig(), tmp_path, opens=True)
    with open_loggers(TrainingJob(run_dir=str(tmp_path)), step=0) as loggers:
        assert loggers.threads == []
        loggers.show_job("", {})
        loggers.write(1, {"loss": 1.0})
        loggers.amend(1, {"loss": 1.0})
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

"""Weights & Biases offline: one run over kills, with every step once, as W&B's own program reads its files."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pipeline.training.reporting import wandb_logger
from pipeline.training.reporting.metrics import read_metrics, tag_of
from pipeline.training.reporting.wandb_logger import WandbLogger, last_step
from pipeline.training.settings.loggers import LoggersConfig
from tests.rigs.kills import run_and_kill, sent_after_a_checkpoint
from tests.rigs.processes import patchline, program
from tests.rigs.training import AT_ONCE, pretrain_words, resumed_steps

pytestmark = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed (extra test)")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def files_of(run_dir: Path) -> list[Path]:
    """One for each start, in their order."""
    return sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.parent.name)


def records_of(path: Path) -> list[dict[str, Any]]:
    """What W&B's own program reads in a file, up to where a killed process left it."""
    from wandb.util import get_core_path  # noqa: PLC0415 - an extra

    words = [get_core_path(), "leet", "inspect", "--no-observability", "--json"]
    done = subprocess.run([*words, "--run-file", path, path.parent.parent], capture_output=True, check=False)
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The steps in a file, each with its values."""
    return [record["history"]["item"] for record in records_of(path) if record["type"] == "history"]


@pytest.mark.long
def test_a_killed_run_is_one_run_with_every_step_once(digits_url: str, tmp_path: Path) -> None:
    run_dir, steps = tmp_path / "run", 300
    more = ("--steps", str(steps), "--checkpoint.every-steps", "1000", "--loggers.name", "seven")
    words = pretrain_words(digits_url, run_dir, *AT_ONCE, *more, "--loggers.wandb")
    moment = sent_after_a_checkpoint(lambda: max(map(last_step, files_of(run_dir)), default=0))
    assert run_and_kill(words, run_dir, moment=moment, num_ranks=1, log_dir=tmp_path), "the run ended first"
    ended = patchline(*words)
    assert (ended.code, ended.output) == (0, ""), ended.errors
    first, second = files_of(run_dir)
    assert first.name == second.name, "one run"
    before, after = rows_of(first), rows_of(second)
    assert 20 <= resumed_steps(run_dir)[-1] < before[-1]["_step"] < steps, "steps were sent, and trained again"
    assert last_step(first) == before[-1]["_step"]
    written = read_metrics(run_dir)
    assert [row["_step"] for row in before + after] == [line["step"] for line in written] == list(range(1, steps + 1))
    for name in ("loss", "grad_norm", "learning_rate", "epoch"):
        assert [row[tag_of(name)] for row in before + after] == [line[name] for line in written], name
    (exit_,) = [record["exit"] for record in records_of(second) if record["type"] == "exit"]
    assert not exit_.get("exit_code", 0)
    said = [line for line in ended.errors.splitlines() if "W&B" in line or "wandb" in line]
    assert len(said) == 1, ended.errors
    assert f"W&B: offline; wandb sync {run_dir}/wandb uploads it (continues after step {last_step(first)})" in said[0]


def test_without_a_key_there_is_one_warning_and_no_question(digits_url: str, tmp_path: Path) -> None:
    environ = {"WANDB_MODE": "online", "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    environ |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": ""}
    ended = patchline(*pretrain_words(digits_url, tmp_path / "run", "--loggers.wandb"), environ=environ)
    assert ended.code == 0, ended.errors
    said = [line for line in ended.errors.splitlines() if "W&B" in line or "wandb" in line]
    assert "W&B does not answer: ValueError: no API key: set WANDB_API_KEY, run wandb login" in said[0]
    assert "W&B has not taken the last 16 lines of the run" in said[-1]
    assert len(said) == 2, ended.errors


def test_it_can_be_switched_off_in_the_environment(digits_url: str, tmp_path: Path) -> None:
    words = pretrain_words(digits_url, tmp_path / "run", "--steps", "2", "--schedule.warmup-steps", "1")
    ended = patchline(*words, "--loggers.wandb", environ={"WANDB_MODE": "disabled"})
    assert (ended.code, ended.output) == (0, ""), ended.errors
    assert [line[9:] for line in ended.errors.splitlines() if "W&B" in line] == ["W&B: switched off by WANDB_MODE"]
    assert files_of(tmp_path / "run") == []


def test_a_file_that_is_still_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's own process outlives a killed run, and may add steps."""
    monkeypatch.setattr(wandb_logger, "_WRITER_SECONDS", 0.2)
    folder = tmp_path / "wandb" / "offline-run-20260101_000000-0123456789abcdef"
    folder.mkdir(parents=True)
    one = WandbLogger(LoggersConfig(wandb=True), identity="0123456789abcdef", name="n", run_dir=tmp_path)
    with (folder / "run-0123456789abcdef.wandb").open("wb"), pytest.raises(TimeoutError, match="still writing"):
        one.open()


def test_values_added_to_the_last_step_are_in_its_row(tmp_path: Path) -> None:
    """In a process of its own: W&B's library ends with the process that loaded it."""
    ended = program(_ADDED, str(tmp_path))
    assert ended.code == 0, ended.errors
    (first, second) = files_of(tmp_path)
    rows = [{name: row[name] for name in row if name[0] != "_"} for row in rows_of(first)]
    assert rows == [{"train/loss": 1.0}, {"train/loss": 0.5, "eval/loss": 2.0}]
    (exit_,) = [record["exit"] for record in records_of(first) if record["type"] == "exit"]
    assert exit_["exit_code"] == 75
    assert [row["_step"] for row in rows_of(second)] == [3]
    summary = json.dumps([record for record in records_of(second) if record["type"] == "summary"])
    assert "eval/late" in summary, "of a step that an earlier start has sent"


_ADDED = """
import sys
from pathlib import Path
from pipeline.training.settings.loggers import StartEnding, Line, LoggersConfig
from pipeline.training.reporting.wandb_logger import WandbLogger, prepare

prepare()
for number, ending in enumerate((StartEnding.STOPPED, StartEnding.DONE)):
    one = WandbLogger(LoggersConfig(wandb=True), identity="0123456789abcdef", name="n", run_dir=Path(sys.argv[1]))
    assert one.open() == 2 * number
    if number == 0:
        one.write([Line(step=step, values={"train/loss": 1 / step}, time_ms=1) for step in (1, 2)])
        one.write([Line(step=2, values={"eval/loss": 2.0}, time_ms=1, is_added=True)])
    else:
        one.write([Line(step=2, values={"eval/late": 3.0}, time_ms=1, is_added=True)])
        one.write([Line(step=3, values={"train/loss": 0.3}, time_ms=1)])
    one.close(ending)
"""

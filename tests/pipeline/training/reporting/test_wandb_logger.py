"""Weights & Biases offline: one run over kills, without a gap, as W&B's own program reads its files."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pipeline.training.reporting.loggers import WandbLogger
from pipeline.training.reporting.metrics import read_metrics, tag_of
from pipeline.training.settings.job import LoggersConfig
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


def last_step(run_dir: Path) -> int:
    """The last step in W&B's files; 0 if there is none."""
    return max((row["_step"] for path in files_of(run_dir) for row in rows_of(path)), default=0)


@pytest.mark.long
def test_a_killed_run_is_one_run_with_every_step(digits_url: str, tmp_path: Path) -> None:
    run_dir, steps = tmp_path / "run", 300
    more = ("--steps", str(steps), "--checkpoint.every-steps", "1000", "--loggers.name", "seven")
    words = pretrain_words(digits_url, run_dir, *AT_ONCE, *more, "--loggers.wandb")
    moment = sent_after_a_checkpoint(lambda: last_step(run_dir))
    assert run_and_kill(words, run_dir, moment=moment, num_ranks=1, log_dir=tmp_path), "the run ended first"
    ended = patchline(*words)
    assert (ended.code, ended.output) == (0, ""), ended.errors
    first, second = files_of(run_dir)
    assert first.name == second.name, "one run"
    before, after = rows_of(first), rows_of(second)
    assert [row["_step"] for row in before] == list(range(1, len(before) + 1))
    assert 20 <= resumed_steps(run_dir)[-1] < len(before) < steps, "steps were sent, and trained again"
    written = read_metrics(run_dir)
    assert [row["_step"] for row in after] == [line["step"] for line in written] == list(range(1, steps + 1))
    for name in ("loss", "grad_norm", "learning_rate", "epoch"):
        assert [row[tag_of(name)] for row in after] == [line[name] for line in written], name
        assert [row[tag_of(name)] for row in before] == [line[name] for line in written[: len(before)]], name
    assert [path.read_text() for path in (run_dir / "wandb").glob("last-step-*")] == [f"{steps}\n"]
    (exit_,) = [record["exit"] for record in records_of(second) if record["type"] == "exit"]
    assert not exit_.get("exit_code", 0)
    said = [line for line in ended.errors.splitlines() if "W&B" in line or "wandb" in line]
    assert len(said) == 1, ended.errors
    assert f"W&B: offline; wandb sync {run_dir}/wandb uploads it" in said[0]


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


@pytest.mark.parametrize(
    ("found", "step"),
    [
        pytest.param(b"17\n", 17, id="of an earlier start"),
        pytest.param(None, 0, id="the first start, or the folder was deleted"),
        pytest.param(b"", 0, id="empty"),
        pytest.param(b"-5", 0, id="negative"),
        pytest.param(b"\xff", 0, id="damaged"),
    ],
)
def test_the_step_to_continue_after(tmp_path: Path, found: bytes | None, step: int) -> None:
    """What is damaged costs repeated lines, and no gap."""
    (tmp_path / "wandb").mkdir()
    if found is not None:
        (tmp_path / "wandb" / "last-step-0123456789abcdef").write_bytes(found)
    one = WandbLogger(LoggersConfig(wandb=True), identity="0123456789abcdef", name="n", run_dir=tmp_path)
    assert one._offline_step() == step


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
from pipeline.training.reporting.follower import CurveLine, StartEnding
from pipeline.training.reporting.loggers import WandbLogger
from pipeline.training.settings.job import LoggersConfig

WandbLogger.prepare(LoggersConfig())
for number, ending in enumerate((StartEnding.STOPPED, StartEnding.DONE)):
    one = WandbLogger(LoggersConfig(wandb=True), identity="0123456789abcdef", name="n", run_dir=Path(sys.argv[1]))
    assert one.open() == 2 * number
    if number == 0:
        one.write([CurveLine(step=step, values={"train/loss": 1 / step}, time_ms=1) for step in (1, 2)])
        one.write([CurveLine(step=2, values={"eval/loss": 2.0}, time_ms=1)])
    else:
        one.write([CurveLine(step=2, values={"eval/late": 3.0}, time_ms=1)])
        one.write([CurveLine(step=3, values={"train/loss": 0.3}, time_ms=1)])
    one.close(ending)
"""

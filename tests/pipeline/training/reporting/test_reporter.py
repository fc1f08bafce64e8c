"""The messages of rank 0, and throughput over the last 30 s of training.

The live line has the right width, each event has a line, and rates stand beside sums. Throughput leaves out
checkpoints, evaluations and a slow first step; the time left includes them.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.recipes.pretrain import digits_smoke
from pipeline.data.position import StepRange
from pipeline.evaluation.scores import Scores
from pipeline.training.reporting.ledger import ACCOUNTS, Account, Ledger
from pipeline.training.reporting.metrics import Metrics, read_metrics
from pipeline.training.reporting.reporter import Reporter, Throughput, settings_of
from pipeline.training.settings.job import OptimizerConfig
from pipeline.training.settings.schedule import ScheduleConfig
from pipeline.training.settings.tokens import TokensConfig
from shards.output.progress import as_live_line
from tests.rigs.scores import scores_with
from tests.rigs.screens import Screen

TRAFFIC = dict.fromkeys(("bytes", "requests", "retries", "hedges", "samples"), 0.0)
SCORES = scores_with(num_images=359, accuracy=0.6128, loss=1.3149)


class Run:
    """A reporter of a run of 300 steps, with simulated steps that take a second and read 1,000 bytes in 10 requests."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, step: int = 0, log_every: int = 1) -> None:
        self.folder, self.now, self.ledger = folder, 1000.0, Ledger(folder)
        monkeypatch.setattr("pipeline.training.reporting.reporter.time.monotonic", lambda: self.now)
        self.metrics = Metrics(folder, step=step)
        job = replace(digits_smoke(), run_dir=str(folder), log_every_steps=log_every)
        self.reporter = Reporter(job, self.metrics, self.ledger, step=step, epoch_samples=1280)

    def step(self, step: int, *, scores: Scores | None = None) -> None:
        self.now += 1.0
        self.ledger.seconds["compute"] += 0.75
        self.ledger.seconds["data_wait"] += 0.25
        traffic = TRAFFIC | {"bytes": 1000.0 * step, "requests": 10.0 * step}
        self.reporter.launched(step)
        self.reporter.step(step, loss=2.0 / step, grad_norm=1.5, rate=1e-3, traffic=traffic, scores=scores)


def test_values_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch)
    run.step(1)
    run.step(2, scores=SCORES)
    run.metrics.close()
    first, second = read_metrics(tmp_path)
    assert "data/bytes_per_second" not in first
    assert second == {
        "step": 2,
        "loss": 1.0,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        **{f"data/{name}": value for name, value in (TRAFFIC | {"bytes": 2000.0, "requests": 20.0}).items()},
        "data/bytes_per_second": 1000.0,
        "data/requests_per_second": 10.0,
        "data/retries_per_second": 0.0,
        "data/hedges_per_second": 0.0,
        "test_accuracy": 0.6128,
        "test_loss": 1.3149,
        "test_top5": 0.7128,
        "test_mean_per_class": 0.6128,
        "test_calibration_error": 0.1,
        "test_chance": 0.1,
        "images_per_second": 128.0,
        "step_seconds": 1.0,
        "data_wait_share": 0.25,
        "epoch": 0.2,
    }


def test_a_line_has_the_guards_values_and_the_epoch_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch)
    run.reporter.skipped = (StepRange(first=1, end=4),)
    run.reporter.launched(1)
    run.reporter.step(
        1, loss=1.0, grad_norm=1.0, rate=0.1, traffic=TRAFFIC, scores=None, guard={"guard/rewinds": 1.0, "guard/z": 0.5}
    )
    run.metrics.close()
    (line,) = read_metrics(tmp_path)
    assert (line["guard/rewinds"], line["guard/z"]) == (1.0, 0.5)
    assert line["epoch"] == 4 * 128 / 1280, "three data steps were skipped"


def test_lines_are_of_the_steps_that_are_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, log_every=100)
    for step in range(1, 301):
        run.step(step, scores=SCORES if step == 250 else None)
    run.metrics.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [100, 200, 250, 300]
    assert read_metrics(tmp_path)[1]["data/bytes_per_second"] == 1000.0


def test_what_no_later_line_can_have_is_in_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last commit, and the failure that ends a run."""
    run = Run(tmp_path, monkeypatch, log_every=2)
    for step in (1, 2, 3):
        run.step(step)
    run.reporter.saved(3, {"checkpoint/commit_seconds": 2.0})
    run.reporter.not_saved(1)
    run.reporter.write_rest()
    run.reporter.write_rest()
    run.metrics.close()
    (line,) = read_metrics(tmp_path)
    assert (line["step"], line["loss"]) == (2, 1.0)
    assert (line["checkpoint/commit_seconds"], line["checkpoint/failed"]) == (2.0, 1.0)


def test_a_log_has_a_line_at_each_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, monkeypatch, step=18)
    with caplog.at_level(logging.INFO), run.reporter:
        run.step(19)
        run.step(20, scores=SCORES)
        run.reporter.saved(20, {})
    assert [record.message for record in caplog.records] == [
        "step 20: test accuracy 0.613, loss 1.31",
        "step 20/300, loss 0.1000, test accuracy 0.613, learning rate 0.001, epoch 2.0, 128 images/s, "
        "4:40 left, checkpoint saved",
    ]
    run.metrics.close()


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (77, "20/300  loss 0.100  acc 0.613  lr 0.001  epoch 2.0  128 img/s  4:40 left"),
        (
            117,
            "step 20/300  loss 0.1000  test accuracy 0.613  learning rate 0.001  epoch 2.0  128 images/s  4:40 left  "
            "saved 18",
        ),
        (40, "20/300  loss 0.100  acc 0.613  4:40 left"),
    ],
)
def test_the_live_line_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int, line: str) -> None:
    run = Run(tmp_path, monkeypatch, step=18)
    run.step(19)
    run.step(20, scores=SCORES)
    assert as_live_line(run.reporter.facts(), columns) == line
    run.metrics.close()


def test_the_longest_run_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, step=1_035_000)
    run.reporter.job = replace(run.reporter.job, steps=1_035_645, global_batch=4096)
    run.step(1_035_001, scores=SCORES)
    line = as_live_line(run.reporter.facts(), 77)
    assert line == "1035001/1035645  loss 0.000  acc 0.613  lr 0.001  4,096 img/s  10:44 left"
    run.metrics.close()


def test_a_terminal_has_the_evaluation_above_the_live_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(80)
    screen.take(monkeypatch)
    logging.getLogger().setLevel(logging.INFO)
    run = Run(tmp_path, monkeypatch)
    with run.reporter:
        run.step(1)
        assert screen.read()[0].startswith("1/300  loss 2.000")
        run.step(2, scores=SCORES)
        run.reporter.saved(2, {})
        evaluation, live = screen.read()
        assert evaluation == "step 2: test accuracy 0.613, loss 1.31"
        assert live.startswith("2/300  loss 1.000  acc 0.613")
    assert screen.read() == [evaluation, ""]
    assert (screen.controls, screen.num_wrapped) == ("", 0)
    run.metrics.close()
    screen.close()


def test_settings_are_what_a_hyperparameter_may_be() -> None:
    settings = settings_of(replace(digits_smoke(), run_dir="r"))
    assert settings["model.width"] == 128
    assert {type(value) for value in settings.values()} <= {str, int, float}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"schedule": ScheduleConfig(decay="rsqrt", timescale=7)}, {"schedule.timescale": 7}),
        (
            {"schedule": ScheduleConfig(decay="staircase", stair_steps=(3, 9), stair_factor=0.5)},
            {"schedule.stair_steps": "3 9", "schedule.stair_factor": 0.5},
        ),
        (
            {"schedule": ScheduleConfig(cooldown_steps=5, final_learning_rate=1e-5)},
            {"schedule.cooldown_steps": 5, "schedule.final_learning_rate": 1e-5},
        ),
        (
            {"tokens": TokensConfig(patch_dropout=0.5, image_sizes=(16, 24), size_steps=(3, 9))},
            {"tokens.patch_dropout": 0.5, "tokens.image_sizes": "16 24", "tokens.size_steps": "3 9"},
        ),
        ({"tokens": TokensConfig(patch_sizes=(4, 8))}, {"tokens.patch_sizes": "4 8"}),
        ({"optimizer": OptimizerConfig(layer_decay=0.75)}, {"optimizer.layer_decay": 0.75}),
        ({"optimizer": OptimizerConfig(freeze_backbone=True)}, {"optimizer.freeze_backbone": "true"}),
        (
            {"model": replace(digits_smoke().model, stochastic_depth=0.1, stochastic_depth_rates="uniform")},
            {"model.stochastic_depth": 0.1, "model.stochastic_depth_rates": "uniform"},
        ),
        ({"data": replace(digits_smoke().data, label_weights=True)}, {"data.label_weights": "true"}),
        ({"ema_decay": 0.9}, {"ema_decay": 0.9}),
        ({"loss": "sigmoid"}, {"loss": "sigmoid"}),
    ],
)
def test_runs_are_told_apart_by_their_settings(changes: dict[str, Any], shown: dict[str, str | int | float]) -> None:
    before, after = settings_of(digits_smoke()), settings_of(replace(digits_smoke(), **changes))
    assert shown.items() <= after.items()
    assert before.items() & shown.items() == set()


def run(
    throughput: Throughput, seconds: dict[Account, float], first: int, last: int, *, compute: float, wait: float = 0.0
) -> None:
    for step in range(first, last + 1):
        seconds["compute"] += compute
        seconds["data_wait"] += wait
        throughput.launched(step)
        throughput.step()


def test_the_rate_follows_the_last_30_seconds() -> None:
    seconds: dict[Account, float] = dict.fromkeys(ACCOUNTS, 0.0)
    throughput = Throughput(seconds, step=100)
    run(throughput, seconds, 101, 101, compute=60.0)
    assert throughput.step_seconds() == 60.0, "the only step there is, compiled as it was"
    run(throughput, seconds, 102, 103, compute=1.0)
    assert throughput.step_seconds() == 1.0, "the first step is not asked any more"
    run(throughput, seconds, 104, 200, compute=1.0)
    run(throughput, seconds, 201, 260, compute=0.5, wait=0.1)
    assert throughput.step_seconds() == pytest.approx(0.6)


def test_time_left_includes_what_stands_aside() -> None:
    seconds: dict[Account, float] = dict.fromkeys(ACCOUNTS, 0.0)
    seconds["checkpoint"] = seconds["compute"] = 1000.0  # from an earlier start
    throughput = Throughput(seconds, step=0)
    run(throughput, seconds, 1, 10, compute=1.0)
    assert throughput.seconds_left(110) == pytest.approx(100.0)
    seconds["evaluation"] += 20.0
    run(throughput, seconds, 11, 20, compute=1.0)
    assert throughput.seconds_left(120) == pytest.approx(200.0)
    assert throughput.step_seconds() == pytest.approx(1.0)
    assert throughput.seconds_left(20) == 0.0


def test_values_of_a_line_are_of_the_steps_since_the_last_line() -> None:
    seconds: dict[Account, float] = dict.fromkeys(ACCOUNTS, 0.0)
    throughput = Throughput(seconds, step=0)
    run(throughput, seconds, 1, 10, compute=9.0, wait=1.0)
    assert throughput.since_line(global_batch=128) == {
        "images_per_second": pytest.approx(12.8),
        "step_seconds": pytest.approx(10.0),
        "data_wait_share": pytest.approx(0.1),
    }
    seconds["checkpoint"] += 500.0
    run(throughput, seconds, 11, 11, compute=2.0)
    values = throughput.since_line(global_batch=128)
    assert values["images_per_second"] == pytest.approx(64.0)
    assert values["data_wait_share"] == 0.0


def test_a_step_ends_when_it_is_launched_not_when_it_is_read() -> None:
    seconds: dict[Account, float] = dict.fromkeys(ACCOUNTS, 0.0)
    throughput = Throughput(seconds, step=0)
    for step in (1, 2):
        seconds["compute"] += 3.0
        throughput.launched(step)
    for _ in range(2):  # both are read now
        throughput.step()
        assert throughput.since_line(global_batch=6)["images_per_second"] == pytest.approx(2.0)


def test_marks_do_not_pile_up_over_a_million_fast_steps() -> None:
    seconds: dict[Account, float] = dict.fromkeys(ACCOUNTS, 0.0)
    throughput = Throughput(seconds, step=0)
    run(throughput, seconds, 1, 20_000, compute=0.01)
    assert throughput.step_seconds() == pytest.approx(0.01)
    assert len(throughput._marks) < 150

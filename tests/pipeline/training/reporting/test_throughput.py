"""Throughput over the last 30 s of training, without checkpoints, evaluations and a slow first step; the time left
includes them."""

import pytest

from pipeline.training.reporting.ledger import ACCOUNTS, Account
from pipeline.training.reporting.reporter import Throughput


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

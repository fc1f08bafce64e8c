"""Real signals to ranks that evaluate: a run gives the evaluation up before the next batch and saves, and `evaluate`
ends."""

import shutil
import signal
from pathlib import Path

import pytest

from jobs import exit_codes
from pipeline.training.reporting.metrics import read_metrics
from tests.faults.test_hung_rank import all_said, ended, stands_in
from tests.rigs.interrupting import behind_a_proxy
from tests.rigs.kills import wait_until
from tests.rigs.training import FinishedRuns, losses, pretrain_words, run, start

FP32 = ("--engine.precision", "fp32")
LONG = ("--evaluation.batch-size", "1")  # 719 batches
BEATS = ("--hang.step-seconds", "10")  # with heartbeats every half second


def scored(run_dir: Path) -> list[int]:
    """The steps with scores of the held-out dataset."""
    return [int(line["step"]) for line in read_metrics(run_dir) if "test_accuracy" in line]


@pytest.mark.parametrize(
    ("number", "rank"),
    [(signal.SIGTERM, 1), (signal.SIGUSR1, 0), (signal.SIGUSR2, 1)],
    ids=["TERM", "USR1", "USR2"],
)
def test_one_signal_to_one_rank_ends_the_evaluation_of_all(
    finished_runs: FinishedRuns, digits_url: str, tmp_path: Path, number: signal.Signals, rank: int
) -> None:
    """And the run is saved at the step that was evaluated."""
    run_dir = tmp_path / "run"
    evaluation = ("--evaluation.url", digits_url, "--evaluation.every-steps", "6")
    words = pretrain_words(digits_url, run_dir, *FP32, *evaluation)
    ranks = start([*words, *LONG, *BEATS], num_ranks=2, log_dir=tmp_path)
    assert wait_until(ranks, stands_in("evaluating", rank=rank, batch=3), run_dir)
    ranks.processes[rank].send_signal(number)
    assert ended(ranks, 0, 1) == [exit_codes.CONTINUE] * 2
    assert list(losses(run_dir)) == [1, 2, 3, 4, 5, 6]
    assert scored(run_dir) == [], "it was given up"
    assert list((run_dir / "checkpoints").glob("step-00000006/*/MANIFEST.json"))
    if number is signal.SIGTERM:
        assert run([*words, "--evaluation.batch-size", "256"], num_ranks=2, log_dir=tmp_path) == 0
        assert losses(run_dir) == losses(finished_runs.get(2, *FP32))
        assert scored(run_dir) == [12, 16]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR2, 140)])
def test_the_ranks_of_evaluate_end_while_a_read_hangs(
    finished_runs: FinishedRuns,
    digits_url: str,
    s3_bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    weights = shutil.copytree(finished_runs.get(2, *FP32) / "weights", tmp_path / "weights")
    with behind_a_proxy(digits_url, s3_bucket) as (url, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        words = ["evaluate", "--weights", str(weights), "--data.url", url, "--device", "cpu"]
        ranks = start(words, num_ranks=2, log_dir=tmp_path)
        assert wait_until(ranks, lambda _: sum(bool(one.range) for one in proxy.seen) > 3, tmp_path)
        proxy.rates = {"silence": 1.0}
        assert proxy.stalling.wait(60)
        ranks.signal(number)
        assert ended(ranks, 0, 1) == [code] * 2
    said = all_said(capfd, tmp_path)
    assert said.count("interrupted; run the same command to start again") == 2, said
    assert "Traceback" not in said

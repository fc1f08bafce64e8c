"""Whole small runs: continued ones equal unbroken ones bit for bit, for every ZeRO stage and number of ranks."""

import json
import math
import shlex
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file

from jobs.exit_codes import end_of
from pipeline.checkpoints.attempts import Attempt, attempt_to_json, record_path
from pipeline.models.weights.safetensors import refuse_not_finite
from pipeline.runs.starts import Left, add_start
from pipeline.training.loop import Loop
from pipeline.training.reporting.ledger import ACCOUNTS, Ledger
from pipeline.training.run import _count_pauses, _retried
from pipeline.training.saving.finish import read_done
from shards.errors import InvalidDataError, WillNotSucceedError
from tests.rigs.kills import saving, wait_until
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words, resumed_steps, run, start

pytestmark = pytest.mark.slow
BF16 = ("--engine.precision", "bf16")  # elsewhere it is what this machine computes natively


def continue_from(source: Path, target: Path, *, step: int) -> None:
    """A copy of a run as a kill after `step` would have left it: later checkpoints and the end are missing."""
    shutil.copytree(source, target)
    for folder in (target / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    (target / "DONE").unlink()
    shutil.rmtree(target / "weights")


@pytest.mark.parametrize(
    ("stage", "num_ranks", "more"),
    [
        pytest.param(1, 1, (), marks=pytest.mark.long),
        (1, 2, ()),
        pytest.param(  # another set of moments
            2, 2, ("--optimizer.name", "sgd", "--schedule.learning-rate", "0.03"), marks=pytest.mark.long
        ),
        pytest.param(3, 1, ("--engine.precision", "fp32"), marks=pytest.mark.long),
        pytest.param(1, 2, ("--optimizer.first-moment", "bf16"), marks=pytest.mark.long),
        (3, 2, BF16),
        (2, 2, ("--ema-decay", "0.9")),  # Polyak averaging: one slot more, and the weights are the average
        pytest.param(
            1,
            2,
            ("--micro-batch", "8", "--engine.precision", "bf16"),
            marks=pytest.mark.long,
        ),  # sums of micro-batches in fp32, beside gradients in bf16
    ],
)
def test_a_continued_run_equals_the_unbroken_one(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path, stage: int, num_ranks: int, more: tuple[str, ...]
) -> None:
    options = ("--engine.zero-stage", str(stage), *more)
    unbroken, continued = finished_runs.get(num_ranks, *options), tmp_path / "continued"
    continue_from(unbroken, continued, step=STEPS // 2)

    assert run(pretrain_words(digits_url, continued, *options), num_ranks=num_ranks, log_dir=tmp_path) == 0

    assert resumed_steps(continued) == [0, STEPS // 2]
    assert losses(continued) == losses(unbroken)
    assert set(losses(unbroken)) == set(range(1, STEPS + 1))
    expected, found = (load_file(d / "weights" / "model.safetensors") for d in (unbroken, continued))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_work_of_a_checkpoint_without_a_line_in_the_ledger_is_not_lost(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    """The run was killed between its commit and its line."""
    continued = tmp_path / "continued"
    continue_from(finished_runs.get(1), continued, step=STEPS // 2)
    path = continued / "ledger.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    line["seconds"]["compute"] /= 2  # so small a run writes it right before the next save
    path.write_text(json.dumps(line | {"unix_time": line["unix_time"] - 60.0}) + "\n")

    assert run(pretrain_words(digits_url, continued), num_ranks=1, log_dir=tmp_path) == 0

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    before, saved, after = lines[:3]
    assert before["step"] < STEPS // 2
    assert (saved["step"], saved["attempt"]) == (STEPS // 2, before["attempt"])
    assert saved["seconds"]["compute"] > before["seconds"]["compute"]
    assert saved["seconds"]["restarts"] == 0.0
    assert after["attempt"] != before["attempt"]
    assert after["seconds"]["restarts"] < after["unix_time"] - saved["unix_time"]


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 1), (1, 3)), ((1, 3), (2, 2))],  # (ranks, ZeRO stage) before and after the continuation
)
def test_a_run_goes_on_with_other_ranks_and_stages(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """fp32: equal to rounding, since the order of additions differs."""
    fp32 = ("--engine.precision", "fp32")
    unbroken = finished_runs.get(before[0], "--engine.zero-stage", str(before[1]), *fp32)
    continued = tmp_path / "continued"
    continue_from(unbroken, continued, step=STEPS // 2)

    words = pretrain_words(digits_url, continued, "--engine.zero-stage", str(after[1]), *fp32)
    assert run(words, num_ranks=after[0], log_dir=tmp_path) == 0

    expected, found = losses(unbroken), losses(continued)
    assert found.keys() == expected.keys()
    assert [found[s] for s in sorted(found)] == pytest.approx([expected[s] for s in sorted(expected)], abs=2e-5)


def test_a_copied_checkpoint_is_continued_and_kept(
    finished_runs: FinishedRuns, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """From a backup or another run, with no other file of it: not "from scratch", and never deleted."""
    unbroken, words = finished_runs.get(1), pretrain_words(finished_runs.url, run_dir)
    copied = min((unbroken / "checkpoints").glob("step-*"))
    step = int(copied.name.removeprefix("step-"))
    shutil.copytree(copied, run_dir / "checkpoints" / copied.name)
    kept = sorted(path.name for path in (run_dir / "checkpoints" / copied.name).rglob("*"))

    assert run([*words, "--checkpoint.keep-newest", "1"], num_ranks=1, log_dir=tmp_path) == 0
    assert resumed_steps(run_dir) == [step]
    assert losses(run_dir) == {at: loss for at, loss in losses(unbroken).items() if at > step}
    assert sorted(path.name for path in (run_dir / "checkpoints" / copied.name).rglob("*")) == kept

    other, token = tmp_path / "started from scratch", "0001-aaaaaaaa"
    shutil.copytree(copied, other / "checkpoints" / copied.name)
    (other / "checkpoints" / "attempts").mkdir()
    record = other / "checkpoints" / record_path(token)
    record.write_bytes(attempt_to_json(Attempt(token=token, resumed_from=None, skipped=())))
    assert run(pretrain_words(finished_runs.url, other), num_ranks=1, log_dir=tmp_path) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert f"move {other}/checkpoints/attempts away to continue from that checkpoint" in said


def test_the_decay_that_follows_the_schedule_is_the_same_run_in_other_words(
    digits_url: str, finished_runs: FinishedRuns, run_dir: Path, tmp_path: Path
) -> None:
    """0.05 of a rate whose peak is 1e-3 is 5e-5 of the schedule."""
    words = ("--optimizer.weight-decay", "5e-5", "--optimizer.decay-scale", "schedule")
    assert (
        run(pretrain_words(digits_url, run_dir, "--engine.zero-stage", "1", *words), num_ranks=1, log_dir=tmp_path) == 0
    )
    assert losses(run_dir) == losses(finished_runs.get(1, "--engine.zero-stage", "1"))


def test_smoothing_reaches_the_loss(
    digits_url: str, finished_runs: FinishedRuns, run_dir: Path, tmp_path: Path
) -> None:
    """The same at a zero head, then always higher: no share of 0.9 for one class of ten is certain of it."""
    words = pretrain_words(digits_url, run_dir, "--engine.zero-stage", "1", "--label-smoothing", "0.1")
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    smooth, plain = losses(run_dir), losses(finished_runs.get(1, "--engine.zero-stage", "1"))
    assert smooth[1] == pytest.approx(plain[1], abs=1e-6)
    assert smooth[STEPS] > plain[STEPS]


def test_weighted_classes_reach_the_loss(
    digits_url: str, finished_runs: FinishedRuns, run_dir: Path, tmp_path: Path
) -> None:
    """A zero head gives each image the loss ln 10, which its weight multiplies: those of the digits are near 1."""
    words = pretrain_words(digits_url, run_dir, "--engine.zero-stage", "1", "--class-weights", "balanced")
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    weighted, plain = losses(run_dir), losses(finished_runs.get(1, "--engine.zero-stage", "1"))
    assert weighted[1] == pytest.approx(plain[1], rel=0.02)
    assert weighted[1] != plain[1]


def test_a_finished_run_is_left_alone_and_a_longer_one_goes_on(
    finished_runs: FinishedRuns, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished_runs.get(1), run_dir)
    words = pretrain_words(finished_runs.url, run_dir)
    marker, record = (run_dir / "DONE").read_text(), (run_dir / "job.yaml").read_text()
    done = read_done(run_dir)
    assert done is not None
    assert done.step == STEPS

    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    assert run([*words, "--seed", "7"], num_ranks=1, log_dir=tmp_path) == 2  # a finished run of another job
    assert "seed: before 0, now 7" in capfd.readouterr().err
    assert run([*words, "--schedule.learning-rate", "0.5"], num_ranks=1, log_dir=tmp_path) == 2
    assert "schedule.learning_rate: before 0.001, now 0.5" in capfd.readouterr().err
    assert run([*words, "--steps", str(STEPS - 1)], num_ranks=1, log_dir=tmp_path) == 2
    assert f"has {STEPS} steps already" in capfd.readouterr().err
    assert ((run_dir / "DONE").read_text(), (run_dir / "job.yaml").read_text()) == (marker, record)
    assert resumed_steps(run_dir) == [0]  # no second start

    weights = run_dir / "weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert read_done(run_dir) is None  # a marker that does not verify is none

    more = ["--steps", str(STEPS + 4)]
    assert run([*words, *more], num_ranks=1, log_dir=tmp_path) == 2
    assert f"steps: before {STEPS}, now {STEPS + 4}" in capfd.readouterr().err
    assert run([*words, *more, "--extend"], num_ranks=1, log_dir=tmp_path) == 0
    assert f"extended from {STEPS} to {STEPS + 4} steps: step {STEPS} had" in capfd.readouterr().err
    assert resumed_steps(run_dir) == [0, STEPS]
    assert set(losses(run_dir)) == set(range(1, STEPS + 5))


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"step": 16, "weights_sha256": "0"}'])
def test_a_marker_of_other_content_is_none(run_dir: Path, content: str) -> None:
    (run_dir / "weights").mkdir(parents=True)
    (run_dir / "weights" / "model.safetensors").write_bytes(b"x")
    (run_dir / "DONE").write_text(content)
    assert read_done(run_dir) is None


def test_a_torn_checkpoint_is_passed_over(
    digits_url: str, finished_runs: FinishedRuns, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished_runs.get(2, "--engine.zero-stage", "1"), run_dir)
    words = pretrain_words(digits_url, run_dir)
    expected = losses(run_dir)
    newest = next((run_dir / "checkpoints").glob(f"step-{STEPS:08d}/*/rank-00001.safetensors"))
    data = bytearray(newest.read_bytes())
    data[-5] ^= 1
    newest.write_bytes(bytes(data))
    (run_dir / "DONE").unlink()

    assert run(words, num_ranks=2, log_dir=tmp_path) == 0

    assert resumed_steps(run_dir) == [0, STEPS - 4]
    assert losses(run_dir) == expected
    assert f"skipping checkpoint step-{STEPS:08d}" in capfd.readouterr().err


def test_a_change_that_would_be_another_run_is_refused(
    finished_runs: FinishedRuns, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = pretrain_words(finished_runs.url, run_dir)
    continue_from(finished_runs.get(1), run_dir, step=4)
    record = (run_dir / "job.yaml").read_text()
    for change in (("--seed", "1"), ("--model.depth", "1"), ("--data.augment.flip",), ("--global-batch", "96")):
        capfd.readouterr()
        assert run([*words, *change], num_ranks=1, log_dir=tmp_path) == 2
        message = capfd.readouterr().err
        assert change[0].removeprefix("--").split(".")[-1] in message
        assert "another --run-dir" in message
        assert "Traceback" not in message
    assert (run_dir / "job.yaml").read_text() == record  # a refused command leaves the record alone
    assert resumed_steps(run_dir) == [0]  # and does not take the run over
    for line in message.splitlines()[-2:]:  # the commands that keep its weights work as printed
        assert run(shlex.split(line)[1:], num_ranks=1, log_dir=tmp_path) == 0
    (begun,) = (losses(path) for path in tmp_path.rglob("*-from-4"))
    assert len(begun) == (STEPS - 4) * 32 // 96
    assert abs(begun[1] - math.log(10)) > 0.01, "a new head is zero; this one is the run's"


def test_checkpoints_that_can_not_be_used_are_no_reason_to_start_from_scratch(
    finished_runs: FinishedRuns, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = pretrain_words(finished_runs.url, run_dir)
    continue_from(finished_runs.get(1), run_dir, step=8)
    expected = losses(run_dir)
    for manifest in (run_dir / "checkpoints").glob("step-*/*/MANIFEST.json"):
        manifest.write_text(manifest.read_text().replace('"format":4', '"format":9'))
    assert run(words, num_ranks=1, log_dir=tmp_path) == 78
    assert "none of the 2 checkpoints" in capfd.readouterr().err

    shutil.rmtree(run_dir / "checkpoints")
    assert run(words, num_ranks=1, log_dir=tmp_path) == 2
    assert "--checkpoint.url" in capfd.readouterr().err
    assert losses(run_dir) == expected


def test_an_overtaken_process_ends_and_leaves_the_run_to_the_later_one(
    digits_url: str, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = pretrain_words(digits_url, run_dir, "--steps", "400")
    zombie = start(words, num_ranks=1, log_dir=tmp_path)
    assert wait_until(zombie, saving(8), run_dir)
    later = Attempt(token="0002-ffffffff", resumed_from=None, skipped=())
    (run_dir / "checkpoints" / record_path(later.token)).write_bytes(attempt_to_json(later))
    assert zombie.wait() == 78
    assert "a later one, 0002-ffffffff, took over the run" in capfd.readouterr().err
    assert not (run_dir / "DONE").exists()


def test_a_last_save_that_fails_is_no_done(digits_url: str, run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "checkpoints").mkdir(parents=True)
    blocked = run_dir / "checkpoints" / f"step-{STEPS:08d}"
    blocked.write_text("a file where a folder must be")
    words = pretrain_words(digits_url, run_dir)
    assert run(words, num_ranks=1, log_dir=tmp_path) not in (0, 2, 75, 78)
    assert not (run_dir / "DONE").exists()
    blocked.unlink()
    assert run(words, num_ranks=1, log_dir=tmp_path) == 0
    assert set(losses(run_dir)) == set(range(1, STEPS + 1))


@pytest.mark.parametrize(("attempt", "paused"), [("2", 100), pytest.param("1", 0, id="the last start wrote none")])
def test_only_the_heartbeat_of_the_last_start_tells_of_a_pause(tmp_path: Path, attempt: str, paused: float) -> None:
    seconds = dict.fromkeys(ACCOUNTS, 0.0)
    line = {"step": 8, "attempt": "2", "unix_time": time.time() - 100, "seconds": seconds}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(line) + "\n")
    totals = {"startup": 1.0, "paused": 0.0, "total": 1.0}
    for one in ("1", "2"):
        add_start(tmp_path, attempt=one, resumed_from=None, seconds=totals, topology=(1, 1, "cpu"), left=Left())
    ledger, left = Ledger(tmp_path), Left(attempt=attempt, phase="ended", step=8, asked_by="SIGINT")
    _count_pauses(ledger, left, resumed_from=8)
    assert ledger.seconds["paused"] == pytest.approx(paused, abs=5)
    assert ledger.seconds["restarts"] == pytest.approx(100 - paused, abs=5)


@pytest.mark.parametrize(("before", "after", "code"), [(0, 0, 2), (0, 4, 78), (4, 8, 78), (8, 8, 78)])
def test_data_that_cannot_be_right_ends_a_run_for_good_but_before_its_first_step(
    before: int, after: int, code: int
) -> None:
    """8 of 8: the weights of a run without a step left are not finite, say. Slurm must not start it again."""
    loop = SimpleNamespace(step=before, job=SimpleNamespace(steps=8))

    def train() -> None:
        with _retried(cast("Loop", loop)):
            loop.step = after
            refuse_not_finite(torch.tensor([math.nan]), "head.bias for 'run/weights'")

    with pytest.raises((InvalidDataError, WillNotSucceedError), match="not finite") as caught:
        train()
    assert end_of(caught.value).code == code

"""The loop's own promises: held-out scores, the non-finite guard, saves on request."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from jobs import exit_codes
from pipeline.training.loop import Loop
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.watchdog.stopping import StopRequest
from tests.rigs.kills import step_at_least, wait_until
from tests.rigs.training import STEPS, FinishedRuns, pretrain_words, run, start

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stage", [1, 3])
def test_held_out_scores_stand_in_the_line_of_their_step(
    digits_url: str, finished_runs: FinishedRuns, stage: int
) -> None:
    engine = ("--engine.zero-stage", str(stage), "--engine.precision", "fp32")
    evaluation = ("--evaluation.url", digits_url, "--evaluation.every-steps", "8")
    lines = read_metrics(finished_runs.get(2, *engine, *evaluation))
    assert [line["step"] for line in lines if "test_accuracy" in line] == [8, STEPS]
    assert all(0.0 <= line["test_accuracy"] <= 1.0 for line in lines if "test_accuracy" in line)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_past_saving_ends_with_78(
    digits_url: str, tmp_path: Path, precision: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = pretrain_words(
        digits_url, tmp_path / "run", "--schedule.learning-rate", "1e30", "--max-skipped-updates", "2"
    )
    code = run([*words, "--engine.precision", precision, "--clip-norm", "0"], num_ranks=2, log_dir=tmp_path)
    assert code == exit_codes.WILL_NOT_SUCCEED
    message = capfd.readouterr().err
    assert "non-finite" in message
    assert "--schedule.learning-rate" in message
    assert not (tmp_path / "run" / "DONE").exists()


def test_the_save_marker_is_fulfilled_and_removed(digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = pretrain_words(digits_url, run_dir, "--steps", "400", "--checkpoint.every-steps", "1000")
    ranks = start(words, num_ranks=1, log_dir=tmp_path)
    assert wait_until(ranks, step_at_least(2), run_dir)
    (run_dir / "SAVE").touch()
    assert wait_until(ranks, lambda folder: not (folder / "SAVE").exists(), run_dir)
    assert list((run_dir / "checkpoints").glob("step-*/*/MANIFEST.json"))
    (run_dir / "STOP").touch()
    assert ranks.wait() == exit_codes.CONTINUE


@pytest.mark.parametrize(
    ("request_", "best_step", "may_be_skipped"),
    [
        pytest.param(StopRequest.SAVE, 0, True, id="asked for by a marker or the clock"),
        pytest.param(StopRequest.SAVE, 3, False, id="the best so far"),
        pytest.param(StopRequest.SAVE_AND_EXIT, 0, False, id="asked to stop: no further step is needed"),
    ],
)
def test_which_saves_may_be_skipped_while_another_is_written(
    request_: StopRequest, best_step: int, may_be_skipped: bool
) -> None:
    saving, when = mock.Mock(saved_step=3, reporter=None), mock.Mock()
    when.best.is_due = when.is_due = lambda step: step == best_step
    steps = mock.Mock(stream=SimpleNamespace(typed_position=SimpleNamespace(next_step=3)))
    steps.gradients.job.steps = 4
    loop = Loop(steps, guard=mock.Mock(), held_out=mock.Mock(was_given_up=False), saving=saving, when=when)
    with mock.patch.object(Loop, "_train_on", side_effect=[request_, StopRequest.SAVE_AND_EXIT]):
        loop.run()
    assert saving.save.call_args_list[0].kwargs["may_be_skipped"] is may_be_skipped

"""The demo from end to end, shortened: real stages on the embedded S3 server."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jobs.train.demo import DemoJob, compare, run
from shards.errors import UserError
from tests.rigs.listening import POLL_SECONDS, addresses_of


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_demo_ends_with_the_promised_table(tmp_path: Path, num_ranks: int) -> None:
    command = [sys.executable, "-m", "jobs.cli", "demo", "--run-dir", str(tmp_path / "demo")]
    short = ["--steps", "40", "--finetune-steps", "12", "--least-accuracy", "0.2", "--num-ranks", str(num_ranks)]
    said, printed = tmp_path / "stderr", tmp_path / "stdout"
    with said.open("w") as errors, printed.open("w") as output:
        demo = subprocess.Popen([*command, *short], stdout=output, stderr=errors)
        listened_at: set[str] = set()
        pause = threading.Event()
        while demo.poll() is None:
            listened_at |= addresses_of(demo.pid)
            pause.wait(POLL_SECONDS)
    assert demo.returncode == 0, said.read_text()
    assert listened_at == {"127.0.0.1"}, "of the S3 server and of the ranks"
    table = " ".join(printed.read_text().split())
    assert "continued run equals unbroken run" in table
    assert "yes (" in table
    assert "losses bit-identical" in table
    assert "accuracy after fine-tuning" in table
    assert "tensorboard --logdir" in table
    for name in ("unbroken", "pretrain", "finetune"):
        assert (tmp_path / "demo" / name / "DONE").is_file()


def test_somebody_elses_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError):
        run(DemoJob(run_dir=str(tmp_path)), environ={})
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_difference_in_the_last_bit_is_seen(tmp_path: Path) -> None:
    for name, loss in (("unbroken", 0.1), ("continued", 0.1 + 2**-56)):
        attempts = tmp_path / name / "checkpoints" / "attempts"
        attempts.mkdir(parents=True)
        (attempts / "0001-a.json").write_text('{"token": "0001-a", "resumed_from": {"step": 1, "attempt": "0000-z"}}')
        lines = [f'{{"step": {step}, "loss": {loss if step == 3 else 0.5!r}}}\n' for step in (1, 2, 3)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    comparison = compare(tmp_path / "unbroken", tmp_path / "continued", killed_at=2)
    assert (comparison.num_losses, comparison.num_identical, comparison.equal) == (2, 1, False)
    assert compare(tmp_path / "unbroken", tmp_path / "unbroken", killed_at=2).equal

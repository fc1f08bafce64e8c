"""Which addresses commands listen on, read from the kernel while they run: none alone, else loopback."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jobs.cli import main
from jobs.ranks import Ranks
from tests.rigs.forks import ONE_THREAD
from tests.rigs.images import image_bytes
from tests.rigs.listening import POLL_SECONDS, addresses_of, addresses_while, descendants
from tests.rigs.training import FinishedRuns, pretrain_words, start

FEW_STEPS = ("--steps", "4", "--checkpoint.every-steps", "4")
LOOPBACK = "127.0.0.1"


def started(command: list[str]) -> Ranks:
    """A command as a process of its own."""
    return Ranks(processes=(subprocess.Popen(command, env={**os.environ, **ONE_THREAD}),))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training(digits_url: str, tmp_path: Path, num_ranks: int) -> None:
    words = pretrain_words(digits_url, tmp_path / "run", *FEW_STEPS)
    if num_ranks > 1:
        ranks = start(words, num_ranks=num_ranks, log_dir=tmp_path)
    else:  # as users start it: without RANK and WORLD_SIZE
        ranks = started([sys.executable, "-m", "jobs.cli", *words])
    assert addresses_while(ranks) == (set() if num_ranks == 1 else {LOOPBACK})
    assert ranks.wait() == 0


def test_processes_that_patchline_starts(digits_url: str, tmp_path: Path) -> None:
    words = pretrain_words(digits_url, tmp_path / "run", *FEW_STEPS)
    command = started([sys.executable, "-m", "jobs.cli", *words, "--processes", "2"])
    assert addresses_while(command) == {LOOPBACK}
    assert command.wait() == 0


@pytest.mark.long
def test_ranks_of_torchrun(digits_url: str, tmp_path: Path) -> None:
    """Only torchrun itself listens on every interface: its store cannot be told otherwise."""
    words = pretrain_words(digits_url, tmp_path / "run", *FEW_STEPS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = started([*torchrun, "-m", "jobs.cli", *words])
    found: set[str] = set()
    pause = threading.Event()
    while command.poll():
        for rank in descendants(command.processes[0].pid):
            if not is_torchrun(rank):
                found |= addresses_of(rank)
        pause.wait(POLL_SECONDS)
    assert command.wait() == 0
    assert found == {LOOPBACK}


def is_torchrun(pid: int) -> bool:
    """Also a process that torchrun has forked and that is not a rank yet: until then it holds torchrun's sockets."""
    try:
        return b"torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return True


def test_evaluation(finished_runs: FinishedRuns, digits_url: str, tmp_path: Path) -> None:
    weights = finished_runs.get(1) / "weights"
    words = ["evaluate", "--weights", str(weights), "--data.url", digits_url, "--device", "cpu"]
    for num_ranks, expected in ((1, set()), (2, {LOOPBACK})):
        ranks = start([*words, "--run-dir", str(tmp_path / str(num_ranks))], num_ranks=num_ranks, log_dir=tmp_path)
        assert addresses_while(ranks) == expected
        assert ranks.wait() == 0


@pytest.mark.parametrize(
    "stage",
    [
        "pack",
        "verify",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("card", "predict", "export", "import")),
    ],
)
def test_stages_that_do_not_train_listen_nowhere(
    finished_runs: FinishedRuns, digits_url: str, tmp_path: Path, stage: str
) -> None:
    weights, out = str(finished_runs.get(1) / "weights"), str(tmp_path / "out")
    image = tmp_path / "image.jpg"
    image.write_bytes(image_bytes(0))
    words = {
        "pack": ["digits", "--out", out],
        "verify": [digits_url],
        "card": [str(tmp_path / "copy")],
        "predict": [weights, str(image), "--device", "cpu"],
        "export": [weights, "--out", out, "--format", "hugging_face"],
        "import": [out, "--out", f"{out}-imported"],
    }
    if stage == "card":  # it writes its page into the dataset
        shutil.copytree(digits_url, tmp_path / "copy")
    if stage == "import":
        assert main(["export", *words["export"]]) == 0
    command = started([sys.executable, "-m", "jobs.cli", stage, *words[stage]])
    assert addresses_while(command) == set()
    assert command.wait() == 0

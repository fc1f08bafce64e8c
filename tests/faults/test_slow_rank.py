"""A real run in which one rank is slow: it is named once, with its host, and the metrics and the screens show it."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch

from jobs.cli import main
from jobs.monitor.watch import drawn, view_of
from jobs.reports.facts import gather
from jobs.reports.report import summary
from pipeline.data.batches import Batch
from pipeline.training.gradients import Gradients
from pipeline.training.reporting import utilisation
from pipeline.training.reporting.metrics import read_metrics
from tests.rigs.forked_ranks import Fork
from tests.rigs.forks import ONE_THREAD, forks
from tests.rigs.s3 import free_port
from tests.rigs.training import pretrain_words

pytestmark = [pytest.mark.alone, pytest.mark.long]  # it measures times
SLOWER_SECONDS, STEPS = 0.3, 24
HANG = ("--hang.step-seconds", "10", "--steps", str(STEPS), "--engine.precision", "fp32")  # beats come twice a second


def as_rank(words: list[str], environ: dict[str, str], said: Path) -> None:
    """One rank; the second takes longer for its part of every step."""
    with said.open("wb") as errors:
        os.dup2(errors.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    utilisation.SLOW_SECONDS = 1.5
    if environ["RANK"] == "1":
        accumulate = Gradients.accumulate

        def slowly(gradients: Gradients, batch: Batch, *, is_void: bool = False) -> torch.Tensor:
            threading.Event().wait(SLOWER_SECONDS)
            return accumulate(gradients, batch, is_void=is_void)

        Gradients.accumulate = slowly  # type: ignore[assignment,method-assign]
    os._exit(main(words))


@pytest.fixture(scope="module")
def slow_run(digits_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run, beside what its ranks have said."""
    folder = tmp_path_factory.mktemp("slow")
    words = pretrain_words(digits_url, folder / "run", *HANG)
    shared = {**ONE_THREAD, **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(2):
        own = {**shared, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = forks().Process(target=as_rank, args=(words, own, folder / f"said-{rank}"))
        process.start()
        processes.append(Fork(process))
    assert [process.wait(240) for process in processes] == [0, 0], (folder / "said-0").read_text()
    return folder


def test_it_is_named_once(slow_run: Path) -> None:
    who = f"rank 1 on host {os.uname().nodename} is slow: "
    (alarm,) = [json.loads(line) for line in (slow_run / "run" / "guard.jsonl").read_text().splitlines()]
    assert (alarm["kind"], alarm["action"]) == ("slow_rank", "none")
    assert alarm["reason"].startswith(who)
    assert (slow_run / "said-0").read_text().count("is slow: ") == 1
    assert [line["ranks/slow"] for line in read_metrics(slow_run / "run") if "ranks/slow" in line] == [1.0]


def test_the_others_wait_for_it_in_communication(slow_run: Path) -> None:
    lines = read_metrics(slow_run / "run")[3:]
    assert sum(line["ranks/own_step_rank"] for line in lines) > len(lines) / 2
    assert all(line["ranks/own_step"] > SLOWER_SECONDS for line in lines)
    shared = sum(line.get("time/communication", 0.0) for line in lines) / len(lines)
    assert shared > SLOWER_SECONDS / 4, "these parts are rank 0's"


def test_the_screens_name_it(slow_run: Path) -> None:
    view = view_of(slow_run / "run")
    assert view
    screen = " ".join(line.plain for line in drawn(view, columns=100, rows=24))
    for shown in (screen, summary(gather(slow_run / "run"))):
        words = " ".join(shown.split())
        assert "ranks: communication " in words
        assert f"slowest rank 1 on host {os.uname().nodename}: " in words
        assert "slow rank" in words.partition("guard: step ")[2]

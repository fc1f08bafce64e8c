"""A rank that fails alone says why and ends at once, although the teardown of its process group would wait for ever."""

import os
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from jobs import exit_codes
from jobs.cli import main
from pipeline.training.loop import Loop
from shards.errors import WillNotSucceedError
from tests.rigs.forked_ranks import Fork
from tests.rigs.forks import ONE_THREAD, forks
from tests.rigs.s3 import free_port
from tests.rigs.training import pretrain_words

STATED_SECONDS = 60.0  # the teardown would wait for ever
_MARK = "failed-at"


def fail(loop: Loop) -> NoReturn:
    """In place of the loop of one rank."""
    (Path(loop.job.run_dir) / _MARK).write_text(str(time.monotonic()))
    raise WillNotSucceedError("this rank's data cannot be right")


def never(*_: Any, **__: Any) -> NoReturn:
    """In place of NCCL's teardown."""
    while True:
        threading.Event().wait(60)


def as_rank(words: list[str], environ: dict[str, str], said: Path) -> None:
    """One rank; the second fails."""
    with said.open("wb") as errors:
        os.dup2(errors.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    dist.destroy_process_group = never
    if environ["RANK"] == "1":
        Loop.run = fail  # type: ignore[assignment,method-assign]
    code = main(words)
    (said.parent / f"ended-{environ['RANK']}").write_text(f"{code} {time.monotonic()}")
    os._exit(code)  # as jobs.cli.entry does


@pytest.fixture
def two(digits_url: str, tmp_path: Path) -> list[Fork]:
    """Two ranks of a run."""
    words = pretrain_words(digits_url, tmp_path / "run")
    shared = {**ONE_THREAD, **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(2):
        own = {**shared, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = forks().Process(target=as_rank, args=(words, own, tmp_path / f"said-{rank}"))
        process.start()
        processes.append(Fork(process))
    return processes


def test_its_exit_code_and_message_are_there_at_once(two: list[Fork], tmp_path: Path) -> None:
    assert two[1].wait(120) == exit_codes.WILL_NOT_SUCCEED
    failed_at = float((tmp_path / "run" / _MARK).read_text())
    assert two[0].wait(STATED_SECONDS) == exit_codes.CRASH, "and the other one does not wait for it"
    said = (tmp_path / "said-1").read_text()
    assert said.count("error: this rank's data cannot be right") == 1, said
    assert "the exchange with the other ranks failed" in (tmp_path / "said-0").read_text()
    for rank in range(2):
        ended_at = float((tmp_path / f"ended-{rank}").read_text().split()[1])
        assert ended_at - failed_at < STATED_SECONDS, rank
    assert not list((tmp_path / "run").rglob("*.part")), "no file is left half-written"

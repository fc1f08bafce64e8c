"""A rank that never starts: the others end in time, say which one is missing and where, and leave nothing behind."""

import os
import time
from pathlib import Path

import pytest

from jobs import exit_codes
from jobs.cli import main
from tests.rigs.forked_ranks import Fork
from tests.rigs.forks import ONE_THREAD, forks
from tests.rigs.s3 import free_port
from tests.rigs.training import pretrain_words

LIMIT_SECONDS = 10.0
JOIN = ("--hang.join-seconds", str(LIMIT_SECONDS), "--global-batch", "48", "--data.lanes", "12")


def as_rank(words: list[str], environ: dict[str, str], said: Path) -> None:
    """One rank, which writes down when it began to wait and when it ended."""
    with said.open("wb") as errors:
        os.dup2(errors.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    began = time.monotonic()
    code = main(words)
    (said.parent / f"seconds-{environ['RANK']}").write_text(str(time.monotonic() - began))
    os._exit(code)  # as jobs.cli.entry does


def start(words: list[str], tmp_path: Path, *ranks: int) -> list[Fork]:
    """Some of three ranks on this host."""
    shared = {**ONE_THREAD, **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    processes = []
    for rank in ranks:
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = forks().Process(target=as_rank, args=(words, own, tmp_path / f"said-{rank}"))
        process.start()
        processes.append(Fork(process))
    return processes


@pytest.mark.parametrize("missing", [2, 0])
def test_the_others_name_it_and_end_in_time(missing: int, digits_url: str, tmp_path: Path) -> None:
    there = [rank for rank in range(3) if rank != missing]
    processes = start(pretrain_words(digits_url, tmp_path / "run", *JOIN), tmp_path, *there)
    assert [process.wait(120) for process in processes] == [exit_codes.CRASH] * 2
    for rank in there:
        said = (tmp_path / f"said-{rank}").read_text()
        assert f"error: rank {missing} of 3 has not arrived within 10 s" in said, said
        assert said.count("error: ") == 1, said
        assert "; run the same command to continue" in said
        if missing:
            assert f"rank 2 on host {os.uname().nodename}" in said
        assert float((tmp_path / f"seconds-{rank}").read_text()) < 2 * LIMIT_SECONDS
    assert not (tmp_path / "run").exists(), "a run that has not begun leaves nothing"

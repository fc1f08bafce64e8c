"""The writer as a real process: it writes, it is killed, stopped and deserted, and never outlives its trainer."""

import fcntl
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pipeline.checkpoints.writer.client import Writer
from pipeline.checkpoints.writer_messages import BufferFit, SaveResult, Write
from shards.store import open_store
from tests.rigs.forks import forks
from tests.rigs.own_processes import is_alive
from tests.rigs.small_disk import small_disk
from tests.rigs.writers import writers_of

FOLDER, RECORD = "step-00000004/attempt-0001-aaaaaaaa", "attempts/0001-aaaaaaaa.json"
DATA = bytes(range(256)) * 1000
SECONDS = 100.0


@contextmanager
def writer_in(folder: Path, *, silent_seconds: float = SECONDS) -> Iterator[Writer]:
    """A writer with DATA in its buffer, for a run whose attempt is on record."""
    open_store(str(folder)).write(RECORD, b"")
    with closing(Writer(most_silent_seconds=silent_seconds)) as writer:
        os.pwrite(writer.buffer, DATA, 0)
        writer.fit(BufferFit(num_bytes=len(DATA), pieces=(("a", "master", 8, 0, 1),)))
        yield writer


def write_in(folder: Path, save: int = 1) -> Write:
    return Write(save=save, url=str(folder), folder=FOLDER, record=RECORD, rank=0)


def answers_of(writer: Writer) -> list[SaveResult]:
    found: list[SaveResult] = []
    deadline = time.monotonic() + SECONDS
    while writer.is_busy and time.monotonic() < deadline:
        found += writer.answers(seconds=1.0)
    return found


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_the_buffer_is_written_as_it_is(tmp_path: Path) -> None:
    with writer_in(tmp_path) as writer:
        pid = writer.pid
        for save in (1, 2):
            writer.write(write_in(tmp_path, save))
            assert answers_of(writer) == [SaveResult(save=save, what="written")]
        assert writer.pid == pid, "one process for all saves"
        assert not writer.is_busy
    assert (tmp_path / FOLDER / "rank-00000.safetensors").read_bytes() == DATA
    assert not is_alive(pid)


def test_a_writer_that_is_killed_fails_its_save_and_is_replaced(tmp_path: Path) -> None:
    with writer_in(tmp_path) as writer:
        os.kill(writer.pid, signal.SIGSTOP)
        writer.write(write_in(tmp_path))
        assert writer.answers() == []
        first = writer.pid
        os.kill(first, signal.SIGKILL)
        message = f"the checkpoint writer (process {first}) was killed by SIGKILL"
        assert answers_of(writer) == [SaveResult(save=1, what="failed", message=message)]
        writer.write(write_in(tmp_path, 2))
        assert answers_of(writer) == [SaveResult(save=2, what="written")]
        assert writer.pid != first


def test_a_writer_that_died_while_idle_is_replaced_before_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with writer_in(tmp_path) as writer:
        first = writer.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not is_alive(first))
        writer.write(write_in(tmp_path))
        assert answers_of(writer) == [SaveResult(save=1, what="written")]
    assert f"(process {first}) has ended; a new one is started" in caplog.text


def test_a_writer_that_hangs_is_ended(tmp_path: Path) -> None:
    with writer_in(tmp_path, silent_seconds=0.3) as writer:
        first = writer.pid
        os.kill(first, signal.SIGSTOP)
        writer.write(write_in(tmp_path))
        (answer,) = answers_of(writer)
        assert answer.what == "failed"
        assert f"(process {first}) did nothing for" in answer.message
        assert "s, stopped as by SIGSTOP, and was ended" in answer.message
        assert not is_alive(first)


def test_a_trainer_that_asks_waits_for_nothing(tmp_path: Path) -> None:
    """Not even if its writer reads nothing and the pipe is full."""
    pieces = tuple((f"block.{number}.weight", "master", 8, 0, 1) for number in range(20_000))
    with writer_in(tmp_path) as writer:
        os.kill(writer.pid, signal.SIGSTOP)
        for _ in range(3):
            writer.fit(BufferFit(num_bytes=len(DATA), pieces=pieces))
        writer.write(write_in(tmp_path))
        assert writer.answers() == []
        os.kill(writer.pid, signal.SIGCONT)
        assert answers_of(writer) == [SaveResult(save=1, what="written")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_for_the_trainer_do_not_reach_it(tmp_path: Path, number: signal.Signals) -> None:
    """From its first moment on: Slurm sends them to every process of a step."""
    with writer_in(tmp_path) as writer:
        os.kill(writer.pid, number)
        writer.write(write_in(tmp_path))
        os.kill(writer.pid, number)
        assert answers_of(writer) == [SaveResult(save=1, what="written")]
        assert os.getpgid(writer.pid) != os.getpgid(0), "nor a terminal's Ctrl-C"


def test_a_full_disk_fails_the_save(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", num_bytes=64 << 10) as folder, writer_in(folder) as writer:
        writer.write(write_in(folder))
        (answer,) = answers_of(writer)
        assert answer.what == "failed"
        assert answer.message.startswith(f"rank 0: No space left on device at {folder}/{FOLDER}/rank-00000.safetensors")
        assert list(folder.rglob("rank-*")) == []


def test_a_run_that_was_deleted_is_not_made_again(tmp_path: Path) -> None:
    with writer_in(tmp_path) as writer:
        (tmp_path / RECORD).unlink()
        writer.write(write_in(tmp_path))
        (answer,) = answers_of(writer)
        assert (answer.what, "was deleted or moved" in answer.message) == ("overtaken", True)
        assert not (tmp_path / FOLDER).exists()


def test_nonsense_ends_the_writer(tmp_path: Path) -> None:
    """It could do anything: a writer that answers nonsense is not asked again."""
    with writer_in(tmp_path) as writer:
        writer.write(write_in(tmp_path))
        writer._lines.take(b"nonsense ")  # what a stray write into the pipe would leave before the next line
        answers = answers_of(writer)
        assert [answer.what for answer in answers] == ["failed"]
        assert "answered nonsense" in answers[0].message


def desert(how: str, told: Connection) -> None:
    """A trainer that starts a writer, gives it something to write, and ends without a word to it."""
    writer = Writer()
    os.kill(writer.pid, signal.SIGSTOP)  # it is in the middle of something, and would not notice the end of a pipe
    told.send(writer.pid)
    if how == "exit":
        os._exit(75)
    if how == "error":
        sys.stderr.close()
        raise SystemExit(1)
    signal.pause()


@pytest.mark.parametrize("how", ["exit", "error", "SIGKILL"])
def test_no_writer_outlives_its_trainer(how: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    trainer = forks().Process(target=desert, args=(how, theirs))
    trainer.start()
    pid = ours.recv()
    if how == "SIGKILL":
        assert writers_of(trainer.pid or 0) == [pid]
        trainer.kill()
    trainer.join()
    wait_until(lambda: not is_alive(pid))


def in_a_large_buffer(writer: Writer, num_bytes: int) -> None:
    """The buffer takes a while to write."""
    os.ftruncate(writer.buffer, num_bytes)
    writer.fit(BufferFit(num_bytes=num_bytes, pieces=(("a", "master", 8, 0, 1),)))


def test_what_a_killed_writer_had_begun_is_deleted_by_the_next_save(tmp_path: Path) -> None:
    """It may be gigabytes, which the disk may not have again."""
    with writer_in(tmp_path) as writer:
        in_a_large_buffer(writer, 1 << 30)  # two seconds, of which the kill needs a few milliseconds
        writer.write(write_in(tmp_path))
        wait_until(lambda: bool(list(tmp_path.rglob(".tmp-rank-00000.safetensors.*"))))
        os.kill(writer.pid, signal.SIGKILL)
        assert [answer.what for answer in answers_of(writer)] == ["failed"]
        assert list(tmp_path.rglob(".tmp-*"))
        in_a_large_buffer(writer, len(DATA))
        following = replace(write_in(tmp_path, 2), folder="step-00000008/attempt-0001-aaaaaaaa", failed=FOLDER)
        writer.write(following)
        assert answers_of(writer) == [SaveResult(save=2, what="written")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempts", "step-00000008"]


def test_a_trainer_that_does_not_listen_holds_up_no_writer(tmp_path: Path) -> None:
    """It evaluates for minutes. What the writer says of its progress must not fill the pipe."""
    with writer_in(tmp_path) as writer:
        fcntl.fcntl(writer._answers, fcntl.F_SETPIPE_SZ, 4096)  # instead of a state of gigabytes
        in_a_large_buffer(writer, 256 << 20)
        writer.write(write_in(tmp_path))
        wait_until((tmp_path / FOLDER / "rank-00000.json").exists)
        assert answers_of(writer) == [SaveResult(save=1, what="written")]


def test_a_trainer_may_have_many_files_open(tmp_path: Path) -> None:
    """select(2) takes no descriptor above 1023, and a process with many connections has them."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with writer_in(tmp_path) as writer:
            writer.write(write_in(tmp_path))
            assert answers_of(writer) == [SaveResult(save=1, what="written")]
    finally:
        for other in others:
            os.close(other)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_message_that_every_save_repeats_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as that old checkpoints must not be deleted."""
    with writer_in(tmp_path) as writer:
        for message in ("a", "a", "b", "a"):
            writer._take(SaveResult(save=1, what="said", message=message), [])
    assert [record.message for record in caplog.records] == ["a", "b", "a"]

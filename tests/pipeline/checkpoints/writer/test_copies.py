"""Saves run in the background if every host has room for a copy of its ranks' state, and inline otherwise.

The buffer holds exactly the rank file, and is reused. Inline, the same work is done while the caller waits, tensor by
tensor. The log says which of the two was chosen, with numbers.
"""

import errno
import io
import logging
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
import torch

from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.config import CheckpointConfig
from pipeline.checkpoints.rank_file_out import read_report
from pipeline.checkpoints.saves import RankFile, lay_out
from pipeline.checkpoints.writer import copies
from pipeline.checkpoints.writer.client import Writer
from pipeline.checkpoints.writer.copies import BackgroundWriter, Copies, HostBuffer, InlineWriter, Room, choose_writer
from pipeline.checkpoints.writer_messages import SaveResult
from pipeline.ranks.world import World
from shards.errors import UserError
from shards.store import open_store
from tests.pipeline.checkpoints.writer.test_client import FOLDER, RECORD, SECONDS, write_in
from tests.rigs.processes import run_ranks

WHY = (
    "the ranks on the host of rank 1 need 4.0 MB for one copy of their state, but 4.1 MB of memory are available "
    "there, of which they may take 90%"
)


@pytest.fixture
def descriptor() -> Iterator[int]:
    number = os.memfd_create("test")
    yield number
    os.close(number)


def rank_file(*lengths: int, moment: str = "exp_avg") -> RankFile:
    fragments = []
    for number, length in enumerate(lengths):
        slots = {"master": torch.rand(length), moment: torch.rand(length)}
        fragments.append(Fragment(name=f"t{number}", start=0, length=length, slots=slots))
    return lay_out(fragments)


def test_it_holds_the_file_byte_by_byte(descriptor: int) -> None:
    buffer = HostBuffer(descriptor, torch.device("cpu"))
    for file, is_new in (
        (rank_file(5, 70_000), True),
        (rank_file(5, 70_000), False),
        (rank_file(70_000, 5), True),
        (rank_file(5, 70_000, moment="exp_agv"), True),
        (rank_file(3), True),
        (rank_file(90_000), True),
        (rank_file(), True),
    ):
        copies, has_new_head = buffer.fill(file)
        copies.wait()
        assert copies.is_done()
        assert has_new_head is is_new
        assert os.fstat(descriptor).st_size == buffer.num_bytes == file.head.num_bytes
        assert os.pread(descriptor, buffer.num_bytes, 0) == b"".join(file.parts())


def test_the_memory_is_taken_at_once(descriptor: int) -> None:
    """Not page by page while training waits for the first copy."""
    buffer = HostBuffer(descriptor, torch.device("cpu"))
    buffer.fit(1 << 20)
    assert os.fstat(descriptor).st_blocks * 512 == 1 << 20


def test_a_buffer_that_cannot_be_mapped_can_be_fitted_again(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = HostBuffer(descriptor, torch.device("cpu"))
    with monkeypatch.context() as patched:
        patched.setattr("mmap.mmap", mock.Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")))
        with pytest.raises(OSError, match="Cannot allocate"):
            buffer.fit(200)
    buffer.fit(100)
    assert (buffer.num_bytes, os.fstat(descriptor).st_size) == (100, 100)


class LateCopies(Copies):
    """Copies of a GPU that the test ends. `calls`: what was asked of them."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = False
        self.calls: list[str] = []

    def is_done(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        self.calls.append("wait")
        self.is_over = True

    def order(self) -> None:
        self.calls.append("order")


class LateBuffer(HostBuffer):
    """A buffer whose copies end when the test says so."""

    copies = LateCopies()

    def fill(self, file: RankFile) -> tuple[LateCopies, bool]:
        _, is_new = super().fill(file)
        self.copies = LateCopies()
        return self.copies, is_new


def background_writer(buffer_kind: type[HostBuffer] = HostBuffer) -> tuple[BackgroundWriter, Writer, HostBuffer]:
    writer = Writer(most_silent_seconds=SECONDS)
    buffer = buffer_kind(writer.buffer, torch.device("cpu"))
    return BackgroundWriter(writer, buffer), writer, buffer


def answers_of(writer: BackgroundWriter) -> list[SaveResult]:
    found: list[SaveResult] = []
    deadline = time.monotonic() + SECONDS
    while writer.is_busy and time.monotonic() < deadline:
        found += writer.answers(seconds=1.0)
    return found


def test_what_is_written_is_the_state_at_the_save(tmp_path: Path) -> None:
    """Training changes it at once; the file and its report are those of a save that is waited for."""
    for name in ("background", "inline"):
        open_store(str(tmp_path / name)).write(RECORD, b"")
    file = rank_file(5, 70_000)
    inline = InlineWriter(open_store(str(tmp_path / "inline")))
    inline.write(write_in(tmp_path / "inline"), file)
    assert inline.answers()[-1].what == "written"
    writer, process, _ = background_writer()
    try:
        os.kill(process.pid, signal.SIGSTOP)
        writer.write(write_in(tmp_path / "background"), file)
        for view in file.views:
            view.zero_()
        os.kill(process.pid, signal.SIGCONT)
        assert [answer.what for answer in answers_of(writer)] == ["written"]
    finally:
        writer.close()
    for name in ("rank-00000.safetensors", "rank-00000.json"):
        first, second = ((tmp_path / kind / FOLDER / name).read_bytes() for kind in ("inline", "background"))
        assert first == second
    assert read_report(open_store(str(tmp_path / "inline")), FOLDER, rank=0, save=1).pieces == file.pieces


def test_the_writer_begins_when_the_copies_have_ended(tmp_path: Path) -> None:
    """And the next update comes after them on the device, without the host waiting."""
    open_store(str(tmp_path)).write(RECORD, b"")
    writer, process, buffer = background_writer(LateBuffer)
    assert isinstance(buffer, LateBuffer)
    try:
        writer.write(write_in(tmp_path), rank_file(5))
        writer.order_update()
        assert buffer.copies.calls == ["order"]
        assert writer.answers() == []
        assert (writer.is_busy, process.is_busy) == (True, False)
        buffer.copies.is_over = True
        assert writer.answers() == [] or not process.is_busy
        writer.order_update()
        assert [answer.what for answer in answers_of(writer)] in (["written"], [])
        assert buffer.copies.calls in (["order", "order"], ["order"])
        writer.write(write_in(tmp_path, 2), rank_file(5))
        assert [answer.what for answer in answers_of(writer)] == ["written"]
        assert buffer.copies.calls == ["wait"], "whoever waits for the save waits for the copies"
    finally:
        writer.close()


def test_a_writer_that_cannot_start_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, process, _ = background_writer()
    try:
        monkeypatch.setattr("sys.executable", str(tmp_path / "no python"))
        process._end()
        writer.write(write_in(tmp_path), rank_file(5))
        (answer,) = writer.answers()
        assert answer.what == "failed"
        assert answer.message.startswith("rank 0: the checkpoint writer does not start: ")
    finally:
        writer.close()


def test_a_writer_that_finds_no_descriptors_fails_the_save(tmp_path: Path) -> None:
    writer, process, buffer = background_writer()
    buffer.fit(rank_file(5).head.num_bytes)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        process._end()
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        writer.write(write_in(tmp_path), rank_file(5))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        (answer,) = writer.answers()
        assert answer.message == "rank 0: the checkpoint writer does not start: [Errno 24] Too many open files"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        writer.close()


def test_a_write_is_over_when_it_returns(tmp_path: Path) -> None:
    store, file = open_store(str(tmp_path)), rank_file(5, 70_000)
    store.write(RECORD, b"")
    writer = InlineWriter(store)
    writer.write(write_in(tmp_path), file)
    assert [answer for answer in writer.answers() if answer.what != "progress"] == [SaveResult(save=1, what="written")]
    assert not writer.is_busy
    assert (tmp_path / FOLDER / "rank-00000.safetensors").read_bytes() == b"".join(file.parts())
    assert torch.equal(
        file.views[0], torch.frombuffer(bytearray(next(iter(list(file.parts())[1:]))), dtype=torch.float32)
    )


def test_a_write_that_fails_says_so(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.write(RECORD, b"")
    (tmp_path / FOLDER.partition("/")[0]).write_text("a file where a folder must be")
    writer = InlineWriter(store)
    writer.write(write_in(tmp_path), rank_file(5))
    (answer,) = [answer for answer in writer.answers() if answer.what != "progress"]
    assert (answer.what, answer.message.startswith(f"rank 0: cannot write {tmp_path}/step")) == ("failed", True)


def chosen(
    world: World,
    folder: Path,
    available: tuple[int, int],
    asynchronous: Literal["auto", "on", "off"],
    training: int = 0,
) -> tuple[str, str, bool]:
    """(what was chosen or refused, the log, whether a writer is left) for 2 MB a rank, of two on one host."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("pipeline").addHandler(handler)
    logging.getLogger("pipeline").setLevel(logging.INFO)
    config, writer = CheckpointConfig(asynchronous=asynchronous), None if asynchronous == "off" else Writer()
    with mock.patch.object(copies, "available_bytes", return_value=available[world.rank]):
        try:
            found = choose_writer(
                config, writer, open_store(str(folder)), world, num_bytes=2_000_000, training_bytes=training
            )
            name = type(found).__name__
            found.close()
        except UserError as error:
            name = str(error)
    return name, said.getvalue(), bool(writer and writer.pid)


def test_with_room_on_every_host(tmp_path: Path) -> None:
    first, second = run_ranks(chosen, tmp_path, (9_000_000, 9_000_000), "auto", num_ranks=2)
    assert first == ("BackgroundWriter", "asynchronous checkpoints: 2.0 MB of host memory per rank\n", False)
    assert second == ("BackgroundWriter", "", False)


def test_without_room_on_one_host_no_rank_saves_in_the_background(tmp_path: Path) -> None:
    first, second = run_ranks(chosen, tmp_path, (9_000_000, 4_100_000), "auto", num_ranks=2)
    assert first == ("InlineWriter", f"checkpoints are written while training waits: {WHY}\n", False)
    assert second == ("InlineWriter", "", False)


def test_the_room_that_training_needs_is_not_given_away(tmp_path: Path) -> None:
    first, _ = run_ranks(chosen, tmp_path, (9_000_000, 9_000_000), "auto", 3_000_000, num_ranks=2)
    why = WHY.replace("rank 1", "rank 0").replace("4.1 MB", "9.0 MB").replace("state,", "state and 6.0 MB to train,")
    assert first == ("InlineWriter", f"checkpoints are written while training waits: {why}\n", False)


def test_a_job_that_requires_room_is_refused(tmp_path: Path) -> None:
    found = run_ranks(chosen, tmp_path, (9_000_000, 4_100_000), "on", num_ranks=2)
    todo = "give --checkpoint.asynchronous auto or off, or start fewer ranks per host"
    assert found == [(f'checkpoint.asynchronous is "on", but {WHY}; {todo}', "", False)] * 2


def test_off_starts_nothing(tmp_path: Path) -> None:
    assert run_ranks(chosen, tmp_path, (0,), "off", num_ranks=1) == [("InlineWriter", "", False)]


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (
            Room(rank=8, needed_bytes=14_400_000_000, available_bytes=15_000_000_000),
            "need 14.4 GB for one copy",
        ),
        (Room(rank=8, needed_bytes=1, available_bytes=9, fault="it could not be taken: full"), "but it could not be"),
    ],
)
def test_the_words_have_numbers(room: Room, words: str) -> None:
    assert not room.is_enough
    assert room.words().startswith("the ranks on the host of rank 8 need ")
    assert words in room.words()

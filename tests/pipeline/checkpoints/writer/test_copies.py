"""A save beside training: the copy first, then the writer, which never sees a state that training has changed.

Without a process, the same work is done while the caller waits, tensor by tensor.
"""

import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

from pipeline.checkpoints.fragments import RankFile
from pipeline.checkpoints.rank_file_out import read_report
from pipeline.checkpoints.writer.client import Writer
from pipeline.checkpoints.writer.copies import BackgroundWriter, HostBuffer, InlineWriter
from pipeline.checkpoints.writer_messages import SaveResult
from shards.store import open_store
from tests.pipeline.checkpoints.writer.test_client import FOLDER, RECORD, SECONDS, write_in
from tests.pipeline.checkpoints.writer.test_host_buffer import rank_file


class LateCopies:
    """Copies of a GPU that the test ends. `calls`: what was asked of them."""

    def __init__(self) -> None:
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

"""Without a process, the same work is done while the caller waits, tensor by tensor."""

from pathlib import Path

import torch

from pipeline.checkpoints.inline_writer import InlineWriter
from pipeline.checkpoints.writer_messages import Answer
from shards.store import open_store
from tests.pipeline.checkpoints.test_host_buffer import rank_file
from tests.pipeline.checkpoints.test_writer import FOLDER, RECORD, write_in


def test_a_write_is_over_when_it_returns(tmp_path: Path) -> None:
    store, file = open_store(str(tmp_path)), rank_file(5, 70_000)
    store.write(RECORD, b"")
    writer = InlineWriter(store)
    writer.write(write_in(tmp_path), file)
    assert [answer for answer in writer.answers() if answer.what != "progress"] == [Answer(save=1, what="written")]
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

"""What trainer and writer say is checked on both sides."""

import pytest

from pipeline.checkpoints import writer_messages
from pipeline.checkpoints.config import Retention
from pipeline.checkpoints.writer_messages import (
    BufferFit,
    Command,
    CommitOrder,
    Hurry,
    LineSplitter,
    SaveResult,
    Write,
    from_line,
    to_line,
)

WRITE = Write(save=1, url="/runs/a", folder="step-00000004/attempt-0001-a", record="attempts/0001-a.json", rank=3)
COMMIT = CommitOrder(
    save=1,
    url="s3://bucket/a",
    draft="{}",
    attempt="{}",
    num_ranks=2,
    run_dir="/runs/a",
    retention=Retention(keep_newest=2, rewind_steps=4, folders=("step-00000001/attempt-0001-a",)),
)


@pytest.mark.parametrize(
    "message",
    [
        Hurry(save=3),
        BufferFit(num_bytes=64, pieces=(("head.weight", "master", 8, 0, 14),)),
        WRITE,
        COMMIT,
        SaveResult(save=1, what="failed", message="no space left\non the device é"),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: Command | SaveResult) -> None:
    line = to_line(message)
    assert line.count(b"\n") == 1
    assert from_line(line) == message


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_whole_however_they_arrive(size: int) -> None:
    data, lines, found = b"a\nbcd\n\nlast", LineSplitter(), []
    for first in range(0, len(data), size):
        found += lines.take(data[first : first + size])
    assert found == [b"a", b"bcd", b""]
    assert lines.take(b"\n") == [b"last"]


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_messages, "MOST_LINE_BYTES", 10)
    lines = LineSplitter()
    lines.take(b"123456")
    with pytest.raises(ValueError, match="more than 10 bytes"):
        lines.take(b"789012")
    with pytest.raises(ValueError, match="allowed: 10"):
        to_line(WRITE)

"""The buffer holds exactly the rank file, and is used again and again."""

import errno
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from pipeline.checkpoints.fragments import Fragment, RankFile, lay_out
from pipeline.checkpoints.writer.copies import HostBuffer


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

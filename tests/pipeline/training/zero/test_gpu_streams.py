"""Streams: a read-back waits for its own values only, and a GPU's streams call what they say they call."""

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from pipeline.training.zero.device_batches import CudaStreams, HostStreams, read_back, streams_of
from tests.rigs.lazy_streams import LazyStreams


def test_reading_back_waits_for_the_values_and_for_nothing_launched_after_them() -> None:
    streams, values, later = LazyStreams(), torch.zeros(3, dtype=torch.float64), list[str]()
    streams.launch(lambda: values.copy_(torch.tensor([1.0, 2.0, 3.0])), "step 1")
    first = read_back(values, streams)
    streams.launch(lambda: later.append("step 2"), "step 2")
    second = read_back(values * 0, streams)
    assert (first.values(), later) == ([1.0, 2.0, 3.0], []), "the next step still computes"
    assert (second.values(), later) == ([0.0, 0.0, 0.0], ["step 2"])


def test_values_are_kept_until_they_are_read() -> None:
    """Two steps are under way when the first is read: each has a place of its own on the host."""
    for streams in (HostStreams(), LazyStreams()):
        found = [read_back(torch.full((2,), float(step)), streams) for step in range(3)]
        assert [one.values() for one in found] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """torch.cuda, recorded."""
    found = MagicMock()
    found.Event = type("Event", (MagicMock,), {})
    monkeypatch.setattr(torch, "cuda", found)
    return found


def test_a_gpus_copies_have_a_stream_of_their_own(cuda: MagicMock) -> None:
    device = torch.device("cuda", 1)
    streams = streams_of(device)
    assert isinstance(streams, CudaStreams)
    cuda.Stream.assert_called_once_with(device)
    with streams.copying():
        cuda.stream.assert_called_once_with(cuda.Stream.return_value)
    event: Any = streams.record()
    event.record.assert_called_once_with(cuda.current_stream.return_value)
    assert event.blocking is True, "a waiting host spins otherwise"
    streams.wait(event)
    cuda.current_stream.return_value.wait_event.assert_called_once_with(event)
    cuda.synchronize.assert_not_called()
    with pytest.raises(TypeError, match="is no event of a GPU"):
        streams.wait(HostStreams().record())


def test_copies_do_not_hold_up_the_host(cuda: MagicMock) -> None:
    streams, target, source = CudaStreams(torch.device("cuda")), MagicMock(), MagicMock()
    streams.copy(target, source)
    target.copy_.assert_called_once_with(source, non_blocking=True)
    assert streams.pinned(source) is source.pin_memory.return_value


def test_a_cpu_has_done_its_work_when_it_is_launched() -> None:
    streams, target = streams_of(torch.device("cpu")), torch.zeros(2)
    assert isinstance(streams, HostStreams)
    with streams.copying():
        streams.copy(target, torch.ones(2))
        event = streams.record()
    streams.wait(event)
    event.synchronize()
    assert target.tolist() == [1.0, 1.0]
    assert streams.pinned(target) is target
    assert streams.empty_like(target).shape == target.shape

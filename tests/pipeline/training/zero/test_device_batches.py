"""No event is missing: however late the device does its work, a step sees the pixels of its own batch.

A read-back waits for its own values only, and a GPU's streams call what they say they call.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from pipeline.data.batches import COUNT_NAMES, NUM_VALID_REQUESTS, Batch
from pipeline.data.config import DataConfig
from pipeline.data.stream import train_batches
from pipeline.ranks.streams import CudaStreams, HostStreams, read_back, streams_of
from pipeline.training.zero import device_batches
from pipeline.training.zero.device_batches import DeviceBatches, HostBatches, batches_on
from tests.rigs.lazy_streams import COMPUTE, COPIES, LazyStreams
from tests.rigs.positions import position_at

NUM_STEPS, SHAPE = 9, (4, 2, 2, 3)
EXPECTED = [{step} for step in range(NUM_STEPS) for _ in range(2)]
READY = [
    pytest.param(lambda _: True, id="always ready"),
    pytest.param(lambda _: False, id="never ready"),
    pytest.param(lambda step: step % 3 == 0, id="sometimes ready"),
]


class _Loader:
    """Batches of one value each, in buffers that are refilled as early as the loader may: on the second request."""

    def __init__(self, *, is_ready: Callable[[int], bool]) -> None:
        self._buffers = [torch.zeros(SHAPE, dtype=torch.uint8) for _ in range(NUM_VALID_REQUESTS)]
        self._next, self._is_ready = 0, is_ready

    @property
    def is_ready(self) -> bool:
        return self._is_ready(self._next)

    @property
    def typed_position(self) -> Any:
        return position_at(self._next)

    def counts(self) -> dict[str, float]:
        return dict.fromkeys(COUNT_NAMES, 3.0)

    def __next__(self) -> Batch:
        step, self._next = self._next, self._next + 1
        images = self._buffers[step % len(self._buffers)].fill_(step)
        labels = torch.full((SHAPE[0], 1 + step % 3), step)
        ids = torch.full((SHAPE[0],), step)
        return Batch(step=step, images=images, labels=labels, sample_ids=ids, datasets=torch.zeros_like(ids))


def seen_by_steps(streams: LazyStreams, *, is_ready: Callable[[int], bool] = lambda _: True) -> list[set[int]]:
    """The values that each step's computation finds in its images and labels."""
    batches, seen = DeviceBatches(_Loader(is_ready=is_ready), streams), list[set[int]]()  # type: ignore[arg-type]

    def look(images: torch.Tensor, labels: torch.Tensor) -> None:
        seen.append({*images.flatten().tolist(), *labels.flatten().tolist()})

    for step in range(NUM_STEPS):
        batch = next(batches)
        assert (batch.step, batches.typed_position) == (step, position_at(step + 1))
        assert set(batch.sample_ids.tolist()) == {step}
        # Two micro-batches, each with half of the images.
        for half in (slice(0, 2), slice(2, 4)):
            streams.launch(partial(look, batch.images[half], batch.labels[half]), "uses")
        batches.launched()
        assert batches.typed_position == position_at(step + 1), "a batch copied ahead is not yet taken"
    streams.finish()
    return seen


@pytest.mark.parametrize("is_ready", READY)
@pytest.mark.parametrize("eager", ["", COMPUTE, COPIES])
def test_a_step_sees_its_own_batch(eager: str, is_ready: Callable[[int], bool]) -> None:
    assert seen_by_steps(LazyStreams(eager), is_ready=is_ready) == EXPECTED


class _WithoutWaits(LazyStreams):
    """The computation does not wait for copies."""

    def wait(self, event: Any) -> None:
        if self._current == COPIES:
            super().wait(event)


class _WithoutGuard(LazyStreams):
    """Copies do not wait for the last use of their buffer."""

    def wait(self, event: Any) -> None:
        if self._current == COMPUTE:
            super().wait(event)


class _WithoutHost(LazyStreams):
    """The host waits for nothing."""

    def record(self) -> Any:
        event = super().record()
        event.synchronize = lambda: None  # type: ignore[method-assign]
        return event


@pytest.mark.parametrize(
    ("streams", "eager"), [(_WithoutWaits, COMPUTE), (_WithoutGuard, COPIES), (_WithoutHost, COMPUTE)]
)
def test_every_kind_of_event_is_needed(streams: type[LazyStreams], eager: str) -> None:
    """Without any one of the three, a step sees another batch's pixels: the test above can fail."""
    assert seen_by_steps(streams(eager)) != EXPECTED


def test_the_next_batch_is_copied_while_a_step_computes() -> None:
    streams = LazyStreams()
    seen_by_steps(streams)
    uses = [place for place, said in enumerate(streams.log) if said == "uses"]
    copies = [place for place, said in enumerate(streams.log) if said == "copies copies"]
    for step in range(1, NUM_STEPS):
        assert uses[2 * step - 1] < copies[2 * step] < uses[2 * step], "behind the last use of the step before"
    # The host waits for copies only, never for a computation, and for each of them two requests later.
    waits = [int(said.split()[-1]) for said in streams.log if said.startswith("the host waits")]
    recorded = [int(said.split()[-1]) for said in streams.log if said.startswith("copies records")]
    assert waits == recorded[: len(waits)]
    assert len(waits) == len(recorded) - NUM_VALID_REQUESTS


def test_two_buffers_are_all_that_the_device_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = DeviceBatches(_Loader(is_ready=lambda _: True), LazyStreams())  # type: ignore[arg-type]
    places = set()
    for _ in range(NUM_STEPS):
        places.add(next(batches).images.data_ptr())
        batches.launched()
    assert len(places) == 2
    monkeypatch.setattr(device_batches, "_NUM_BUFFERS", 1)
    assert seen_by_steps(LazyStreams(COPIES)) == EXPECTED, "with one, copies wait, and nothing is wrong"


def _keep_largest(images: torch.Tensor, into: list[int]) -> None:
    into.append(int(images.max()))


def _keep_copy(images: torch.Tensor, into: list[torch.Tensor]) -> None:
    into.append(images.clone())


def test_a_batch_that_was_not_used_may_be_overwritten_no_sooner() -> None:
    """The first images are shown before a step is launched, and another batch may be taken without one."""
    streams = LazyStreams(COPIES)
    batches, seen = DeviceBatches(_Loader(is_ready=lambda _: True), streams), list[int]()  # type: ignore[arg-type]
    for _ in range(NUM_STEPS):
        streams.launch(partial(_keep_largest, next(batches).images, seen), "uses")
    streams.finish()
    assert seen == list(range(NUM_STEPS))


def test_on_a_cpu_nothing_is_copied() -> None:
    loader = _Loader(is_ready=lambda _: True)
    batches = batches_on(loader, HostStreams())  # type: ignore[arg-type]
    assert isinstance(batches, HostBatches)
    assert next(batches).images is loader._buffers[0]
    batches.launched()
    assert (batches.typed_position, batches.counts()) == (position_at(1), dict.fromkeys(COUNT_NAMES, 3.0))


@pytest.mark.parametrize("steps_ahead", [1, 3])
def test_the_real_loaders_batches_arrive_as_they_are(digits_url: str, tmp_path: Path, steps_ahead: int) -> None:
    """However late the copies are, its threads never write into a buffer that is still being copied."""
    config = DataConfig(url=digits_url, lanes=8, window_blocks=2, steps_ahead=steps_ahead, num_threads=2)
    with train_batches(global_batch=8, image_size=16, config=config, quarantine=tmp_path / "a") as stream:
        expected = [replace(batch, images=batch.images.clone()) for batch, _ in zip(stream, range(8), strict=False)]
    streams, seen = LazyStreams(COMPUTE), list[torch.Tensor]()
    with train_batches(global_batch=8, image_size=16, config=config, quarantine=tmp_path / "b") as stream:
        batches = batches_on(stream, streams)
        for own in expected:
            batch = next(batches)
            streams.launch(partial(_keep_copy, batch.images, seen), "uses")
            batches.launched()
            assert batches.typed_position.next_step == own.step + 1
        streams.finish()
    assert all(torch.equal(found, own.images) for found, own in zip(seen, expected, strict=True))


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

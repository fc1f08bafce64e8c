"""The benchmark of the interpreter's time: threads that wait instead of decoding, and what is counted of them."""

from pathlib import Path
from unittest import mock

import pytest

from benchmarks import interpreter
from benchmarks.interpreter import FIGURE, KINDS, MANY_ARMS, MANY_FIGURES, RATE
from benchmarks.rounds import summary
from pipeline.data.transform import crop_decoder

LIMIT = interpreter.NUM_THREADS / interpreter.IMAGE_SECONDS  # images per second, if nothing but the wait took time


def test_waiting_threads_are_measured_with_both_sizes_of_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = crop_decoder()
    if decoder is None:
        pytest.skip("the crop decoder is not built")
    for name, value in (("NUM_IMAGES", 512), ("WARM_UP", 2), ("MANY_SECONDS", 0.3), ("LANE_SAMPLES", 16)):
        monkeypatch.setattr(interpreter, name, value)
    url = interpreter.packed(tmp_path)
    calls: list[int] = []

    def wait(samples: int, count: int, settings: object, out: int, are_done: int) -> None:
        calls.append(count)
        interpreter.wait(samples, count, settings, out, are_done)

    one, chunks = list(MANY_ARMS)[:2]
    with mock.patch.object(decoder._library, "sample_views_fill", wait):
        before = interpreter.many_threads(url, one)
        assert set(calls) == {1}
        calls.clear()
        now = interpreter.many_threads(url, chunks)
        assert min(calls[:10]) > 1
    for found in (before, now):
        assert 0 < found[RATE] <= LIMIT * 1.2, "threads that wait cannot be faster than their wait"
        assert sum(found[f"{kind}_us"] for kind in KINDS) == pytest.approx(found[FIGURE], rel=0.5)
        assert found["plans_on_a_core"] <= found["plans"] <= 1.1
    arms = summary([{one: before, chunks: now}], MANY_FIGURES)
    for arm in arms.values():
        arm["most_images_per_second"] = 1
    assert len(interpreter.many_table(arms).splitlines()) == 4

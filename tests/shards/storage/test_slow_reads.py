"""Which read is slow, and how many are made at once: fewer when the storage says so, more while all goes well."""

import pytest

from shards.storage.ranges import (
    CUT_SECONDS,
    KNOWN_READS,
    LEAST_SECONDS,
    REMEMBERED,
    REQUEST_BYTES,
    AdaptiveLimit,
    LatencyTracker,
)

MIB = 1 << 20


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_limit_is_cut_at_most_once_a_second_and_never_below_one() -> None:
    clock = Clock()
    limit = AdaptiveLimit(8, clock=clock)
    assert (limit.value, limit.was_just_cut()) == (8, False)
    limit.throttled()
    limit.throttled()
    assert (limit.value, limit.was_just_cut()) == (5, True)
    seen = []
    for _ in range(8):
        clock.now += 1.1 * CUT_SECONDS
        assert not limit.was_just_cut()
        limit.throttled()
        seen.append(limit.value)
    assert seen == [3, 2, 1, 1, 1, 1, 1, 1]


def test_the_limit_grows_by_one_for_as_many_successes_as_it_has_reads() -> None:
    limit = AdaptiveLimit(8)
    limit.throttled()
    for _ in range(6):
        limit.ended(is_success=True)
    assert limit.value == 6
    for _ in range(100):
        limit.ended(is_success=False)
    assert limit.value == 6
    for _ in range(100):
        limit.ended(is_success=True)
    assert limit.value == 8


def test_a_success_after_a_throttled_request_is_no_reason_to_grow() -> None:
    limit = AdaptiveLimit(4)
    limit.throttled()
    before = limit._value
    limit.ended(is_success=True)
    assert limit._value == before
    limit.ended(is_success=True)
    assert limit._value > before


def tracker_of(seconds: list[float], num_bytes: int) -> LatencyTracker:
    latency = LatencyTracker()
    for each in seconds:
        latency.add(num_bytes, each)
    return latency


def test_nothing_is_slow_too_early() -> None:
    assert LatencyTracker().slow_after(10 * MIB) > 2.0
    assert tracker_of([0.001] * (KNOWN_READS - 1), MIB).slow_after(MIB) > 2.0
    assert tracker_of([0.001] * KNOWN_READS, MIB).slow_after(MIB) == LEAST_SECONDS


def test_slow_is_the_slowest_of_a_hundred() -> None:
    latency = tracker_of([1.0] * 99 + [3.0], 8 * MIB)
    assert latency.slow_after(8 * MIB) == pytest.approx(3.0)
    assert tracker_of([1.0] * 199 + [3.0], 8 * MIB).slow_after(8 * MIB) == pytest.approx(1.0)


def test_sizes_are_taken_into_account() -> None:
    latency = tracker_of([1.0] * 100, 7 * MIB)
    assert latency.slow_after(15 * MIB) == pytest.approx(2.0)
    assert latency.slow_after(0) == pytest.approx(max(LEAST_SECONDS, REQUEST_BYTES / (8 * MIB)))


def test_old_reads_are_forgotten() -> None:
    latency = tracker_of([9.0] * 50 + [1.0] * REMEMBERED, MIB)
    assert latency.slow_after(MIB) == pytest.approx(1.0)

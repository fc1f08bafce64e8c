"""Which read is slow."""

import pytest

from shards.storage.latency import KNOWN_READS, LEAST_SECONDS, REMEMBERED, REQUEST_BYTES, LatencyTracker

MIB = 1 << 20


def tracker_of(seconds: list[float], num_bytes: int) -> LatencyTracker:
    latency = LatencyTracker()
    for each in seconds:
        latency.add(num_bytes, each)
    return latency


def test_nothing_is_slow_too_early() -> None:
    assert LatencyTracker().slow_after(10 * MIB) > 2.0
    assert tracker_of([0.001] * (KNOWN_READS - 1), MIB).slow_after(MIB) > 2.0
    assert tracker_of([0.001] * KNOWN_READS, MIB).slow_after(MIB) == LEAST_SECONDS


def test_it_is_the_slowest_of_a_hundred() -> None:
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

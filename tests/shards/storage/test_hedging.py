"""Which read is slow."""

import pytest

from shards.storage.hedging import KNOWN_READS, LEAST_SECONDS, REMEMBERED, REQUEST_BYTES, Pace

MIB = 1 << 20


def paced(seconds: list[float], num_bytes: int) -> Pace:
    pace = Pace()
    for each in seconds:
        pace.add(num_bytes, each)
    return pace


def test_nothing_is_slow_too_early() -> None:
    assert Pace().slow_after(10 * MIB) > 2.0
    assert paced([0.001] * (KNOWN_READS - 1), MIB).slow_after(MIB) > 2.0
    assert paced([0.001] * KNOWN_READS, MIB).slow_after(MIB) == LEAST_SECONDS


def test_it_is_the_slowest_of_a_hundred() -> None:
    pace = paced([1.0] * 99 + [3.0], 8 * MIB)
    assert pace.slow_after(8 * MIB) == pytest.approx(3.0)
    assert paced([1.0] * 199 + [3.0], 8 * MIB).slow_after(8 * MIB) == pytest.approx(1.0)


def test_sizes_are_taken_into_account() -> None:
    pace = paced([1.0] * 100, 7 * MIB)
    assert pace.slow_after(15 * MIB) == pytest.approx(2.0)
    assert pace.slow_after(0) == pytest.approx(max(LEAST_SECONDS, REQUEST_BYTES / (8 * MIB)))


def test_old_reads_are_forgotten() -> None:
    pace = paced([9.0] * 50 + [1.0] * REMEMBERED, MIB)
    assert pace.slow_after(MIB) == pytest.approx(1.0)

"""Reading ahead with threads: order, errors as values, a bounded window, an early end."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from shards.storage.ahead import Hold, in_order, in_order_within


@pytest.mark.parametrize(("threads", "window"), [(1, 1), (4, 1), (2, 8), (16, 3)])
def test_results_come_in_order(threads: int, window: int) -> None:
    assert list(in_order(lambda value: value * value, range(50), threads=threads, window=window)) == [
        value * value for value in range(50)
    ]


def test_no_items_give_no_results() -> None:
    assert list(in_order(str, [], threads=2, window=2)) == []


def test_an_error_is_a_value_in_its_place() -> None:
    found = list(in_order(lambda value: 12 // value, [3, 0, 4], threads=2, window=2))
    assert found[0] == 4
    assert isinstance(found[1], ZeroDivisionError)
    assert found[2] == 3


def test_an_interrupt_is_not_a_value() -> None:
    def interrupted(_: int) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(in_order(interrupted, [1], threads=1, window=1))


def test_no_more_than_a_window_is_drawn_ahead() -> None:
    drawn = 0

    def items() -> Iterator[int]:
        nonlocal drawn
        for value in range(100):
            drawn += 1
            yield value

    for taken, value in enumerate(in_order(lambda item: item, items(), threads=4, window=5)):
        assert value == taken
        assert drawn <= taken + 5


def test_items_are_under_way_together() -> None:
    """Four calls that wait for each other end only if they run at the same time."""
    together = threading.Barrier(4, timeout=60)
    assert len([x for x in in_order(lambda _: together.wait(), range(8), threads=4, window=4) if x is not None]) == 8


def test_an_early_end_starts_nothing_more_and_leaves_no_thread() -> None:
    begun: list[int] = []
    with closing(in_order(begun.append, range(1000), threads=1, window=4)) as results:
        next(results)
    assert len(begun) <= 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


@pytest.mark.parametrize(("threads", "window"), [(0, 1), (1, 0)])
def test_sizes_are_checked(threads: int, window: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        list(in_order(str, [1], threads=threads, window=window))


def test_large_results_wait_until_there_is_room_for_them() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def read(number: int, hold: Hold) -> int:
        nonlocal now, most
        for part in range(1, 5):
            hold(25 * part)
        with lock:
            now += 1
            most = max(most, now)
        return number

    for expected, number in enumerate(in_order_within(read, range(40), threads=8, most_bytes=250)):
        assert number == expected
        time.sleep(0.002)
        with lock:
            now -= 1
    assert most <= 4  # two, the one that is wanted, and the one that was given last


def test_one_larger_than_all_room_comes_in_its_turn() -> None:
    def read(size: int, hold: Hold) -> int:
        hold(size)
        hold(size)
        return size

    sizes = [5, 1000, 5, 1000, 1000, 0]
    assert list(in_order_within(read, sizes, threads=3, most_bytes=10)) == sizes


def test_whoever_waits_for_room_is_let_go_at_an_early_end() -> None:
    def read(_: int, hold: Hold) -> None:
        hold(100)

    with closing(in_order_within(read, range(100), threads=4, most_bytes=10)) as results:
        next(results)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]

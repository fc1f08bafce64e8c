"""Requests run at once, and their results come in order."""

import threading

import pytest

from pipeline.checkpoints.many_requests import AT_ONCE, each_at_once


@pytest.mark.parametrize("num_items", [0, 1, 2, 300])
def test_the_results_are_in_order(num_items: int) -> None:
    assert each_at_once(lambda item: item * item, range(num_items)) == [item * item for item in range(num_items)]


def test_as_many_run_at_once_as_are_allowed() -> None:
    together = threading.Barrier(AT_ONCE, timeout=60)
    assert each_at_once(lambda _: together.wait() >= 0, range(AT_ONCE)) == [True] * AT_ONCE


def test_the_first_error_is_raised() -> None:
    def ask(item: int) -> None:
        if item % 2:
            raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 1"):
        each_at_once(ask, range(6))

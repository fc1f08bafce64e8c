"""The record of allocations that the memory model is compared with."""

from threading import Thread

import torch

from tests.rigs.peaks import peak_of

MEGABYTE = 2**20


def of(megabytes: int) -> torch.Tensor:
    return torch.empty(megabytes * MEGABYTE, dtype=torch.uint8)


def test_what_another_thread_frees_is_counted_as_freed() -> None:
    def work() -> None:
        held = [of(5)]
        other = Thread(target=held.clear)
        other.start()
        other.join()
        of(7)

    assert peak_of(work) == 7 * MEGABYTE


def test_it_is_the_most_at_any_moment() -> None:
    def work() -> None:
        both = of(3), of(4)
        del both
        of(6)

    assert peak_of(work) == 7 * MEGABYTE

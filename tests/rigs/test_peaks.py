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


def test_what_was_freed_after_a_record_does_not_count_in_the_next() -> None:
    held: list[torch.Tensor] = []
    assert peak_of(lambda: held.append(of(2))) == 2 * MEGABYTE
    held.clear()
    assert peak_of(lambda: held.extend([of(3)])) == 3 * MEGABYTE

"""The same results in one process and in several."""

import os
from collections.abc import Iterator

import pytest

from shards.errors import UserError
from shards.parallel import run_tasks


def square(number: int) -> tuple[int, int]:
    """What the workers do here, and in which process."""
    return number * number, os.getpid()


def refuse_three(number: int) -> int:
    """Fails once."""
    if number == 3:
        raise UserError("three is not allowed")
    return number


@pytest.mark.parametrize("workers", [1, 2])
def test_every_task_is_done_once(workers: int) -> None:
    done = list(run_tasks(square, range(11), workers=workers))
    assert sorted(value for value, _ in done) == [number * number for number in range(11)]
    assert (os.getpid() in {pid for _, pid in done}) == (workers == 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_workers_error_ends_the_work_as_it_is(workers: int) -> None:
    drawn = []

    def tasks() -> Iterator[int]:
        for number in range(1000):
            drawn.append(number)
            yield number

    with pytest.raises(UserError, match="three is not allowed"):
        list(run_tasks(refuse_three, tasks(), workers=workers))
    assert len(drawn) < 50, "tasks are drawn as workers get free"

"""The same function over many tasks, in this process or in a pool of fresh ones."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_tasks(function: Callable[[Task], Result], tasks: Iterable[Task], *, workers: int) -> Iterator[Result]:
    """Results as they come. Tasks are drawn only as workers get free, so they may be many and large."""
    if workers == 1:
        yield from map(function, tasks)
        return
    # Fresh processes: a fork would carry S3 connections and locks of other threads along.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context)
    try:
        yield from _in_pool(pool, function, iter(tasks), window=2 * workers)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_pool(
    pool: ProcessPoolExecutor, function: Callable[[Task], Result], tasks: Iterator[Task], *, window: int
) -> Iterator[Result]:
    pending: set[Future[Result]] = {pool.submit(function, task) for task in islice(tasks, window)}
    while pending:
        finished, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in finished:
            yield future.result()
        pending |= {pool.submit(function, task) for task in islice(tasks, len(finished))}

"""One function over many tasks, in this process or in a pool of processes.

Packing, verification and adoption use it: their tasks keep a processor busy, which threads cannot share. Waiting in the
background, inside one process, is done by shards/pool.py.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import TypeVar

from shards.output.terminal import command_output

Task = TypeVar("Task")
Result = TypeVar("Result")
_WARNINGS = (
    signal.SIGUSR1,
    signal.SIGUSR2,
)  # Slurm sends them to all processes of a step; only the parent acts on them


def run_tasks(function: Callable[[Task], Result], tasks: Iterable[Task], *, workers: int) -> Iterator[Result]:
    """Yields results as they come. Tasks are drawn only as workers become free, so they may be many and large."""
    left = iter(tasks)
    first = list(islice(left, 2))
    if workers == 1 or len(first) < 2:
        yield from map(function, chain(first, left))
        return
    # Workers are forked from a process that has done nothing but load the modules which jobs/cli.py names: a fork of
    # this one would carry S3 connections and locks of other threads along.
    context = multiprocessing.get_context("forkserver")
    environment = dict(os.environ)  # the server keeps the one it was started with
    _start_quietly()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(environment,))
    try:
        yield from _in_pool(pool, function, chain(first, left), window=2 * workers)
    except (KeyboardInterrupt, GeneratorExit):  # nobody waits for the running tasks
        for worker in list((pool._processes or {}).values()):
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_quietly() -> None:
    """Starts the process that workers are forked from. Ctrl-C at a terminal reaches all processes, but only the parent
    handles it: the workers block it from the start, because it would end them with a traceback."""
    resource_tracker.ensure_running()  # first: its own start unblocks signals at the end
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(environment: dict[str, str]) -> None:
    """Prepares a worker, which ends when its parent ends: after a kill it would wait for tasks for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # if another part of this program has started the server
    for number in _WARNINGS:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _in_pool(
    pool: ProcessPoolExecutor, function: Callable[[Task], Result], tasks: Iterator[Task], *, window: int
) -> Iterator[Result]:
    pending: set[Future[Result]] = set()
    pending |= _submitted(pool, function, islice(tasks, window))
    while pending:
        finished, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in finished:
            yield future.result()
        pending |= _submitted(pool, function, islice(tasks, len(finished)))


def _submitted(
    pool: ProcessPoolExecutor, function: Callable[[Task], Result], tasks: Iterator[Task]
) -> set[Future[Result]]:
    futures = set()
    for task in tasks:
        with _uninterrupted():  # a worker whose start is interrupted would be left behind
            futures.add(pool.submit(_in_worker, function, task))
    return futures


def _in_worker(function: Callable[[Task], Result], task: Task) -> Result:
    with command_output(level=logging.WARNING):
        return function(task)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Raises signals that arrive inside the block after its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, *_WARNINGS)}
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])

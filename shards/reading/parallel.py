"""Runs one function over many tasks, in this process or in a pool of processes.

Packing, verification and adoption use it, because their tasks keep a processor busy, and threads share the interpreter
lock. For tasks that wait, threads in one process are enough (shards/pool.py).
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
    """Yields each result when its task ends, in any order. Tasks are drawn only as workers become free, so that even
    many large tasks take little memory."""
    left = iter(tasks)
    first = list(islice(left, 2))
    if workers == 1 or len(first) < 2:
        yield from map(function, chain(first, left))
        return
    # Workers are forked from a process that has only loaded the modules named in jobs/cli.py. A fork of this process
    # would inherit S3 connections and the locks of other threads.
    context = multiprocessing.get_context("forkserver")
    environment = dict(os.environ)  # the fork server keeps the environment that it was started with
    _start_quietly()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(environment,))
    try:
        yield from _in_pool(pool, function, chain(first, left), window=2 * workers)
    except (KeyboardInterrupt, GeneratorExit):  # nobody needs the results of the running tasks
        for worker in list((pool._processes or {}).values()):
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_quietly() -> None:
    """Starts the process that workers are forked from. Ctrl-C at a terminal reaches all processes, but only the parent
    handles it: the workers block it from the start, because it would end them with a traceback."""
    resource_tracker.ensure_running()  # started first, because starting it unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(environment: dict[str, str]) -> None:
    """Prepares a worker, and makes it end when its parent ends: otherwise, if the parent was killed, it would wait for
    tasks forever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # in case another part of this program has started the fork server
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
        with _uninterrupted():  # otherwise a worker whose start is interrupted would be left running
            futures.add(pool.submit(_in_worker, function, task))
    return futures


def _in_worker(function: Callable[[Task], Result], task: Task) -> Result:
    with command_output(level=logging.WARNING):
        return function(task)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delays a signal that arrives inside the block until the block ends."""
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

"""Requests to a store that do not depend on each other, at once: a save of 512 ranks must not wait for 512 answers in a
row."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from shards.pool import Pool

Item = TypeVar("Item")
Result = TypeVar("Result")
AT_ONCE = 128


def each_at_once(ask: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`ask` of each item, in their order. Raises the first error in that order, once all have ended."""
    if len(items) < 2:
        return [ask(item) for item in items]
    pool = Pool(min(AT_ONCE, len(items)), name="store")
    try:
        futures = [pool.submit(lambda item=item: ask(item)) for item in items]  # type: ignore[misc]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]
    finally:
        pool.close()

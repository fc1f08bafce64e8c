"""Decides when a request is retried, and when it is given up: full jitter, a budget, a deadline.

Full jitter: Marc Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015. The budget is the token bucket
of Finagle and of the AWS SDKs; it keeps retries from overloading a store that is in trouble. Requests that the storage
does not answer at all cost nothing, since they are no load for it.
"""

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from shards.config_values import Range, refuse_wrong_values
from shards.errors import StorageError
from shards.storage.fork_lock import ForkLock

ALARM_SECONDS = 60.0  # a warning is logged if reads have failed for this long
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """When a request is retried, and when its read gives up."""

    fruitless_tries: Annotated[int, Range(1)] = 6
    """Requests in a row to a store that has never answered, or never with bytes of a range, before a read gives up."""
    backoff_seconds: Annotated[float, Range(0)] = 0.2
    """Longest pause before the first retry; it doubles with each further one."""
    most_backoff_seconds: Annotated[float, Range(0)] = 10.0
    """Longest pause before any retry."""
    deadline_seconds: Annotated[float, Range(0)] = 120.0
    """Time that a read may take without a new byte."""
    budget_share: Annotated[float, Range(0)] = 0.1
    """Retries after error responses that each read adds to the budget of its process."""
    budget_reserve: Annotated[float, Range(0)] = 200.0
    """Retries that the budget begins with, and never exceeds."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")


def backoff_seconds(failures: int, *, config: RetryConfig, draw: float) -> float:
    """Returns the pause after `failures` failures in a row. `draw` is a random number, uniform in 0..1."""
    doublings = min(failures - 1, 60)  # more would overflow a float
    return draw * min(config.most_backoff_seconds, config.backoff_seconds * 2.0**doublings)


class Silence:
    """Since when requests to a store have failed while no read of this process has got a byte."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._since, self._failed_at, self._has_warned = 0.0, -math.inf, False

    def __reduce__(self) -> tuple[type["Silence"], tuple[()]]:
        return type(self), ()

    def failed(self, now: float, *, patience: float) -> float:
        """Records a failed request, and returns since when the store is silent. If nothing was asked of it for
        `patience` seconds, that is now."""
        with self._lock:
            if now - self._failed_at > patience:
                self._since, self._has_warned = now, False
            self._failed_at = now
            return self._since

    def received(self) -> None:
        """Records that a read has got bytes."""
        self._failed_at = -math.inf

    def may_warn(self) -> bool:
        """Returns True once for each silence."""
        with self._lock:
            has_warned, self._has_warned = self._has_warned, True
            return not has_warned


class RetryBudget:
    """The retries that are left to all reads of a store in this process.

    `has_answered`: whether the storage has ever answered. `has_sent`: whether it has ever sent bytes of a range.
    `is_known_to_answer`: whether another process, such as the one that started this one, has reached the storage. If
    so, the address is right, and even an error is an answer from the right server. `silence`: that of the store.
    """

    is_known_to_answer: ClassVar[bool] = False

    def __init__(self, config: RetryConfig, silence: Silence | None = None) -> None:
        self.config, self.silence = config, silence or Silence()
        self.has_answered = self.has_sent = False
        self._lock, self._left = ForkLock(), config.budget_reserve

    def __reduce__(self) -> tuple[type["RetryBudget"], tuple[RetryConfig]]:
        return type(self), (self.config,)

    def earn(self, share: float) -> None:
        """Adds this share of a retry to the budget."""
        with self._lock:
            self._left = min(self.config.budget_reserve, self._left + share)

    def spend(self) -> bool:
        """Takes one retry. Returns False if none is left."""
        with self._lock:
            if self._left < 1:
                return False
            self._left -= 1
            return True


class ReadStoppedError(Exception):
    """A read was stopped because nobody needs its bytes. `num_bytes` of them had arrived."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"the read was stopped after {num_bytes} bytes")
        self.num_bytes = num_bytes


class RequestRetries:
    """The retries of one read of `what`. `pause` sleeps for a number of seconds; `draw` returns a random number in
    0..1."""

    def __init__(
        self,
        what: str,
        budget: RetryBudget,
        *,
        pause: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._what, self._budget = what, budget
        self._pause, self._clock, self._draw = pause, clock, draw
        self._failures, self._fruitless, self._has_progressed = 0, 0, False
        self._since = clock()
        budget.earn(budget.config.budget_share)

    def progressed(self, share: float = 1.0) -> None:
        """Records that new bytes have arrived, and adds `share` of a retry to the budget.

        With a share of 1, pauses begin again at the shortest. With less, they keep growing; otherwise bodies that all
        break off early would use up the budget.
        """
        self._failures = 0 if share >= 1.0 else self._failures
        self._fruitless, self._has_progressed = 0, True
        self._since = self._clock()
        self._budget.silence.received()
        self._budget.earn(share)

    def again_after_answer(self, fault: str) -> bool:
        """Pauses after an answer with too few bytes, and returns True.

        Returns False after `fruitless_tries` such answers, if this read has not received a byte and the store has never
        sent any byte of a range. Raises StorageError if the budget or the deadline is used up.
        """
        self._fruitless += 1
        has_sent = self._has_progressed or self._budget.has_sent
        is_allowed = has_sent or self._fruitless < self._budget.config.fruitless_tries
        return self._again(fault, is_allowed, is_answer=True)

    def again_after_failure(self, fault: str, *, is_answer: bool) -> bool:
        """Pauses after a request that was answered by an error, or not at all, and returns True. Returns False if the
        read must be given up.

        If the storage has answered before, retries continue until the deadline; if it never has, its address is
        probably wrong. Raises StorageError if the budget or the deadline is used up.
        """
        limit = self._budget.config.fruitless_tries
        has_answered = self._budget.has_answered or (is_answer and self._budget.is_known_to_answer)
        is_allowed = has_answered or self._failures + 1 < limit
        return self._again(fault, is_allowed, is_answer=is_answer)

    def _again(self, fault: str, is_allowed: bool, *, is_answer: bool) -> bool:
        config, self._failures = self._budget.config, self._failures + 1
        if not is_allowed:
            return False
        pause = backoff_seconds(self._failures, config=config, draw=self._draw())
        now = self._clock()
        silence = self._budget.silence
        waited, silent = now - self._since, now - silence.failed(now, patience=config.deadline_seconds / 2)
        said = f"reading {self._what} failed {self._failures} times in {waited:.0f} s, last with: {fault}"
        # Reads wait for a connection, so one after another would wait for the deadline while the storage is away.
        if max(waited, silent) + pause > config.deadline_seconds:
            others = f"; no read has got a byte for {silent:.0f} s" if silent > waited else ""
            what = f"{said}{others}; the deadline is {config.deadline_seconds:.0f} s"
            raise StorageError(what, todo="try again when the storage has recovered")
        if silent >= ALARM_SECONDS and silence.may_warn():
            warning = "%s cannot be read for a minute now (%s); it is tried for up to %.0f s"
            log.warning(warning, self._what, fault, config.deadline_seconds)
        if is_answer and not self._budget.spend():
            budget = f"{config.budget_reserve:.0f} retries and {config.budget_share:g} more for each read"
            what = f"{said}; this process's {budget} are spent"
            raise StorageError(what, todo="try again when the storage has recovered, or with fewer connections")
        self._pause(pause)
        return True

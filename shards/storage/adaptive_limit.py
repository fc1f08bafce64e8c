"""How many reads may run at once: fewer when the storage says it is too many, then slowly more again (AIMD, as in TCP).

Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for Congestion Avoidance", Computer Networks 17, 1989.
"""

import math
import time
from collections.abc import Callable

CUT_SECONDS = 1.0  # at most one cut in this time
CUT_SHARE = 0.7


class AdaptiveLimit:
    """A limit between 1 and `most`, where it begins. For one thread at a time."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._value, self._cut_at, self._is_throttled = float(most), -math.inf, False

    @property
    def value(self) -> int:
        """The limit now."""
        return int(self._value)

    def throttled(self) -> None:
        """The storage has said that it is too much."""
        self._is_throttled, now = True, self._clock()
        if now - self._cut_at > CUT_SECONDS:
            self._value, self._cut_at = max(1.0, CUT_SHARE * self._value), now

    def ended(self, *, is_success: bool) -> None:
        """A read has ended: the limit grows by one after as many successes as it has reads."""
        if not self._is_throttled:
            self._value = min(self._value + is_success / self._value, self._most)
        self._is_throttled = False

    def was_just_cut(self) -> bool:
        """Whether the last cut is less than CUT_SECONDS ago."""
        return self._clock() - self._cut_at < CUT_SECONDS

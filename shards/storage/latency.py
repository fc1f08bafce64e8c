"""When a read is slow, compared with the latest ones, whatever their sizes.

A second request for the slowest few percent removes most of the tail at little cost: Dean and Barroso, "The Tail at
Scale", CACM 56(2), 2013.
"""

from collections import deque

QUANTILE = 0.99
REMEMBERED = 256
LEAST_SECONDS = 0.25  # a second request gains too little below this
# Until enough is known: what a distant store takes to answer, and to send its bytes.
KNOWN_READS = 16
FIRST_SECONDS = 2.0
FIRST_BYTES_PER_SECOND = 5e6
REQUEST_BYTES = 1 << 20  # a request takes about as long as this many bytes of a body


class LatencyTracker:
    """How long the latest reads took. For one thread at a time."""

    def __init__(self) -> None:
        self._seconds_per_byte: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, num_bytes: int, seconds: float) -> None:
        """Records a read that has ended."""
        self._seconds_per_byte.append(seconds / (REQUEST_BYTES + num_bytes))

    def slow_after(self, num_bytes: int) -> float:
        """After how many seconds a read of `num_bytes` is slower than 99 of 100."""
        if len(self._seconds_per_byte) < KNOWN_READS:
            return FIRST_SECONDS + num_bytes / FIRST_BYTES_PER_SECOND
        ranked = sorted(self._seconds_per_byte)
        slowest = ranked[min(int(QUANTILE * len(ranked)), len(ranked) - 1)]
        return max(LEAST_SECONDS, slowest * (REQUEST_BYTES + num_bytes))

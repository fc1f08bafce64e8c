"""How long to train between two checkpoints, from what they cost and how often machines fail. Pure.

J. W. Young, "A first order approximation to the optimum checkpoint interval" (1974); J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps" (2006). With failures that are exponentially distributed
with the mean M, an interval t and a stall C, a segment takes M exp(R/M) (exp((t + C)/M) - 1) of wall time for t of
work. The time R to restart is a factor, so the best interval does not depend on it; nor does it depend on how long a
checkpoint is written in the background, since each failure loses that time once, whatever the interval is.
"""

import math

DAY_SECONDS = 86400.0
LEAST_SECONDS = 10.0  # more often, the requests to the store matter more than the work that a failure loses
MOST_SECONDS = 7200.0  # no failure loses more, even where failures are so rare that a longer interval would be best
_MARGIN = 0.25  # of the commit time: saves must not pile up if one takes longer than those before


def mean_seconds_to_failure(*, num_nodes: int, failures_per_node_day: float) -> float:
    """The mean time until any of `num_nodes` nodes fails."""
    return DAY_SECONDS / (num_nodes * failures_per_node_day)


def best_interval(*, stall_seconds: float, commit_seconds: float, mean_seconds: float) -> float:
    """Seconds of training between two checkpoints that lose the least time, from LEAST_SECONDS to MOST_SECONDS, but
    never below the time that a commit takes, plus a margin.

    `stall_seconds`: how long training waits for a save. `commit_seconds`: from the begin of a save to its commit.
    `mean_seconds`: the mean time between failures.
    """
    best = daly_interval(stall_seconds=stall_seconds, mean_seconds=mean_seconds)
    return max(min(max(best, LEAST_SECONDS), MOST_SECONDS), commit_seconds * (1 + _MARGIN))


def daly_interval(*, stall_seconds: float, mean_seconds: float) -> float:
    """Daly's estimate of the interval with the least wall time: at most 2 % from the true one up to a stall of the mean
    time between failures, and 6 % up to twice that; beyond, it is the mean."""
    if stall_seconds >= 2 * mean_seconds:
        return mean_seconds
    ratio = stall_seconds / (2 * mean_seconds)
    return math.sqrt(2 * stall_seconds * mean_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds

"""How much of a run's wall time trains, if nodes fail and the queue ends jobs: an expected value in closed form. Pure.

Failures are exponentially distributed with the mean M (Young 1974, Daly 2006; pipeline/checkpoints/config.py says
more). A job starts up for S seconds, then trains t seconds at a time. Each time it saves: training waits C seconds for
the copy, and the save is committed W seconds after it began, while training continues. A failure sets the run back to
the newest commit. So commit k = 0, 1, ... of a job comes S + t + W + k (t + C) seconds after the job's start, is worth
t seconds of work, and happens if no failure comes before it. Without a limit, the expected work of a job is therefore
the geometric series

    t exp(-(S + t + W) / M) / (1 - exp(-(t + C) / M))

and a job lasts M. With W = C, this is Daly's expression. A limit ends the series, and a last save adds the rest. By the
renewal-reward theorem, the goodput of a long run is the expected work of a job divided by its expected wall time.
"""

import math
from dataclasses import dataclass

_ROUNDING = 1e-6  # relative


@dataclass(frozen=True, kw_only=True)
class Regime:
    """What interrupts training, in seconds. All times are wall time.

    `interval`: training between two saves. `stall`: that training waits for a save. `commit`: from the begin of a save
    to its commit, at most the interval. `mean_to_failure`: of all nodes together. `startup`: from a job's start to its
    first step. `down`: from a failure to the start of the next job, of which up to `queue` are spent waiting in the
    queue. `queue`: from a job that the limit has ended to the next one. `limit`: from a job's start to its last save;
    infinite if there is none.
    """

    interval: float
    stall: float
    commit: float
    mean_to_failure: float
    startup: float
    down: float
    queue: float
    limit: float = math.inf


@dataclass(frozen=True, kw_only=True)
class ExpectedOutcome:
    """Expected values of a run. `goodput`: the share of the wall time that is work of the finished run.
    `held_seconds`: the wall time in which a job holds its nodes. `num_pieces`: jobs that the limit alone would
    make of it."""

    goodput: float
    wall_seconds: float
    held_seconds: float
    num_failures: float
    num_pieces: int


@dataclass(frozen=True, kw_only=True)
class _Expected:
    """Expected values of one job. `fails`: the probability that a failure ends it."""

    work: float
    alive: float
    fails: float


def outcome(regime: Regime, *, work_seconds: float) -> ExpectedOutcome:
    """The expected outcome of a run that would take `work_seconds` if nothing interrupted it. Its last job ends early,
    but has a whole start-up and a whole last save: after the last failure one more job starts, and the limit's number
    is rounded up."""
    job = _job(regime)
    num_jobs = work_seconds / job.work
    num_whole = math.ceil(num_jobs * (1 - _ROUNDING))
    failures = num_jobs * job.fails
    held = num_jobs * job.alive + failures * max(0.0, regime.down - regime.queue)
    more = job.fails + (1 - job.fails) * max(0.0, num_whole - num_jobs)
    held += more * (regime.startup + regime.commit)
    waits = failures * min(regime.queue, regime.down) + (num_whole - 1) * (1 - job.fails) * regime.queue
    return ExpectedOutcome(
        goodput=work_seconds / (held + waits),
        wall_seconds=held + waits,
        held_seconds=held,
        num_failures=failures,
        num_pieces=_num_pieces(regime, work_seconds),
    )


def _num_pieces(regime: Regime, work_seconds: float) -> int:
    if regime.limit == math.inf:
        return 1
    return math.ceil(work_seconds / _trained(regime, regime.limit) * (1 - _ROUNDING))


def _job(regime: Regime) -> _Expected:
    mean, cycle = regime.mean_to_failure, regime.interval + regime.stall
    first = regime.startup + regime.interval + regime.commit
    if regime.limit == math.inf:
        work = regime.interval * math.exp(-first / mean) / -math.expm1(-cycle / mean)
        return _Expected(work=work, alive=mean, fails=1.0)
    num_commits = math.floor((regime.limit - first) / cycle) + 1 if regime.limit >= first else 0
    series = math.expm1(-cycle * num_commits / mean) / math.expm1(-cycle / mean)
    fails = -math.expm1(-(regime.limit + regime.commit) / mean)
    rest = _trained(regime, regime.limit) - num_commits * regime.interval
    work = regime.interval * math.exp(-first / mean) * series + (1 - fails) * rest
    return _Expected(work=work, alive=mean * fails, fails=fails)


def _trained(regime: Regime, limit: float) -> float:
    """Seconds of training in a job up to `limit` seconds after its start."""
    window = limit - regime.startup
    num_saves = math.floor(window / (regime.interval + regime.stall))
    return num_saves * regime.interval + min(regime.interval, window - num_saves * (regime.interval + regime.stall))

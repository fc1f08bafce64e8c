"""The controls of a run while it trains: stop requests, their deadlines, the clock that asks for checkpoints, and the
ledger.

The clock asks for a checkpoint every N seconds, or at an interval computed from how long checkpoints take. Clocks and
measured times differ between ranks, so only rank 0 decides. Its request reaches the other ranks with the sums of a
step, like any request to save (watchdog/stopping.py).
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from pipeline.checkpoints.config import CheckpointConfig, best_interval, mean_seconds_to_failure
from pipeline.runs.starts import StartTimes
from pipeline.training.reporting.ledger import Account, Ledger
from pipeline.training.watchdog.heartbeat_files import Phase
from pipeline.training.watchdog.stopping import Signals, Stopping, StopRequest
from pipeline.training.zero.step_times import Part, StepTimes, StepTrace
from shards.output.quantities import duration, plural

log = logging.getLogger(__name__)
FIRST_SECONDS = 60.0  # with `auto_interval`: the seconds until the first checkpoint, whose duration is measured
_NEXT_SECONDS = 600.0  # with `auto_interval`: the interval after that, until a checkpoint is committed
_NUM_MEASURED = 5  # the interval depends on the median over this many of the newest checkpoints
_MUCH = 1.5  # a change of the interval by this factor is logged
_PARTS: Mapping[Account, Part] = {"data_wait": "data_wait", "checkpoint": "checkpoint", "evaluation": "evaluation"}


class SaveClock:
    """Counts the seconds since the newest checkpoint began. `decides`: whether this rank may ask for a checkpoint."""

    def __init__(
        self,
        config: CheckpointConfig | None = None,
        *,
        num_nodes: int = 1,
        decides: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self._decides, self._now = config or CheckpointConfig(), decides, now
        self._num_nodes, self._began_at = num_nodes, now()
        self._stalls: deque[float] = deque(maxlen=_NUM_MEASURED)
        self._commits: deque[float] = deque(maxlen=_NUM_MEASURED)
        self._logged_seconds = 0.0
        self.interval_seconds = FIRST_SECONDS if self.config.auto_interval else self.config.every_seconds

    def is_due(self) -> bool:
        """Returns whether this rank asks for a checkpoint now."""
        return self._decides and 0 < self.interval_seconds <= self._now() - self._began_at

    def started(self) -> None:
        """Starts to count the seconds. Called when the first step begins."""
        self._began_at = self._now()

    def began(self) -> None:
        """Starts to count the seconds again. Called after any checkpoint has begun, when training continues."""
        self._began_at = self._now()
        if self.config.auto_interval and not self._commits:
            self.interval_seconds = _NEXT_SECONDS

    def committed(self, *, stall_seconds: float, commit_seconds: float) -> None:
        """Updates the interval after a checkpoint is committed. Training waited `stall_seconds` for the save, which
        took `commit_seconds` in all."""
        if not (self.config.auto_interval and self._decides):
            return
        self._stalls.append(stall_seconds)
        self._commits.append(commit_seconds)
        rate = self.config.failures_per_node_day
        mean = mean_seconds_to_failure(num_nodes=self._num_nodes, failures_per_node_day=rate)
        stall, commit = median(self._stalls), median(self._commits)
        self.interval_seconds = best_interval(stall_seconds=stall, commit_seconds=commit, mean_seconds=mean)
        if not 1 / _MUCH < self.interval_seconds / (self._logged_seconds or math.inf) < _MUCH:
            self._logged_seconds = self.interval_seconds
            nodes = f"{plural(self._num_nodes, 'node')} with {rate:g} failures per node and day"
            took = f"a checkpoint stalls training for {duration(stall)} and is committed after {duration(commit)}"
            log.info("checkpoints every %s from now on: %s; %s", duration(self.interval_seconds), took, nodes)


def words_of(config: CheckpointConfig, *, is_scored: bool) -> str:
    """Returns a text that says when a run saves; empty if it saves only every N steps. `is_scored`: whether the run is
    evaluated."""
    steps = [f"every {plural(config.every_steps, 'step')}"] if config.every_steps else []
    seconds = [f"every {duration(config.every_seconds)}"] if config.every_seconds else []
    if config.auto_interval:
        seconds = [
            f"by time: the first after {duration(FIRST_SECONDS)}, then at an interval computed from what it took"
        ]
    best = ["at each new best score"] if config.keep_best and is_scored else []
    if seconds:
        return f"checkpoints {' and '.join(steps + seconds)}"
    if steps:
        return ""
    return f"checkpoints {' and '.join([*best, 'at the end'])} only, or on request (a signal, RUN/STOP, RUN/SAVE)"


@dataclass(frozen=True, kw_only=True)
class Controls:
    """A rank's stop requests, deadlines and ledger. `clock`: asks for checkpoints; the default never does. `times`: how
    long the parts of each step take. `trace`: the trace of the steps to profile, if there are any. `start_times`: how
    long the parts of this start take."""

    signals: Signals
    stopping: Stopping
    ledger: Ledger
    clock: SaveClock = field(default_factory=SaveClock)
    times: StepTimes = field(default_factory=StepTimes)
    trace: StepTrace | None = None
    start_times: StartTimes = field(default_factory=StartTimes)

    def step_begins(self, step: int) -> None:
        """Tells the timers and the watchdog that a step begins, which ends the previous one."""
        self.times.begins()
        if self.trace:
            self.trace.begins(step)
        self.stopping.step_begins(step)

    def request(self) -> StopRequest:
        """Returns what this rank is asked to do now."""
        return max(self.signals.request(), StopRequest.SAVE if self.clock.is_due() else StopRequest.NOTHING)

    @contextmanager
    def waiting(self, account: Account, doing: str) -> Iterator[None]:
        """Adds the time spent inside the `with` block to an account. A stop request may end the wait with
        WaitGivenUpError."""
        progress = self.stopping.progress
        progress.enters(Phase.EVALUATING if account == "evaluation" else Phase.WAITING_FOR_DATA)
        with self.ledger.time(account), self.times.part(_PARTS.get(account, "other")), self.stopping.giving_up(doing):
            yield
        progress.enters(Phase.COMPUTING)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Surrounds the writing of a checkpoint. A stop request waits until it is complete."""
        with self.ledger.time("checkpoint"), self.times.part("checkpoint"), self.stopping.writing():
            yield

    def saved(self, step: int) -> None:
        """Marks requests to save as fulfilled, once a checkpoint of this step is committed. A stop then loses no step
        up to this one."""
        self.stopping.saved(step)
        self.signals.saved()

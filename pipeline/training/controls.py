"""What a run looks at while it trains: stop requests, their deadlines, the clock of checkpoints, and the ledger.

The clock asks for a checkpoint every N seconds, or at an interval that follows from how long checkpoints take. Clocks
and measured times differ between ranks, so only rank 0 decides. Its wish travels with the sums of a step, as a request
to save does (watchdog/stopping.py).
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
FIRST_SECONDS = 60.0  # auto: until the first checkpoint, which is measured
_NEXT_SECONDS = 600.0  # auto: then, until one is committed
_NUM_MEASURED = 5  # newest checkpoints whose median counts
_MUCH = 1.5  # a change by this factor is logged
_PARTS: Mapping[Account, Part] = {"data_wait": "data_wait", "checkpoint": "checkpoint", "evaluation": "evaluation"}


class SaveClock:
    """Counts the seconds since the newest checkpoint began. `decides`: whether this rank may ask for one."""

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
        """Whether this rank asks for a checkpoint now."""
        return self._decides and 0 < self.interval_seconds <= self._now() - self._began_at

    def started(self) -> None:
        """The first step begins. The seconds count from here."""
        self._began_at = self._now()

    def began(self) -> None:
        """A checkpoint has begun, for whatever reason, and training continues. The seconds count from here."""
        self._began_at = self._now()
        if self.config.auto_interval and not self._commits:
            self.interval_seconds = _NEXT_SECONDS

    def committed(self, *, stall_seconds: float, commit_seconds: float) -> None:
        """A checkpoint is committed. Training waited `stall_seconds` for it, and it took `commit_seconds` in all."""
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
    """Says in words when a run saves; empty if it is only every N steps. `is_scored`: whether it is evaluated."""
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
    """A rank's stop requests, deadlines and ledger. `clock`: asks for checkpoints; by default, never. `times`: the
    parts of each step. `trace`: of the steps to profile, if there are any. `start_times`: the parts of this start."""

    signals: Signals
    stopping: Stopping
    ledger: Ledger
    clock: SaveClock = field(default_factory=SaveClock)
    times: StepTimes = field(default_factory=StepTimes)
    trace: StepTrace | None = None
    start_times: StartTimes = field(default_factory=StartTimes)

    def step_begins(self, step: int) -> None:
        """A step begins, and the one before it ends."""
        self.times.begins()
        if self.trace:
            self.trace.begins(step)
        self.stopping.step_begins(step)

    def request(self) -> StopRequest:
        """What this rank is asked to do now."""
        return max(self.signals.request(), StopRequest.SAVE if self.clock.is_due() else StopRequest.NOTHING)

    @contextmanager
    def waiting(self, account: Account, doing: str) -> Iterator[None]:
        """Adds the time spent inside to this account. A stop request may end it with WaitGivenUpError."""
        progress = self.stopping.progress
        progress.enters(Phase.EVALUATING if account == "evaluation" else Phase.WAITING_FOR_DATA)
        with self.ledger.time(account), self.times.part(_PARTS.get(account, "other")), self.stopping.giving_up(doing):
            yield
        progress.enters(Phase.COMPUTING)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A checkpoint is written inside: a stop request waits for it."""
        with self.ledger.time("checkpoint"), self.times.part("checkpoint"), self.stopping.writing():
            yield

    def saved(self, step: int) -> None:
        """A checkpoint of this step is committed: requests to save are fulfilled, and a stop loses no earlier step."""
        self.stopping.saved(step)
        self.signals.saved()

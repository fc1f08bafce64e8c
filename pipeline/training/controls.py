"""Stop requests, their deadlines, the clock of checkpoints and the ledger: everything that takes long uses them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipeline.runs.starts import StartTimes
from pipeline.training.reporting.ledger import Account, Ledger
from pipeline.training.save_clock import SaveClock
from pipeline.training.watchdog.rank_progress import Phase
from pipeline.training.watchdog.signals import Signals, StopRequest
from pipeline.training.watchdog.stopping import Stopping
from pipeline.training.zero.step_times import Part, StepTimes
from pipeline.training.zero.step_trace import StepTrace

_PARTS: Mapping[Account, Part] = {"data_wait": "data_wait", "checkpoint": "checkpoint", "evaluation": "evaluation"}


@dataclass(frozen=True, kw_only=True)
class Controls:
    """A rank's stop requests, deadlines and ledger. `clock`: by default, time never asks for a checkpoint. `times`: of
    what a step does. `trace`: of the steps to profile, if there are any. `start_times`: of this start."""

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
        """Time on this account, for something that gives way to a stop request by raising WaitGivenUpError."""
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

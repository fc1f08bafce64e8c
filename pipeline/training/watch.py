"""Stop requests, their deadlines, and the ledger: everything that takes long in a run uses all three."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline.training.ledger import Account, Ledger
from pipeline.training.signals import Signals, StopRequest
from pipeline.training.stopping import Stopping


@dataclass(frozen=True, kw_only=True)
class Watch:
    """A rank's stop requests, deadlines and ledger."""

    signals: Signals
    stopping: Stopping
    ledger: Ledger

    def request(self) -> StopRequest:
        """What this rank is asked to do now."""
        return self.signals.request()

    @contextmanager
    def waiting(self, account: Account, doing: str) -> Iterator[None]:
        """Time on this account, for something that gives way to a stop request by raising WaitGivenUpError."""
        with self.ledger.time(account), self.stopping.giving_up(doing):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A checkpoint is written inside: a stop request waits for it."""
        with self.ledger.time("checkpoint"), self.stopping.writing():
            yield

    def saved(self, step: int) -> None:
        """A checkpoint of this step is committed: requests to save are fulfilled, and a stop loses no earlier step."""
        self.stopping.saved(step)
        self.signals.saved()

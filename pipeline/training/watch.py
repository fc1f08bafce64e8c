"""What everything that takes long in a run looks at: requests to stop, their deadlines, and where the time goes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline.training.ledger import Account, Ledger
from pipeline.training.signals import Signals, StopRequest
from pipeline.training.stopping import Stopping


@dataclass(frozen=True, kw_only=True)
class Watch:
    """A rank's requests, deadlines and ledger."""

    signals: Signals
    stopping: Stopping
    ledger: Ledger

    def request(self) -> StopRequest:
        """What this rank is asked to do now."""
        return self.signals.request()

    @contextmanager
    def waiting(self, account: Account, doing: str) -> Iterator[None]:
        """Time on this account, for something that gives way to a request to stop: WaitGivenUpError comes out of it."""
        with self.ledger.time(account), self.stopping.giving_up(doing):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A checkpoint is written inside: a request to stop waits for it."""
        with self.ledger.time("checkpoint"), self.stopping.writing():
            yield

    def saved(self, step: int) -> None:
        """A checkpoint of this step is committed: a request to save is fulfilled, a stop has lost nothing."""
        self.stopping.saved(step)
        self.signals.saved()

"""One read of a byte range, and the up to two requests for it."""

import math
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Protocol, runtime_checkable

from shards.config_values import Range, refuse_wrong_values
from shards.storage.objects import Store


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """How bytes are read from a store."""

    connections: Annotated[int, Range(1)] = 8
    """Concurrent reads per rank."""
    hedge_share: Annotated[float, Range(0, 1, zero="none")] = 0.05
    """Second requests for slow reads, as a share of all requests, 0 to 1; 0: none."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="data.reading.")


@runtime_checkable
class Stoppable(Protocol):
    """A store whose reads can be stopped. Files are read too fast for that."""

    def read_range_until(self, stop: threading.Event, path: str, first: int, end: int) -> bytes:
        """As `Store.read_range`; ReadStoppedError soon after `stop` is set."""
        ...


@dataclass(eq=False, kw_only=True)
class Half:
    """One of the up to two requests for the same bytes."""

    store: Store
    is_hedge: bool
    stop: threading.Event = field(default_factory=threading.Event)
    is_left: bool = False  # by its worker's successor: the read is over, and this thread may stand still for a while


@dataclass(eq=False, kw_only=True)
class Read:
    path: str
    first: int
    end: int
    future: Future[bytes] = field(default_factory=Future)
    began: float = 0.0
    hedge_at: float = math.inf
    halves: list[Half] = field(default_factory=list)  # under way
    error: BaseException | None = None  # of the half that failed first
    is_over: bool = False

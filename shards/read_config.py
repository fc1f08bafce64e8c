"""How training reads its dataset. A configuration only: the command line loads it without NumPy."""

from dataclasses import dataclass
from typing import Annotated

from shards.schema.config_values import Range, refuse_wrong_values


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """How bytes are read from a store."""

    connections: Annotated[int, Range(1)] = 8
    """Concurrent reads per rank."""
    hedge_share: Annotated[float, Range(0, 1, zero="none")] = 0.05
    """Second requests for slow reads, as a share of all requests, 0 to 1; 0: none."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="data.reading.")

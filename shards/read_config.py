"""How training reads its dataset. A configuration only: the command line loads it without NumPy."""

from dataclasses import dataclass

from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """How bytes are read from a store."""

    connections: int = 8
    """Concurrent reads per rank."""
    hedge_share: float = 0.05
    """Second requests for slow reads, as a share of all requests, 0 to 1; 0: none."""

    def __post_init__(self) -> None:
        if self.connections < 1 or not 0 <= self.hedge_share <= 1:
            raise UserError(f"allowed are connections of 1 or more and a hedge_share of 0 to 1: {self}")

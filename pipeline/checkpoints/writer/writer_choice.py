"""Whether a run saves in the background: all ranks do, or none, and the log says which and why."""

import logging
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoints.config import CheckpointConfig
from pipeline.checkpoints.host_memory import available_bytes
from pipeline.checkpoints.saves import RankWriter
from pipeline.checkpoints.writer.client import Writer
from pipeline.checkpoints.writer.copies import BackgroundWriter
from pipeline.checkpoints.writer.host_buffer import HostBuffer
from pipeline.checkpoints.writer.inline_writer import InlineWriter
from pipeline.ranks.collectives import gather_json
from pipeline.ranks.world import World
from shards.errors import UserError
from shards.output.quantities import size
from shards.store import Store

log = logging.getLogger(__name__)
_MOST_SHARE = 0.9  # of what the host has left


@dataclass(frozen=True, kw_only=True)
class Room:
    """What one rank's host has: bytes for a copy of each of its ranks' state, those that they will still take to train,
    and bytes that it can spare."""

    rank: int
    needed_bytes: int
    available_bytes: int
    training_bytes: int = 0
    fault: str = ""

    @property
    def is_enough(self) -> bool:
        """Whether saves in the background fit, with a tenth of the memory left over."""
        return not self.fault and self.needed_bytes + self.training_bytes <= self.available_bytes * _MOST_SHARE

    def words(self) -> str:
        """Why it is not enough."""
        needed, available = size(self.needed_bytes), size(self.available_bytes)
        told = self.fault or f"{available} of memory are available there, of which they may take {_MOST_SHARE:.0%}"
        training = f" and {size(self.training_bytes)} to train" if self.training_bytes else ""
        ranks = f"the ranks on the host of rank {self.rank}"
        return f"{ranks} need {needed} for one copy of their state{training}, but {told}"


def choose_writer(
    config: CheckpointConfig,
    writer: Writer | None,
    store: Store,
    world: World,
    *,
    num_bytes: int,
    training_bytes: int = 0,
) -> RankWriter:
    """How this rank saves. `num_bytes`: of its file. `training_bytes`: of host memory that it will still take to train.
    `writer`: None if the job wants none. UserError if the job needs one, and a host has no room. Collective."""
    if writer is None:
        return InlineWriter(store)
    ranks = world.num_local_ranks
    mine = Room(
        rank=world.rank,
        needed_bytes=num_bytes * ranks,
        available_bytes=available_bytes(),
        training_bytes=training_bytes * ranks,
    )
    short = _short_of_all(mine, world)
    buffer = HostBuffer(writer.buffer, world.device)
    if not short:
        short = _short_of_all(_taken(buffer, mine, num_bytes), world)
    if not short:
        if world.is_first:
            log.info("asynchronous checkpoints: %s of host memory per rank", size(num_bytes))
        return BackgroundWriter(writer, buffer)
    buffer.close()
    writer.close()
    if config.asynchronous == "on":
        todo = "give --checkpoint.asynchronous auto or off, or start fewer ranks per host"
        raise UserError(f'checkpoint.asynchronous is "on", but {short.words()}; {todo}')
    if world.is_first:
        log.warning("checkpoints are written while training waits: %s", short.words())
    return InlineWriter(store)


def _taken(buffer: HostBuffer, mine: Room, num_bytes: int) -> Room:
    """Takes the memory."""
    try:
        buffer.fit(num_bytes)
    except OSError as error:
        return Room(**{**vars(mine), "fault": f"it could not be taken: {error.strerror or error}"})
    return mine


def _short_of_all(mine: Room, world: World) -> Room | None:
    """The first rank's room that is not enough. Collective."""
    found: list[dict[str, Any]] = gather_json(vars(mine), device=world.device)
    return next((room for room in (Room(**each) for each in found) if not room.is_enough), None)

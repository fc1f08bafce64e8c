"""Where training samples come from, how they are shuffled, read, decoded and augmented."""

from dataclasses import dataclass

from pipeline.data.augment import AugmentConfig
from pipeline.data.mixup import MixupConfig
from pipeline.data.randaugment import RandAugmentConfig
from shards.errors import UserError
from shards.storage.ranges import ReadConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`url` names the dataset, or `mix` several, each with its weight: its share of the samples drawn, in any unit.

    The shuffle reaches over lanes x window_blocks blocks (of each dataset). `num_threads` decode; 0: the rank's share
    of the machine's cores. `memory_limit_bytes` is for the bytes read ahead by all ranks of a host. `max_quarantined`:
    the share of samples that may be replaced before the run stops. `allow_other_decoder`: continue a run although the
    decoding libraries' versions, and so the pixels, may differ.
    """

    url: str = ""
    mix: tuple[tuple[str, float], ...] = ()
    lanes: int = 64
    window_blocks: int = 4
    augment: AugmentConfig = AugmentConfig()
    randaugment: RandAugmentConfig = RandAugmentConfig()
    mixup: MixupConfig = MixupConfig()
    reading: ReadConfig = ReadConfig()
    num_threads: int = 0
    steps_ahead: int = 3
    memory_limit_bytes: int = 16_000_000_000
    max_quarantined: float = 0.001
    allow_other_decoder: bool = False

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.window_blocks < 1 or self.steps_ahead < 1 or self.num_threads < 0:
            raise UserError(f"lanes, window_blocks and steps_ahead must be 1 or more, num_threads 0 or more: {self}")
        if not 0 <= self.max_quarantined <= 1:
            raise UserError(f"max_quarantined is {self.max_quarantined}; allowed is a share, 0 to 1")
        if self.url and self.mix:
            raise UserError(f"the data is url {self.url} and a mix of {len(self.mix)}; give one of the two")


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of each global batch this rank takes."""

    global_batch: int
    rank: int
    num_ranks: int

"""Where training samples come from, how they are shuffled, read, decoded and augmented.

Configurations only: the command line reads them without loading torch, OpenCV or a decoder.
"""

from dataclasses import dataclass
from typing import Literal

from shards.errors import UserError
from shards.storage.range_read import ReadConfig

MAX_MAGNITUDE = (
    20  # of RandAugment: the strongest of big_vision's recipes; beyond, Posterize would keep more than 8 bits
)
DRAWS_PER_OP = 4  # uniform draws of one RandAugment operation


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """`crop`: inception (the paper's), random_resized (torchvision's), or none (a plain resize). Areas are shares of
    the image; `flip` mirrors half of the images.

    `antialias` averages over all pixels that an output pixel covers, as Pillow and torchvision always do; the paper's
    code does not. `scaled_decode`: large JPEGs are decoded at 1/2, 1/4 or 1/8 where the crop still covers the view,
    which is cheaper, and smoothed by it (on photographs of 1600 x 1200 by some 3 grey levels on average).
    """

    crop: Literal["inception", "random_resized", "none"] = "inception"
    min_area: float = 0.05
    max_area: float = 1.0
    min_ratio: float = 3 / 4
    max_ratio: float = 4 / 3
    flip: bool = True
    antialias: bool = False
    scaled_decode: bool = True

    def __post_init__(self) -> None:
        if not (0 < self.min_area <= self.max_area <= 1 and 0 < self.min_ratio <= self.max_ratio):
            raise UserError(f"allowed are areas 0 < min <= max <= 1 and ratios 0 < min <= max: {self}")


@dataclass(frozen=True, kw_only=True)
class EvaluationTransform:
    """`resize`: straight to the model's size. `central_crop`: short side to `short_side` pixels, then the centre
    (0: the size times 256/224, the paper's proportion; at least the size). `antialias` as in training."""

    mode: Literal["resize", "central_crop"] = "resize"
    short_side: int = 0
    antialias: bool = False

    def __post_init__(self) -> None:
        if self.short_side < 0:
            raise UserError(f"transform.short_side is {self.short_side}; allowed are 0 (256/224 of the size) or more")


@dataclass(frozen=True, kw_only=True)
class MixupConfig:
    """`alpha` 0: off. big_vision's light2 takes 0.2, medium2 0.5; at 1 all weights are equally likely."""

    alpha: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UserError(f"mixup.alpha is {self.alpha}; allowed are 0 (off) to 1")


@dataclass(frozen=True, kw_only=True)
class RandAugmentConfig:
    """`num_ops` 0: off. big_vision's light2 is 2 operations of magnitude 10, medium2 2 of 15."""

    num_ops: int = 0
    magnitude: int = 10

    def __post_init__(self) -> None:
        if self.num_ops < 0 or not 0 <= self.magnitude <= MAX_MAGNITUDE:
            raise UserError(
                f"RandAugment: num_ops is {self.num_ops} and magnitude {self.magnitude}; "
                f"allowed are num_ops of 0 (off) or more and magnitudes of 0 to {MAX_MAGNITUDE}"
            )

    @property
    def num_draws(self) -> int:
        """Uniform draws an image."""
        return DRAWS_PER_OP * self.num_ops


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

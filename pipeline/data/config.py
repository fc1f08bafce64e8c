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
    """How a training image is cropped, resized and mirrored."""

    crop: Literal["inception", "random_resized", "none"] = "inception"
    """How the crop is drawn: inception (the paper's), random_resized (torchvision's), or none (a plain resize)."""
    min_area: float = 0.05
    """Smallest crop, as a share of the image's area."""
    max_area: float = 1.0
    """Largest crop, as a share of the image's area."""
    min_ratio: float = 3 / 4
    """Narrowest crop: its width divided by its height."""
    max_ratio: float = 4 / 3
    """Widest crop: its width divided by its height."""
    flip: bool = True
    """Mirror half of the images, left to right."""
    antialias: bool = False
    """Average over all pixels that an output pixel covers, as Pillow and torchvision do; the paper's code does not."""
    scaled_decode: bool = True
    """Decode large JPEGs at 1/2, 1/4 or 1/8 where the crop still covers the view: cheaper, and smoothed by it (on
    photographs of 1600 x 1200 by some 3 grey levels on average)."""

    def __post_init__(self) -> None:
        if not (0 < self.min_area <= self.max_area <= 1 and 0 < self.min_ratio <= self.max_ratio):
            raise UserError(f"allowed are areas 0 < min <= max <= 1 and ratios 0 < min <= max: {self}")


@dataclass(frozen=True, kw_only=True)
class MixupConfig:
    """Mixup: each image and its labels are mixed with another's."""

    alpha: float = 0.0
    """Strength, from 0 (off) to 1, where all weights are equally likely; big_vision's light2 takes 0.2, medium2 0.5."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UserError(f"mixup.alpha is {self.alpha}; allowed are 0 (off) to 1")


@dataclass(frozen=True, kw_only=True)
class RandAugmentConfig:
    """RandAugment: random operations on colours and geometry."""

    num_ops: int = 0
    """Operations per image, 0 for none; big_vision's light2 and medium2 take 2."""
    magnitude: int = 10
    """Strength of the operations, from 0 to 20; big_vision's light2 takes 10, medium2 15."""

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
    """Which samples are trained on, in which order, and how they are read and decoded."""

    url: str = ""
    """Dataset to train on: a folder or s3://bucket/prefix."""
    mix: tuple[tuple[str, float], ...] = ()
    """Several datasets instead of one: URL WEIGHT URL WEIGHT ...; the weight is its share of the samples drawn, in any
    unit."""
    lanes: int = 64
    """Parallel sequences that the sample order is cut into; must divide the global batch; at least one per rank."""
    window_blocks: int = 4
    """Blocks that a lane shuffles together; the shuffle reaches over lanes x window_blocks blocks of each dataset."""
    augment: AugmentConfig = AugmentConfig()
    randaugment: RandAugmentConfig = RandAugmentConfig()
    mixup: MixupConfig = MixupConfig()
    reading: ReadConfig = ReadConfig()
    num_threads: int = 0
    """Decoding threads per rank; 0: the rank's share of the machine's cores."""
    steps_ahead: int = 3
    """Batches prepared ahead of the step that needs them."""
    memory_limit_bytes: int = 16_000_000_000
    """Most bytes that all ranks of a host may read ahead; a start that could exceed it is refused."""
    max_quarantined: float = 0.001
    """Share of samples, 0 to 1, that may be replaced because they are damaged before the run stops."""
    allow_other_decoder: bool = False
    """Continue a run although the decoding libraries' versions, and so the pixels, may differ."""

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

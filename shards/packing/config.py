"""Which duplicates are left out of a dataset. Loads neither numpy nor Pillow: the command line reads it."""

from dataclasses import dataclass
from typing import Literal

from shards.errors import UserError
from shards.images.config import DEFAULT_MAX_DISTANCE, HASH_BITS


@dataclass(frozen=True, kw_only=True)
class Dedup:
    """Which images are left out because there is another."""

    duplicates: Literal["first", "merge", "keep"] = "first"
    """Images with equal bytes: first keeps the source's first with its own labels, merge keeps it with the labels of
    all, keep keeps every one."""
    against: tuple[str, ...] = ()
    """Packed evaluation sets (URLs) whose images, mirrored ones included, must not be in the collection."""
    max_distance: int = DEFAULT_MAX_DISTANCE
    """Bits by which perceptual hashes of near-duplicates may differ, 0 to 127; images that close to an evaluation image
    are left out."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_distance < HASH_BITS // 2:
            message = f"--dedup.max-distance is {self.max_distance} bits; allowed are 0 to {HASH_BITS // 2 - 1}"
            raise UserError(f"{message} of the hash's {HASH_BITS}")

"""Which duplicates are left out of a dataset. Loads neither numpy nor Pillow: the command line reads it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shards.images.config import DEFAULT_MAX_DISTANCE, HASH_BITS
from shards.schema.config_values import Range, refuse_wrong_values

MOST_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Dedup:
    """Which images are left out as duplicates."""

    duplicates: Literal["first", "merge", "keep"] = "first"
    """Images with equal bytes: first keeps the first in the source with its own labels, merge keeps it with the
    labels of all, keep keeps every one."""
    against: tuple[str, ...] = ()
    """Packed evaluation sets (URLs) whose images, mirrored ones included, must not be in the dataset."""
    max_distance: Annotated[int, Range(0, HASH_BITS // 2 - 1)] = DEFAULT_MAX_DISTANCE
    """Bits by which perceptual hashes of near-duplicates may differ, 0 to 127; images that close to an evaluation image
    are left out."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="dedup.")

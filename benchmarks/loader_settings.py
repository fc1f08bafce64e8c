"""Settings that all arms of the loader benchmark share."""

from dataclasses import dataclass

BLOCK = 64  # images of a block of our shards
MIN_AREA = 0.05  # of the inception crop; torchvision's own default is 0.08


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`work` holds the layouts. `workers`: processes of the peers, or threads of ours and of the native ones. Our
    shuffle covers lanes x window_blocks blocks of 64 images at a time, on top of packing's permutation."""

    work: str
    images: int
    batch: int = 64
    workers: int = 2
    lanes: int = 8
    window_blocks: int = 1
    image_size: int = 224

    @property
    def reach(self) -> int:
        """Images that our shuffle covers at a time, and the buffers of peers that hold images to shuffle them."""
        return min(self.images, self.lanes * self.window_blocks * BLOCK)

    def __post_init__(self) -> None:
        if self.images % self.batch or self.images < 2 * self.batch:
            raise ValueError(f"images is {self.images}; allowed: multiples of the batch, {self.batch}, from two on")

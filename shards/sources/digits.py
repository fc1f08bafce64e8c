"""The 1,797 real handwritten digits of scikit-learn (8x8, values 0..16), enlarged to 32x32 PNG.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998, as in
`sklearn.datasets.load_digits`. The images are part of the scikit-learn wheel, so they need no network.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shards.config_values import refuse_wrong_values
from shards.errors import UserError
from shards.sources.entry import Entry, ImageBytes, too_large

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NUM_DIGITS = 1797
ENLARGE = 4


@dataclass(frozen=True, kw_only=True)
class DigitsSource:
    """The digits as a source. The test split is a fixed fifth of the digits, chosen by our keyed hash of the index."""

    staged: ClassVar[bool] = False
    labels_are_names: ClassVar[bool] = True
    kind: Literal["digits"] = "digits"
    split: Literal["train", "test"] = "train"
    """Split of the digits; --split sets it."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="source.")

    def entries(self) -> Iterator[Entry]:
        """Yields the images in the order of load_digits."""
        _, labels = _load()
        for index in split_indices(self.split).tolist():
            yield Entry(locator=str(index), name=f"digits/{index:04d}.png", labels=(str(labels[index]),))

    def images(self, entries: Sequence[Entry], *, max_bytes: int) -> Iterator[tuple[Entry, ImageBytes]]:
        """Yields the images, each computed again from its digit."""
        images = self.reader().read_many([entry.locator for entry in entries])
        for entry, image in zip(entries, images, strict=True):
            yield entry, image if len(image) <= max_bytes else too_large(len(image), max_bytes=max_bytes)

    def reader(self) -> "DigitsReader":
        """Returns a reader that finds images by their index."""
        return DigitsReader()

    def known_labels(self) -> tuple[str, ...]:
        """Returns the labels "0" to "9"."""
        return tuple("0123456789")


class DigitsReader:
    """Makes PNGs of digits by their indices."""

    def read_many(self, locators: Sequence[str]) -> Iterator[bytes]:
        """Yields the PNG of each index. The same index and Pillow version always give the same bytes."""
        images, _ = _load()
        for locator in locators:
            yield enlarged_png(images[int(locator)])


def split_indices(split: str) -> "NDArray[np.int64]":
    """Returns the indices of a split in ascending order: 1,438 for train, 359 for test."""
    import numpy as np

    from shards.hashing import derive_key, hash_array

    order = np.argsort(hash_array(np.arange(NUM_DIGITS), key=derive_key(1797, 80, 20)), kind="stable")
    num_test = NUM_DIGITS // 5
    chosen = order[:num_test] if split == "test" else order[num_test:]
    return np.sort(chosen).astype(np.int64)


def enlarged_png(digit: "NDArray[np.float64]") -> bytes:
    """Turns 8x8 values in 0..16 into a 32x32 RGB PNG. Every value becomes a square of 4x4 pixels."""
    import numpy as np
    from PIL import Image

    grey = np.rint(digit * (255 / 16)).astype(np.uint8)
    # [8, 8] -> [32, 32] -> [32, 32, 3]
    pixels = np.repeat(np.repeat(grey, ENLARGE, axis=0), ENLARGE, axis=1)[..., None].repeat(3, axis=2)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG", compress_level=6)
    return file.getvalue()


def _load() -> "tuple[NDArray[np.float64], NDArray[np.int64]]":
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        message = "the digits source needs scikit-learn; install it with: pip install 'patchline[demo]'"
        raise UserError(message) from error
    digits = load_digits()
    return digits.images, digits.target

"""Our own keyed integer hash, which no library version can change, and the list of the purposes of its keys.

The mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014). Everything that must be random and repeatable (sample order, augmentation, initial weights) uses it.

A key is derived from some words (seed, epoch, ...) and, last, the number of its purpose. No two purposes have both the
same number and the same count of words, so no two kinds of draws share a key. Only the number 5 is used twice:
rotations have one word, dropout has four. The numbers decide the results of every run and dataset: never change one.

Five kinds of keys have no Purpose. Initial weights derive them from the seed and the CRC-32 of the tensor's name; the
pictures of a card, from a constant and the shard; the split of the digits, from three constants; repeated tries for a
weight of mixup or CutMix, from that weight's key and the number of the try; the check of gradients, from two numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF
_PART = 16_384
_ROUNDS = ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27))  # the multiplier and shift of each round of the mixer


def mix(value: int) -> int:
    """Applies the finaliser of SplitMix64 to one 64-bit integer."""
    z = value & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def derive_key(*values: int) -> int:
    """Returns a 64-bit key from integers such as (seed, epoch, purpose). Different tuples give unrelated keys.

    If a Purpose fits, call its `key` instead.
    """
    key = 0
    for value in values:
        key = mix((key + _GOLDEN) ^ mix((value & _MASK) + _GOLDEN))
    return key


def hash_array(values: NDArray[np.int64] | NDArray[np.uint64], *, key: int) -> NDArray[np.uint64]:
    """Returns the 64-bit hash of every element under `key`, in the shape of `values`. The results never change."""
    z = values.astype(np.uint64, order="C")
    for part in _parts(z):
        _hash(part, key=key)
    return z


def hash_order(num_values: int, *, key: int) -> NDArray[np.int64]:
    """Returns the integers from 0 to `num_values` - 1 in the order of their hashes under `key`: int64[num_values].

    Every step of the hash can be undone, so no two hashes are equal, and the sorted hashes say which integers they are
    of. Sorting them in place and undoing the steps takes half the time of an argsort.
    """
    z = hash_array(np.arange(num_values, dtype=np.int64), key=key)
    z.sort()
    for part in _parts(z):
        _undo_hash(part, key=key)
    return z.view(np.int64)


def _hash(z: NDArray[np.uint64], *, key: int) -> None:
    z *= np.uint64(_GOLDEN)
    z += np.uint64(key & _MASK)
    for multiplier, shift in _ROUNDS:
        z ^= z >> np.uint64(shift)
        z *= np.uint64(multiplier)
    z ^= z >> np.uint64(31)


def _undo_hash(z: NDArray[np.uint64], *, key: int) -> None:
    z ^= (z >> np.uint64(31)) ^ (z >> np.uint64(62))
    for multiplier, shift in reversed(_ROUNDS):
        z *= np.uint64(pow(multiplier, -1, _MASK + 1))
        z ^= (z >> np.uint64(shift)) ^ (z >> np.uint64(2 * shift))
    z -= np.uint64(key & _MASK)
    z *= np.uint64(pow(_GOLDEN, -1, _MASK + 1))


def _parts(z: NDArray[np.uint64]) -> Iterator[NDArray[np.uint64]]:
    """Yields views of a contiguous array, each small enough to stay in a core's cache over all steps of the hash."""
    flat = z.reshape(-1)
    for first in range(0, flat.size, _PART):
        yield flat[first : first + _PART]


def uniforms(values: NDArray[np.int64] | NDArray[np.uint64], num_draws: int, *, key: int) -> NDArray[np.float64]:
    """Returns counter-based uniform draws in [0, 1), of shape (*values.shape, num_draws). They depend only on the value
    and the key."""
    base = hash_array(values, key=key)
    counters = np.arange(1, num_draws + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits = hash_array(base[..., None] + counters, key=mix(key + 1))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class Purpose:
    """What a key is used for. The key is derived from the values of `words`, followed by `number`."""

    number: int
    words: tuple[str, ...]
    draws: str

    def key(self, *values: int) -> int:
        """Returns the 64-bit key for these values of `words`."""
        if len(values) != len(self.words):
            raise TypeError(f"a key that draws {self.draws} takes {', '.join(self.words)}, not {len(values)} values")
        return derive_key(*values, self.number)


BLOCKS = Purpose(1, ("seed", "epoch"), "the order of an epoch's blocks")
WINDOWS = Purpose(2, ("seed", "epoch"), "the order of a window's samples")
CROPS = Purpose(3, ("seed", "epoch"), "the crop and flip of a sample")
SUBSTITUTES = Purpose(4, ("seed", "sample", "number"), "the sample that replaces a damaged one")
ROTATIONS = Purpose(5, ("seed",), "where each lane group starts in the period of a mixture")
DROPOUT = Purpose(5, ("seed", "step", "micro_step", "rank"), "the dropout masks of a micro-batch")
MIXUP = Purpose(6, ("seed", "step"), "the mixup weights of a batch")
DATASETS = Purpose(7, ("seed", "dataset"), "the seed of each further dataset of a mixture")
OPERATIONS = Purpose(8, ("seed", "epoch"), "the RandAugment operations of a sample")
STOCHASTIC_DEPTH = Purpose(9, ("seed", "step"), "the branches that each image of a batch leaves out")
MASKED_PATCHES = Purpose(10, ("seed", "step"), "the patches of each image of a batch that are corrupted")
REPEATS = Purpose(0x72657074, ("seed", "repeat"), "the seed that augments each further view of a sample")  # "rept"
COLOURS = Purpose(0x636F6C72, ("seed", "epoch"), "3-Augment and the colour jitter of a sample")  # "colr"
CUTMIX = Purpose(0x6375746D, ("seed", "step"), "which pairs of a batch get CutMix, and their boxes")  # "cutm"
PATCH_DROPOUT = Purpose(
    0x70647270, ("seed", "step"), "the patches of each image of a batch that are left out"
)  # "pdrp"
PATCH_SIZES = Purpose(0x7073697A, ("seed", "step"), "the patch size of a batch")  # "psiz"
SHOTS = Purpose(0x73686F74, ("seed",), "the few images of each class that a representation is measured with")  # "shot"
SUBSETS = Purpose(0x73756273, ("seed",), "the samples of a part of a dataset")  # "subs"
HELD_OUT = Purpose(0x68656C64, ("seed",), "the samples that are held out of training")  # "held"
TRANSFORMS = Purpose(0x7472616E, ("seed", "epoch"), "the seed of a transform of one's own for a sample")  # "tran"
EXAMPLES = Purpose(0x6578616D, ("seed",), "the right answers that are shown beside scores")  # "exam"
PACKING = Purpose(0x7061636B, ("seed",), "the order in which a dataset's samples are packed")  # "pack"
TEST_SPLIT = Purpose(0x74657374, ("seed",), "the images that packing sets aside as a test split")  # "test"

"""A keyed integer hash of our own, so that no library version can change it.

The mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014). Everything that must be random and repeatable (sample order, augmentation, initial weights) uses it.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF


def mix(value: int) -> int:
    """SplitMix64's finaliser of one 64-bit integer, as a Python int."""
    z = value & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def derive_key(*values: int) -> int:
    """A 64-bit key from integers such as (seed, epoch, purpose); different tuples give unrelated keys.

    shards/key_purposes.py lists the purposes; derive keys through it.
    """
    key = 0
    for value in values:
        key = mix((key + _GOLDEN) ^ mix((value & _MASK) + _GOLDEN))
    return key


def hash_array(values: NDArray[np.int64] | NDArray[np.uint64], *, key: int) -> NDArray[np.uint64]:
    """64-bit hash of every element under `key`. Same shape as `values`. The results never change."""
    z = values.astype(np.uint64)
    z *= np.uint64(_GOLDEN)
    z += np.uint64(key & _MASK)
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(multiplier)
    z ^= z >> np.uint64(31)
    return z


def uniforms(values: NDArray[np.int64] | NDArray[np.uint64], num_draws: int, *, key: int) -> NDArray[np.float64]:
    """Counter-based uniform draws in [0, 1): shape (*values.shape, num_draws), the same for the same value and key."""
    base = hash_array(values, key=key)
    counters = np.arange(1, num_draws + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits = hash_array(base[..., None] + counters, key=mix(key + 1))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53

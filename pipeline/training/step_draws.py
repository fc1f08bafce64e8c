"""Which patches masked patch prediction corrupts (appendix B.1.2): no boundary between ranks or micro-batches matters.

Half of the patches of each image, exactly (rounded down, at least 1): 80 % of them become the [mask] embedding, 10 %
another patch of the same image, and 10 % stay. The paper does not say whose patch takes the place: one of the same
image needs no other image, so that no rank asks another. The draws are a function of (seed, step, place in the global
batch) alone, as those of stochastic depth are.
"""

import numpy as np
from numpy.typing import NDArray

from shards.hashing import uniforms
from shards.key_purposes import MASKED_PATCHES

_MASKED, _MASKED_OR_OTHER = 0.8, 0.9


def patch_sources(
    step: int, positions_in_batch: NDArray[np.int64], *, seed: int, num_patches: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where each patch is taken from, int64[n, N]: 0 to N - 1, or N for [mask]; and whether it is to be predicted,
    bool[n, N]. `positions_in_batch`, int64[n]: places in the global batch. ValueError for fewer than 2 patches."""
    if num_patches < 2:
        raise ValueError(f"num_patches is {num_patches}; allowed: 2 or more, since half are corrupted")
    draws = uniforms(positions_in_batch, 3 * num_patches, key=MASKED_PATCHES.key(seed, step))
    order, kind, other = draws.reshape(-1, 3, num_patches).transpose(1, 0, 2)
    ranks = order.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    is_corrupted = ranks < num_patches // 2
    own = np.arange(num_patches)
    others = (own + 1 + (other * (num_patches - 1)).astype(np.int64)) % num_patches  # any but its own
    replaced = np.where(kind < _MASKED, num_patches, np.where(kind < _MASKED_OR_OTHER, others, own))
    return np.where(is_corrupted, replaced, own), is_corrupted

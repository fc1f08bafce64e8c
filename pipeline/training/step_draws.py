"""Random draws of a step that no boundary between ranks or micro-batches changes.

They are functions of (seed, step, place in the global batch) alone, made on the host and passed to the model. So a run
that continues, on any number of ranks, and a block that is computed again in the backward pass or compiled have the
same draws.

Masked patch prediction (appendix B.1.2) corrupts exactly half of the patches of each image (rounded down, at least 1):
80 % of them become the [mask] embedding, 10 % another patch of the same image, and 10 % stay. The paper does not say
whose patch takes the place; one of the same image needs no other image, so that no rank asks another.

Stochastic depth (Huang et al., arXiv 1603.09382) leaves out branches of the transformer for each image: attention and
MLP of block l of L, each with the probability rate x l / (L - 1), l from 0, as in timm (drop_path_rate). A branch that
is kept is divided by the probability of that, so an evaluation needs all branches and no factor.
"""

import numpy as np
from numpy.typing import NDArray

from shards.hashing import MASKED_PATCHES, STOCHASTIC_DEPTH, uniforms

_BRANCHES = 2


def branch_factors(
    step: int, positions_in_batch: NDArray[np.int64], *, seed: int, rate: float, depth: int
) -> NDArray[np.float32]:
    """What each branch is multiplied by, 0 or 1 / (1 - its rate): float32[depth, n, 2], attention first.

    `positions_in_batch`, int64[n]: places in the global batch. `rate`: of the last block, from 0 to below 1.
    """
    if not 0 <= rate < 1 or depth < 1:
        raise ValueError(f"rate is {rate} and depth {depth}; allowed: 0 to below 1, and 1 or more")
    rates_L11 = (rate * np.arange(depth) / max(1, depth - 1)).reshape(-1, 1, 1)
    draws = uniforms(positions_in_batch, _BRANCHES * depth, key=STOCHASTIC_DEPTH.key(seed, step))
    # (n, L * 2) -> (L, n, 2)
    draws_Ln2 = draws.reshape(-1, depth, _BRANCHES).transpose(1, 0, 2)
    factors_Ln2: NDArray[np.float32] = np.where(draws_Ln2 >= rates_L11, 1 / (1 - rates_L11), 0.0).astype(np.float32)
    return factors_Ln2


_MASKED, _MASKED_OR_OTHER = 0.8, 0.9


def patch_sources(
    step: int, positions_in_batch: NDArray[np.int64], *, seed: int, num_patches: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The source of each patch, int64[n, N]: 0 to N - 1, or N for [mask]; and whether it is to be predicted,
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

"""Stochastic depth (Huang et al., arXiv 1603.09382) that no boundary between ranks or micro-batches can change.

In each step, each image leaves out branches of the transformer: attention and MLP of block l of L, each with the
probability rate x l / (L - 1), l from 0, as in timm (drop_path_rate). A branch that is kept is divided by the
probability of that, so an evaluation needs all branches and no factor. The draws are a function of (seed, step, place
in the global batch) alone, made on the host and passed to the model: a run that continues, on any number of ranks, and
a block that is computed again in the backward pass or compiled have the same.
"""

import numpy as np
from numpy.typing import NDArray

from shards.hashing import uniforms
from shards.key_purposes import STOCHASTIC_DEPTH

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

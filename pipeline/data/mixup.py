"""Mixup (Zhang et al., arXiv 1710.09412) that no boundary between ranks or micro-batches can change.

Entries 2k and 2k + 1 of the global batch are partners and share one weight, a function of (seed, step, k) alone:
mixed[i] = w x[i] + (1 - w) x[partner], images and targets alike. As in big_vision, w is the larger of a and 1 - a, with
a from Beta(alpha, alpha): each image stays more itself than its partner (in a pair, 1 - a would only exchange the two).
big_vision draws one weight a step for the whole batch and takes the entry before as the partner (a roll by one), which
crosses every boundary: there, another number of ranks or micro-batches either moves pixels between devices or makes
another run. One weight per pair has the same distribution for each image and, within a batch, more variety.

Weights are multiples of 2 ** -16. Products with 8-bit pixels are then exact in fp32, so that mixed images are the same
bits on any device; and the last bits of log and exp, which differ between processors and libraries, are rounded away.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from shards.hashing import MIXUP, derive_key, uniforms

MIXUP_VERSION = 1  # part of the position: other weights are another run
UNIT = 2.0**-16


def mix_weights(step: int, positions_in_batch: NDArray[np.int64], *, seed: int, alpha: float) -> NDArray[np.float32]:
    """Each entry's own weight, float32[n] in [0.5, 1]. `positions_in_batch`, int64[n], are places in the global batch
    and hold whole pairs side by side: 2k, 2k + 1. `alpha` in (0, 1]."""
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha is {alpha}, not in (0, 1]")
    beta = symmetric_beta(pairs_of(positions_in_batch), alpha=alpha, key=MIXUP.key(seed, step))
    weights = np.round(np.maximum(beta, 1 - beta) / UNIT) * UNIT
    return np.repeat(weights.astype(np.float32), 2)


def pairs_of(positions_in_batch: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number k of each pair, int64[n / 2]. ValueError if the positions are not whole pairs."""
    firsts = positions_in_batch[::2]
    if positions_in_batch.size % 2 or (firsts % 2).any() or (positions_in_batch[1::2] != firsts + 1).any():
        raise ValueError(f"positions {positions_in_batch} are not whole pairs (2k, 2k + 1)")
    return firsts // 2


def mix_images(images_BHW3: torch.Tensor, weights_B: torch.Tensor) -> torch.Tensor:
    """float32[n, S, S, 3], 0 to 255, of uint8[n, S, S, 3] images in whole pairs and their float32[n] weights."""
    return _mixed(images_BHW3.float(), weights_B)


def mix_targets(targets_BK: torch.Tensor, weights_B: torch.Tensor) -> torch.Tensor:
    """float32[n, K] of the float32[n, K] targets of images in whole pairs and their float32[n] weights."""
    return _mixed(targets_BK, weights_B)


def _mixed(values: torch.Tensor, weights_B: torch.Tensor) -> torch.Tensor:
    # (B, ...) -> (B / 2, 2, ...)
    pairs = values.reshape(-1, 2, *values.shape[1:])
    weights = weights_B.reshape(-1, 2, *[1] * (values.dim() - 1))
    mixed: torch.Tensor = weights * pairs + (1 - weights) * pairs.flip(1)
    return mixed.reshape(values.shape)


def symmetric_beta(values: NDArray[np.int64], *, alpha: float, key: int) -> NDArray[np.float64]:
    """A draw of Beta(alpha, alpha) for each value, by Joehnk's method (Metrika 8, 1964): with uniform u and v,
    x = u ** (1 / alpha) and y = v ** (1 / alpha), x / (x + y) wherever x + y <= 1, else another try (at least half of
    all tries succeed for alpha <= 1). In logarithms, since a small alpha would underflow."""
    beta = np.empty(values.size)
    waiting = np.arange(values.size)
    round_number = 0
    while waiting.size:
        draws = uniforms(values[waiting], 2, key=derive_key(key, round_number))
        log_x, log_y = np.log(1 - draws.T) / alpha  # 1 - u is never 0
        log_sum = np.logaddexp(log_x, log_y)
        fits = log_sum <= 0
        beta[waiting[fits]] = np.exp(log_x - log_sum)[fits]
        waiting = waiting[~fits]
        round_number += 1
    return beta

"""Mixup and CutMix, in pairs that no boundary between ranks or micro-batches can split.

Entries 2k and 2k + 1 of the global batch are partners. The draws for a pair depend only on (seed, step, k).

Mixup (Zhang et al., arXiv 1710.09412): mixed[i] = w x[i] + (1 - w) x[partner], images and targets alike. As in
big_vision, w is the larger of a and 1 - a, with a from Beta(alpha, alpha), so each image keeps the larger share (within
a pair, 1 - a would only exchange the two). big_vision draws one weight per step for the whole batch, and an image's
partner is the entry before it (a roll by one). Such pairs cross every boundary: with another number of ranks or
micro-batches, pixels would have to move between devices, or the result would change. One weight per pair has the same
distribution for each image, and varies within a batch.

CutMix (Yun et al., arXiv 1905.04899), as in timm's Mixup (data/mixup.py), with which DeiT III trains. With a from
Beta(alpha, alpha), the box covers the share 1 - a of the image: its sides are S sqrt(1 - a), rounded down to an even
number. Its centre is uniform in the image, and it is cut off at the image's edges. The two images of a pair exchange
their pixels in the box, and an image's target keeps the share of the pixels that the image keeps. If mixup is on, too,
each pair gets mixup or CutMix with equal chances. timm chooses once per step, and draws one box for the whole batch;
here, each image has the same distribution as in timm.

Weights are multiples of 2 ** -16. Products with 8-bit pixels are then exact in fp32, so that mixed images have the same
bits on any device. Rounding also removes the last bits of log and exp, which differ between processors and libraries.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.config import MixupConfig
from shards.hashing import CUTMIX, MIXUP, derive_key, uniforms

MIXUP_VERSION = 1  # part of the position: a run with other weights is a different run
UNIT = 2.0**-16


def mix_weights(step: int, positions_in_batch: NDArray[np.int64], *, seed: int, alpha: float) -> NDArray[np.float32]:
    """Returns the weight of each entry's own pixels, float32[n] in [0.5, 1]. `positions_in_batch`, int64[n]: places in
    the global batch, in whole pairs 2k, 2k + 1. `alpha` is in (0, 1]."""
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha is {alpha}, not in (0, 1]")
    beta = symmetric_beta(pairs_of(positions_in_batch), alpha=alpha, key=MIXUP.key(seed, step))
    weights = np.round(np.maximum(beta, 1 - beta) / UNIT) * UNIT
    return np.repeat(weights.astype(np.float32), 2)


def pairs_of(positions_in_batch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the number k of each pair, int64[n / 2]. Raises ValueError if the positions are not whole pairs."""
    firsts = positions_in_batch[::2]
    if positions_in_batch.size % 2 or (firsts % 2).any() or (positions_in_batch[1::2] != firsts + 1).any():
        raise ValueError(f"positions {positions_in_batch} are not whole pairs (2k, 2k + 1)")
    return firsts // 2


def mix_images(images_BHW3: torch.Tensor, weights_B: torch.Tensor) -> torch.Tensor:
    """Mixes uint8[n, S, S, 3] images in whole pairs by their weights, float32[n]. Returns float32[n, S, S, 3], 0 to
    255."""
    return _mixed(images_BHW3.float(), weights_B)


def mix_targets(targets_BK: torch.Tensor, weights_B: torch.Tensor) -> torch.Tensor:
    """Mixes the targets, float32[n, K], of images in whole pairs by their weights, float32[n]. Returns float32[n,
    K]."""
    return _mixed(targets_BK, weights_B)


def _mixed(values: torch.Tensor, weights_B: torch.Tensor) -> torch.Tensor:
    # (B, ...) -> (B / 2, 2, ...)
    pairs = values.reshape(-1, 2, *values.shape[1:])
    weights = weights_B.reshape(-1, 2, *[1] * (values.dim() - 1))
    mixed: torch.Tensor = weights * pairs + (1 - weights) * pairs.flip(1)
    return mixed.reshape(values.shape)


def symmetric_beta(values: NDArray[np.int64], *, alpha: float, key: int) -> NDArray[np.float64]:
    """Returns a draw of Beta(alpha, alpha) for each value, by Joehnk's method (Metrika 8, 1964). With uniform u and v,
    x = u ** (1 / alpha) and y = v ** (1 / alpha), the draw is x / (x + y) if x + y <= 1; otherwise u and v are drawn
    again. For alpha <= 1, at least half of all tries succeed. The computation uses logarithms, since x and y would
    underflow for a small alpha."""
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


@dataclass(frozen=True, kw_only=True)
class MixOnDevice:
    """A Mix as tensors. `weights` is None without mixup; `boxes` is None without CutMix."""

    weights: torch.Tensor | None
    shares: torch.Tensor
    boxes: torch.Tensor | None

    def images(self, images_BHW3: torch.Tensor) -> torch.Tensor:
        """Mixes uint8[n, S, S, 3] images. Returns [n, S, S, 3], 0 to 255: float32 with mixup, else uint8."""
        mixed_BHW3 = images_BHW3 if self.weights is None else mix_images(images_BHW3, self.weights)
        if self.boxes is None:
            return mixed_BHW3
        # (B, H, W, 3) -> (B / 2, 2, H, W, 3), and each image's partner in its place
        partners_BHW3 = images_BHW3.reshape(-1, 2, *images_BHW3.shape[1:]).flip(1).reshape(images_BHW3.shape)
        top, bottom, left, right = (side[:, None] for side in self.boxes.unbind(1))
        rows_H = torch.arange(images_BHW3.shape[1], device=images_BHW3.device)
        columns_W = torch.arange(images_BHW3.shape[2], device=images_BHW3.device)
        in_rows_BH, in_columns_BW = (rows_H >= top) & (rows_H < bottom), (columns_W >= left) & (columns_W < right)
        is_in_box_BHW1 = (in_rows_BH[:, :, None] & in_columns_BW[:, None, :])[..., None]
        return torch.where(is_in_box_BHW1, partners_BHW3.to(mixed_BHW3.dtype), mixed_BHW3)

    def targets(self, targets_BK: torch.Tensor, *, is_binary: bool) -> torch.Tensor:
        """Mixes the images' targets, float32[n, K]. Returns float32[n, K]. `is_binary`: the result is 1 for each class
        that either image of a pair has, else 0."""
        mixed_BK = mix_targets(targets_BK, self.shares)
        return (mixed_BK > 0).float() if is_binary else mixed_BK


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The draws for entries in whole pairs. `weights`, float32[n]: the weight of an entry's own pixels in mixup, 1 if
    its pair gets CutMix. `shares`, float32[n]: the weight of the entry's own target. `boxes`, int64[n, 4]: the top,
    bottom, left and right of the pixels that it takes from its partner, all 0 if its pair gets mixup."""

    weights: NDArray[np.float32] | None
    shares: NDArray[np.float32]
    boxes: NDArray[np.int64] | None

    def on(self, to_device: Callable[[NDArray[np.generic]], torch.Tensor] = torch.from_numpy) -> MixOnDevice:
        """Returns the mix as tensors, which `to_device` makes from the arrays."""
        return MixOnDevice(
            weights=None if self.weights is None else to_device(self.weights),
            shares=to_device(self.shares),
            boxes=None if self.boxes is None else to_device(self.boxes),
        )


def draw_mix(
    step: int, positions_in_batch: NDArray[np.int64], *, seed: int, config: MixupConfig, image_size: int
) -> Mix:
    """Returns the mix of the entries at these places of the global batch, int64[n], which are whole pairs. A pair's
    draws depend only on (seed, step, pair). `config` has mixup, CutMix or both."""
    weights = None
    if config.alpha:
        weights = mix_weights(step, positions_in_batch, seed=seed, alpha=config.alpha)
        if not config.cutmix_alpha:
            return Mix(weights=weights, shares=weights, boxes=None)
    pairs, key = pairs_of(positions_in_batch), CUTMIX.key(seed, step)
    choice, centre_row, centre_column = uniforms(pairs, 3, key=key).T
    is_cut = choice < 0.5 if config.alpha else np.full(pairs.size, fill_value=True)
    # The shares are rounded like mixup's weights, since the last bits of log and exp differ between processors.
    kept = np.round(symmetric_beta(pairs, alpha=config.cutmix_alpha, key=key) / UNIT) * UNIT
    half = (image_size * np.sqrt(1 - kept)).astype(np.int64) // 2
    sides = []
    for centre in (centre_row, centre_column):
        place = (centre * image_size).astype(np.int64)
        sides += [np.clip(place - half, 0, image_size), np.clip(place + half, 0, image_size)]
    boxes = np.where(is_cut[:, None], np.stack(sides, axis=1), 0)
    top, bottom, left, right = boxes.T
    shares = np.repeat((1 - (bottom - top) * (right - left) / image_size**2).astype(np.float32), 2)
    if weights is not None:
        is_cut_entry = np.repeat(is_cut, 2)
        shares = np.where(is_cut_entry, shares, weights)
        weights = np.where(is_cut_entry, np.float32(1), weights)
    return Mix(weights=weights, shares=shares, boxes=np.repeat(boxes, 2, axis=0))

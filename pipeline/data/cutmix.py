"""CutMix (Yun et al., arXiv 1905.04899) beside mixup, in the same pairs, which no boundary between ranks can split.

As in timm's Mixup (data/mixup.py), with which DeiT III trains: of the share 1 - a, with a from Beta(alpha, alpha), a
box has the sides S sqrt(1 - a), rounded down, around a point that is uniform in the image, and is cut off at its edges.
Both images of a pair exchange their pixels in the box, and an image's target keeps the share of pixels that it has
kept. With mixup too, each pair gets one of the two with equal chances. timm chooses once per step, and draws one box
for the whole batch; each image has the same distribution here, as in mixup.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.data.config import MixupConfig
from pipeline.data.mixup import UNIT, mix_images, mix_targets, mix_weights, pairs_of, symmetric_beta
from shards.hashing import CUTMIX, uniforms


@dataclass(frozen=True, kw_only=True)
class MixOnDevice:
    """The same as a Mix, as tensors. `weights` is None without mixup, `boxes` without CutMix."""

    weights: torch.Tensor | None
    shares: torch.Tensor
    boxes: torch.Tensor | None

    def images(self, images_BHW3: torch.Tensor) -> torch.Tensor:
        """[n, S, S, 3], 0 to 255, of uint8[n, S, S, 3] images: float32 with mixup, else uint8."""
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
        """float32[n, K] of the targets of the images; `is_binary`: 1 for each class that either image has."""
        mixed_BK = mix_targets(targets_BK, self.shares)
        return (mixed_BK > 0).float() if is_binary else mixed_BK


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What is drawn for the entries of whole pairs: `weights`, float32[n], of an entry's own pixels in mixup, 1 if its
    pair gets CutMix; `shares`, float32[n], of its own target; `boxes`, int64[n, 4], the top, bottom, left and right of
    the pixels that it takes from its partner, all 0 if its pair gets mixup."""

    weights: NDArray[np.float32] | None
    shares: NDArray[np.float32]
    boxes: NDArray[np.int64] | None

    def on(self, to_device: Callable[[NDArray[np.generic]], torch.Tensor] = torch.from_numpy) -> MixOnDevice:
        """The same as tensors, by `to_device`."""
        return MixOnDevice(
            weights=None if self.weights is None else to_device(self.weights),
            shares=to_device(self.shares),
            boxes=None if self.boxes is None else to_device(self.boxes),
        )


def draw_mix(
    step: int, positions_in_batch: NDArray[np.int64], *, seed: int, config: MixupConfig, image_size: int
) -> Mix:
    """The mix of entries at these places of the global batch, int64[n], which are whole pairs. A function of (seed,
    step, pair) alone. `config` has mixup, CutMix or both."""
    weights = None
    if config.alpha:
        weights = mix_weights(step, positions_in_batch, seed=seed, alpha=config.alpha)
        if not config.cutmix_alpha:
            return Mix(weights=weights, shares=weights, boxes=None)
    pairs, key = pairs_of(positions_in_batch), CUTMIX.key(seed, step)
    choice, centre_row, centre_column = uniforms(pairs, 3, key=key).T
    is_cut = choice < 0.5 if config.alpha else np.full(pairs.size, fill_value=True)
    # Rounded as mixup's weights: the last bits of log and exp differ between processors.
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

"""Sizes of images and patches in a config.json: they declare the grid of its position embeddings."""

from typing import Any

from shards.errors import UserError
from shards.schema.config_values import shown_value

Pair = tuple[int, int]  # height, width


def pair_of(value: Any, *, key: str, where: str) -> Pair:
    """Height and width, from one number for both or from two. Raises UserError for anything else."""
    pair = [value, value] if not isinstance(value, list | tuple) else value
    if len(pair) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in pair):
        raise UserError(
            f"config.json beside {where!r} says {key} {shown_value(value)}; allowed: a number of pixels of 1 or more, "
            "or two (height, width)"
        )
    return pair[0], pair[1]


def grid_of(image: Pair, patch: Pair) -> Pair:
    """Patches down and across; the convolution that embeds them drops incomplete patches."""
    return image[0] // patch[0], image[1] // patch[1]

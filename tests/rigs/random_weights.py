"""Random weights for an engine whose model came on meta, and so has none."""

import math
import zlib

import torch

from pipeline.checkpoints.checkpoint import Fragment
from pipeline.training.zero.engine import Engine


def fill_randomly(engine: Engine, *, std: float) -> None:
    """The same normal weights on any number of ranks and in any stage. Collective."""

    def fill(fragment: Fragment, slot: str) -> None:
        generator = torch.Generator().manual_seed(zlib.crc32(fragment.name.encode()))
        values = torch.randn(math.prod(engine.shapes[fragment.name]), generator=generator)
        fragment.slots[slot].copy_(std * values[fragment.start : fragment.start + fragment.length])

    engine.load(fill, moments=[], num_updates=0)

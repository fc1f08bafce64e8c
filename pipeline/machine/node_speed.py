"""What a short job on every node tries: a timed product of matrices, and an exchange between all ranks."""

import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeline.ranks.world import World, joined
from shards.errors import TransientError, UserError

_REPEATS = 5
_SIDE = {"cpu": 1024, "cuda": 8192}
_EXCHANGE_LIMIT = timedelta(seconds=60)


def product_seconds(device: torch.device) -> float:
    """Median seconds of a square product, in bf16 on GPUs and fp32 on CPUs; the first one is not counted."""
    side = _SIDE.get(device.type, _SIDE["cpu"])
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    first = torch.randn(side, side, device=device, dtype=kind)
    taken = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        product = first @ first
        float(product[0, 0])  # waits for the device
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def exchange(world: World, *, limit: timedelta = _EXCHANGE_LIMIT) -> str:
    """Adds up a number over all ranks. Why it failed; empty if the sum is right."""
    try:
        with joined(world, timeout=limit, join_timeout=limit):
            total = torch.ones(1, device=world.device)
            dist.all_reduce(total)
            found = int(total.item())
    except (TransientError, UserError, dist.DistError) as error:
        return " ".join(str(error).split())[:300]
    return "" if found == world.num_ranks else f"the sum over {world.num_ranks} ranks is {found}"

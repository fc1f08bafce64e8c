"""Divides a batch: global batch = micro-batch x accumulation x ranks. Also says how many times the ranks read the
dataset. All functions are pure."""

from dataclasses import dataclass
from math import gcd

from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How the images of a step are divided: each rank makes `accumulation` passes of `micro_batch` images."""

    global_batch: int
    micro_batch: int
    accumulation: int
    num_ranks: int

    @property
    def rank_batch(self) -> int:
        """The number of images per rank and step."""
        return self.micro_batch * self.accumulation


def plan_batch(global_batch: int, *, micro_batch: int, num_ranks: int, lanes: int, pairs: bool = False) -> BatchPlan:
    """Returns the plan for these sizes. A `micro_batch` of 0 takes a rank's whole share, which fit.py divides later.
    `pairs`: whether neighbours in the batch must stay together, since mixup mixes them. Raises UserError if the sizes
    do not divide each other."""
    if global_batch < 1 or global_batch % lanes:
        raise UserError(
            f"--global-batch is {global_batch}, not a multiple of --data.lanes = {lanes}; "
            f"take {max(1, round(global_batch / lanes)) * lanes}, or other lanes"
        )
    if global_batch % num_ranks:
        divisors = [n for n in range(1, min(global_batch, 2 * num_ranks) + 1) if global_batch % n == 0]
        raise UserError(
            f"--global-batch is {global_batch}, not divisible by {num_ranks} ranks; "
            f"start {' or '.join(map(str, divisors[-3:]))} ranks, or change --global-batch"
        )
    share = global_batch // num_ranks
    micro = micro_batch or share
    if micro < 1 or share % micro:
        raise UserError(
            f"--micro-batch is {micro_batch}, which does not divide a rank's share of {share} images "
            f"(global batch {global_batch} / {num_ranks} ranks); take a divisor of {share}, or 0 for the "
            "largest that fits"
        )
    if pairs and share % 2:
        raise UserError(
            f"--global-batch is {global_batch}, a share of {share} images for each of {num_ranks} ranks; mixup "
            f"needs an even share: take a multiple of {2 * num_ranks}, other ranks, or --data.mixup.alpha 0 and "
            "--data.mixup.cutmix-alpha 0"
        )
    if pairs and micro % 2:
        raise UserError(
            f"--micro-batch is {micro_batch}, which splits the pairs that mixup mixes; "
            f"take an even divisor of a rank's share of {share} images, 0 for the largest that fits, or "
            "--data.mixup.alpha 0 and --data.mixup.cutmix-alpha 0"
        )
    return BatchPlan(global_batch=global_batch, micro_batch=micro, accumulation=share // micro, num_ranks=num_ranks)


def times_read(lanes: int, *, num_ranks: int) -> float:
    """Returns how many times the ranks together read the dataset in an epoch. Each rank reads every lane of which it
    has a share, so R ranks read L + R - gcd(L, R) lanes, where L is the number of lanes."""
    return (lanes + num_ranks - gcd(lanes, num_ranks)) / lanes


def shared_lanes(lanes: int, window_blocks: int, *, num_ranks: int) -> str:
    """Returns what is wrong if there are more ranks than lanes, and which number of lanes to take instead. Returns an
    empty string otherwise."""
    if num_ranks <= lanes:
        return ""
    times = times_read(lanes, num_ranks=num_ranks)
    window = max(1, round(lanes * window_blocks / num_ranks))
    return (
        f"--data.lanes is {lanes}, fewer than the {num_ranks} ranks, which would read the dataset {times:.3g} times an "
        f"epoch; take --data.lanes {num_ranks} --data.window-blocks {window}, or at most {lanes} ranks (lanes are "
        "fixed once a run has begun: take as many as the most ranks that it may ever have)"
    )

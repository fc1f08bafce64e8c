"""The two steps of the probe of a node."""

import torch

from pipeline.training.node_speed import exchange, product_seconds
from pipeline.world import World


def test_a_product_takes_time() -> None:
    assert product_seconds(torch.device("cpu")) > 0


def test_a_single_rank_exchanges_with_itself() -> None:
    world = World(
        rank=0,
        num_ranks=1,
        local_rank=0,
        num_local_ranks=1,
        master_address="127.0.0.1",
        master_port=0,
        device=torch.device("cpu"),
        num_threads=1,
    )
    assert exchange(world) == ""

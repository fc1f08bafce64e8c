"""The group of one rank: every collective leaves what gloo leaves, and no socket is opened."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from pipeline.ranks.rendezvous import join_alone
from tests.rigs.listening import addresses_of


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    before = addresses_of(os.getpid())
    join_alone()
    yield
    assert addresses_of(os.getpid()) == before
    dist.destroy_process_group()


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN])
def test_a_reduction_over_one_rank_is_its_own_value(op: dist.ReduceOp.RedOpType) -> None:
    tensor = torch.tensor([-0.0, 1.5, float("nan")])
    dist.all_reduce(tensor, op=op)
    work = dist.all_reduce(tensor, op=op, async_op=True)
    assert work is not None
    assert work.wait()
    assert torch.equal(tensor.view(torch.int32), torch.tensor([-0.0, 1.5, float("nan")]).view(torch.int32))


@pytest.mark.parametrize("group", ["default", "new"])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # DeepSpeed calls what torch 2.13 has renamed
def test_what_is_gathered_and_scattered_is_copied(group: str) -> None:
    members = dist.new_group([0]) if group == "new" else None
    tensor = torch.arange(6.0, requires_grad=True)
    outputs = [torch.zeros(6) for _ in range(4)]
    dist.all_gather([outputs[0]], tensor, group=members)
    dist.all_gather_into_tensor(outputs[1], tensor, group=members)
    dist.reduce_scatter(outputs[2], [tensor], group=members)
    dist.reduce_scatter_tensor(outputs[3], tensor, group=members)
    dist.broadcast(tensor, src=0, group=members)
    dist.barrier(group=members)
    assert all(torch.equal(output, tensor) and not output.requires_grad for output in outputs)
    assert (dist.get_rank(members), dist.get_world_size(members)) == (0, 1)


def test_it_can_be_left_and_joined_again() -> None:
    dist.destroy_process_group()
    assert not dist.is_initialized()
    join_alone()
    assert dist.is_initialized()

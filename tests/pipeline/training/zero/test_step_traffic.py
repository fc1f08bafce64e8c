"""What a step sends, and how often the host waits for the device in it: exact numbers, the same for 8 and 512 ranks.

P is the number of parameters, padded so that ranks or the model's tensors divide it evenly. A collective's bytes are
those of its larger side: what a rank holds of a sum before it is reduced, or of a gathered tensor afterwards. One
reduction a step carries the loss, every source's values and the norm, by name.
"""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from pipeline.models.build import shapes_of
from pipeline.ranks.streams import HostStreams
from pipeline.ranks.world import World
from pipeline.training.settings.job import OptimizerConfig
from pipeline.training.step import GRAD_NORM, LOSS, StepSums, SumSource
from pipeline.training.zero.flat_blocks import layout_of, sizes_of
from pipeline.training.zero.optimizer import group_of, ways_of
from tests.rigs.counted_steps import MODEL, Case, CountedSteps, counted_steps
from tests.rigs.processes import run_ranks

CASES: list[Case] = [(1, 1), (1, 4), (2, 1), (2, 4), (3, 1), (3, 4)]
COUNTED = [
    *(pytest.param(8, case) for case in CASES),
    *(pytest.param(512, case, marks=() if case == (1, 1) else pytest.mark.long) for case in CASES),
]
SIZES = {name: math.prod(shape) for name, shape in shapes_of(MODEL).items()}
P = sum(SIZES.values())
# What DeepSpeed sees: two flat tensors for each block, without padding between the parameters, whose sizes are
# multiples of 64.
TENSORS = list(sizes_of(layout_of(shapes_of(MODEL), ways_of(SIZES, OptimizerConfig(weight_decay=0.1)))).values())
KEPT_WHOLE = 100_000  # elements up to which stage 3 keeps a tensor on every rank (DeepSpeed's default)
FP32, BF16 = 4, 2


def padded(sizes: list[int], multiple: int) -> int:
    """Their sum, each rounded up."""
    return sum(-(-size // multiple) * multiple for size in sizes)


def of_groups(num_ranks: int) -> int:
    """P, as stages 1 and 2 pad the two groups of parameters (with and without decay)."""
    decayed = sum(size for name, size in SIZES.items() if name.endswith("weight") and "norm" not in name)
    return padded([decayed, P - decayed], 2 * num_ranks)


def of_tensors(num_ranks: int, is_chosen: Callable[[int], bool] = lambda _: True) -> int:
    """P, or a part of it, as stage 3 pads every tensor."""
    return padded([size for size in TENSORS if is_chosen(size)], num_ranks)


# Function that calls -> what it does, how often, and the bytes of all calls for a number of ranks.
Row = tuple[str, int, Callable[[int], int]]
GATHER: dict[str, Row] = {
    "utils.py:all_gather_into_tensor_dp_groups": ("allgather", 2, lambda n: BF16 * of_groups(n)),  # updated weights
}
NORM: dict[str, Row] = {"update.py:step": ("allreduce", 1, lambda _: 8)}  # in float64


def reduced_whole(count: int) -> dict[str, Row]:
    """Gradients are added up in fp32, and every rank keeps its partition of the sum."""
    return {"stage_1_and_2.py:gradient_reduction_w_predivide": ("allreduce", count, lambda _: count * FP32 * P)}


def is_gathered(size: int) -> bool:
    """Whether stage 3 gathers a tensor of this size in every pass."""
    return size > KEPT_WHOLE


def of_stage_3(accumulation: int) -> dict[str, Row]:
    """For every micro-batch, gradients are reduced to partitions, and the blocks' large weights gathered for each pass,
    but those of the last block only once."""
    return {
        "stage_3.py:reduce_scatter_coalesced": (
            "reducescatter",
            accumulation,
            lambda n: accumulation * FP32 * of_tensors(n),
        ),
        "partition_parameters.py:_dist_allgather_fn": (
            "allgather",
            accumulation * (2 * MODEL.size.depth - 1),
            lambda n: accumulation * BF16 * (2 * MODEL.size.depth - 1) * of_tensors(n, is_gathered) // MODEL.size.depth,
        ),
        "partition_parameters.py:_allgather_params_coalesced": (  # small weights after the update, one by one
            "allgather",
            sum(not is_gathered(size) for size in TENSORS),
            lambda n: BF16 * of_tensors(n, lambda size: not is_gathered(size)),
        ),
        "stage3.py:get_grad_norm_direct": ("allreduce", 2, lambda _: 2 * 8),  # in float64
    }


COLLECTIVES: dict[Case, dict[str, Row]] = {
    (1, 1): reduced_whole(1) | GATHER | NORM,
    (1, 4): reduced_whole(1) | GATHER | NORM,
    (2, 1): reduced_whole(1) | GATHER | NORM,
    (2, 4): reduced_whole(4) | GATHER | NORM,
    (3, 1): of_stage_3(1),
    (3, 4): of_stage_3(4),
}
OURS = "step.py:reduced"

# Function that waits -> how often. Ours is the read of a step that was launched earlier. In stage 3, DeepSpeed looks at
# the gradient's norm before it updates.
READ = {"streams.py:values": 1}
WAITS: dict[Case, dict[str, int]] = {
    **{case: {} for case in CASES if case[0] < 3},
    **{
        (3, accumulation): {
            "stage3.py:__reduce_and_partition_ipg_grads": accumulation,  # for reductions before the last two
            "stage3.py:independent_gradient_partition_epilogue": accumulation,
            # At each block, for the gathering three blocks before: the host is at most three blocks ahead.
            "partitioned_param_coordinator.py:_fetch_sub_module_impl": accumulation * (2 * MODEL.size.depth - 1),
            "utils.py:is_invalid_grad_norm": 1,
            "partition_parameters.py:_allgather_params_coalesced": 1,
        }
        for accumulation in (1, 4)
    },
}


def words(value: int | Case) -> str:
    """A case's name."""
    return f"{value} ranks" if isinstance(value, int) else f"stage {value[0]}, accumulation {value[1]}"


@cache
def counted(num_ranks: int, case: Case) -> CountedSteps:
    """What was counted in two steps."""
    return counted_steps(num_ranks, [case])[case]


@pytest.mark.parametrize(("num_ranks", "case"), COUNTED, ids=words)
def test_collectives_and_their_bytes(num_ranks: int, case: Case) -> None:
    found = dict(counted(num_ranks, case).plain.collectives)
    kind, count, num_bytes = found.pop(OURS)
    assert (kind, count) == ("allreduce", 1), "everything that is ours is in one reduction"
    assert num_bytes < 1024
    assert found == {
        caller: (kind, count, bytes_for(num_ranks)) for caller, (kind, count, bytes_for) in COLLECTIVES[case].items()
    }


@pytest.mark.parametrize(("num_ranks", "case"), COUNTED, ids=words)
def test_waits_of_the_host(num_ranks: int, case: Case) -> None:
    assert counted(num_ranks, case).plain.waits == WAITS[case] | READ


def test_an_update_does_not_look_for_values_that_are_not_finite_tensor_by_tensor() -> None:
    """Operations of a step for each tensor of weights. With DeepSpeed's look into every gradient they were 49."""
    assert counted(1, (1, 1)).plain.num_operations < 36 * len(SIZES)


@pytest.mark.parametrize(("num_ranks", "case"), COUNTED, ids=words)
def test_a_step_with_norms_and_similarities(num_ranks: int, case: Case) -> None:
    """Norms are a float64 for the gradient and one for the parameters of each group, in the sum of every step; the
    table of positions is one sum more. The host waits for nothing more."""
    steps, num_groups = counted(num_ranks, case), len(set(map(group_of, SIZES)))
    kind, count, num_bytes = steps.plain.collectives[OURS]
    assert steps.due.collectives == steps.plain.collectives | {
        OURS: (kind, count, num_bytes + 2 * num_groups * 8),
        "norms.py:launched": ("allreduce", 1, FP32 * SIZES["embed.position"]),
    }
    assert steps.due.waits == steps.plain.waits


@pytest.mark.parametrize(
    "case", [(1, 1), (1, 4), *(pytest.param(case, marks=pytest.mark.long) for case in ((2, 1), (3, 1)))], ids=words
)
def test_overlap_sends_gradients_during_the_backward_pass(case: Case) -> None:
    """On 512 ranks, with 13 buckets; ViT-H/14 has 17 of the default size. In stages 1 and 2, the host waits for
    nothing."""
    step = counted_steps(512, [case], overlap="on")[case].plain
    caller = "stage3.py:__avg_scatter_grads" if case[0] == 3 else "stage_1_and_2.py:gradient_reduction_w_predivide"
    _, count, num_bytes = step.collectives[caller]
    assert count >= 13
    assert step.inside_bytes >= 0.85 * num_bytes
    assert case[0] == 3 or step.waits == READ


def test_without_overlap_stage_1_sends_gradients_after_the_backward_pass() -> None:
    assert counted(512, (1, 1)).plain.inside_bytes == 0


def test_the_throughput_timer_would_wait_twice_in_each_micro_batch() -> None:
    """As it does by default; so the counter sees what the engine switches off."""
    waits = counted_steps(8, [(1, 4)], with_timer=True)[1, 4].plain.waits
    assert (waits["timer.py:start"], waits["timer.py:stop"]) == (4, 4)


def sums_of(world: World, _: Path) -> dict[str, float]:
    sources = (
        SumSource(names=("a", "b"), read=lambda: {"b": 10.0 * world.rank, "a": 1.0}),
        SumSource(names=("c",), read=lambda: {"c": 0.25}),
    )
    sums = StepSums(sources, device=world.device, streams=HostStreams())
    found = sums.reduced(torch.tensor(1.5 + world.rank))
    return sums.by_name(sums.read_back(found, grad_norm=torch.tensor(7.0)))


def test_ranks_add_up_what_they_have_by_name(tmp_path: Path) -> None:
    first, second = run_ranks(sums_of, tmp_path, num_ranks=2)
    assert first == second == {LOSS: 4.0, "a": 2.0, "b": 10.0, "c": 0.5, GRAD_NORM: 7.0}

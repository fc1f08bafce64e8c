"""Global batch = micro-batch x accumulation x ranks; other batches are refused with what would fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.zero.batch_plan import plan_batch, shared_lanes, times_read
from shards.errors import UserError


@pytest.mark.parametrize(
    ("global_batch", "micro", "ranks", "lanes", "expected"),  # (micro-batch, accumulation)
    [
        pytest.param(4096, 16, 64, 64, (16, 4), id="the paper's batch on 64 GPUs"),
        pytest.param(4096, 0, 64, 64, (64, 1), id="0: a rank's whole share in one pass"),
        pytest.param(128, 1, 1, 8, (1, 128), id="one image at a time"),
        pytest.param(12, 2, 3, 4, (2, 2), id="ranks need not divide the lanes"),
        pytest.param(1, 0, 1, 1, (1, 1), id="the smallest"),
    ],
)
def test_plans(global_batch: int, micro: int, ranks: int, lanes: int, expected: tuple[int, int]) -> None:
    plan = plan_batch(global_batch, micro_batch=micro, num_ranks=ranks, lanes=lanes)
    assert (plan.micro_batch, plan.accumulation) == expected
    assert (plan.global_batch, plan.num_ranks) == (global_batch, ranks)


@given(global_batch=st.integers(0, 300), micro=st.integers(0, 40), ranks=st.integers(1, 9), lanes=st.integers(1, 9))
def test_the_product_is_the_global_batch_or_there_is_no_plan(
    global_batch: int, micro: int, ranks: int, lanes: int
) -> None:
    share, rest = divmod(global_batch, ranks)
    fits = global_batch > 0 and global_batch % lanes == 0 and rest == 0 and (micro == 0 or share % micro == 0)
    if not fits:
        with pytest.raises(UserError):
            plan_batch(global_batch, micro_batch=micro, num_ranks=ranks, lanes=lanes)
        return
    plan = plan_batch(global_batch, micro_batch=micro, num_ranks=ranks, lanes=lanes)
    assert plan.micro_batch * plan.accumulation * plan.num_ranks == global_batch
    assert plan.rank_batch == share


@given(global_batch=st.integers(1, 300), micro=st.integers(0, 40), ranks=st.integers(1, 9))
def test_pairs_stay_whole_or_there_is_no_plan(global_batch: int, micro: int, ranks: int) -> None:
    """With pairs, every boundary between ranks and micro-batches is at an even entry of the global batch."""
    try:
        plan = plan_batch(global_batch, micro_batch=micro, num_ranks=ranks, lanes=1)
    except UserError:
        with pytest.raises(UserError):
            plan_batch(global_batch, micro_batch=micro, num_ranks=ranks, lanes=1, pairs=True)
        return
    if plan.micro_batch % 2:
        with pytest.raises(UserError, match="mixup"):
            plan_batch(global_batch, micro_batch=micro, num_ranks=ranks, lanes=1, pairs=True)
        return
    assert plan_batch(global_batch, micro_batch=micro, num_ranks=ranks, lanes=1, pairs=True) == plan
    assert all(start % 2 == 0 for start in range(0, global_batch, plan.micro_batch))


@pytest.mark.parametrize(
    ("lanes", "ranks", "times"), [(64, 64, 1), (512, 8, 1), (8, 64, 8), (64, 96, 2), (512, 96, 1.125), (3, 2, 4 / 3)]
)
def test_how_often_a_dataset_is_read(lanes: int, ranks: int, times: float) -> None:
    assert times_read(lanes, num_ranks=ranks) == pytest.approx(times)


def test_more_ranks_than_lanes_are_wrong_and_the_shuffle_of_those_to_take_reaches_as_far() -> None:
    assert shared_lanes(64, 4, num_ranks=64) == shared_lanes(64, 4, num_ranks=24) == ""
    said = shared_lanes(64, 4, num_ranks=128)
    assert "is 64, fewer than the 128 ranks, which would read the dataset 2 times an epoch" in said
    assert "take --data.lanes 128 --data.window-blocks 2, or at most 64 ranks" in said
    assert "--data.lanes 512 --data.window-blocks 1," in shared_lanes(8, 4, num_ranks=512)

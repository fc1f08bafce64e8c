"""One reduction a step carries the loss, every source's values and the norm, by name."""

from pathlib import Path

import pytest
import torch

from pipeline.training.step_sums import GRAD_NORM, LOSS, StepSums, SumSource
from pipeline.training.streams import HostStreams
from pipeline.world import World
from tests.rigs.processes import run_ranks


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


def test_two_sums_of_one_name_are_refused() -> None:
    source = SumSource(names=("loss",), read=dict)
    with pytest.raises(ValueError, match="two sums have one name"):
        StepSums((source,), device=torch.device("cpu"), streams=HostStreams())

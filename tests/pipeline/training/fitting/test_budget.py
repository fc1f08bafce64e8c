"""A rank's share of its host, and of a GPU."""

from dataclasses import replace

import pytest

from pipeline.ranks.host_memory import available_bytes
from pipeline.training.fitting.budget import budget_of, gpu_budget, host_budget
from tests.rigs.processes import one_world


def test_ranks_share_what_reading_ahead_leaves() -> None:
    one = budget_of(one_world(), read_ahead_bytes=1_000_000_000)
    two = budget_of(replace(one_world(0, 2)), read_ahead_bytes=1_000_000_000)
    assert one.total_bytes == pytest.approx(2 * two.total_bytes, rel=0.3), "other processes come and go"
    assert one.total_bytes < available_bytes() - 500_000_000


def test_reserves() -> None:
    host = host_budget(21_000_000_000, num_local_ranks=2)
    assert (host.total_bytes, host.reserve_bytes, host.bytes) == (10_500_000_000, 1_025_000_000, 9_475_000_000)
    assert host_budget(-5, num_local_ranks=2).bytes == 0
    h100 = gpu_budget(85_000_000_000, where="H100")
    assert (h100.reserve_bytes, h100.bytes) == (8_800_000_000, 76_200_000_000)

"""Collectives in a real gloo group of two and three processes."""

import math
from typing import Any

import pytest
import torch

from pipeline.ranks.collectives import all_agree, broadcast_json, gather_into, gather_json, gather_rows, sums
from pipeline.ranks.world import World
from tests.rigs.processes import run_ranks

VALUES: list[Any] = [
    {"token": "x", "steps": [1, 2, 3]},
    'Ärger, 数, \U0001f600, \u0000 and a "quote"' * 20,  # longer than the first, and not ASCII
    None,
]


def exchange(world: World) -> dict[str, Any]:
    """Runs every collective once, on one rank."""
    device = world.device
    return {
        "gathered": gather_json(VALUES[world.rank], device=device),
        "empty": gather_json("" if world.is_first else [], device=device),
        "broadcast": broadcast_json(VALUES[1] if world.is_first else "not looked at", device=device),
        "all": all_agree(True, device=device),
        "not_last": all_agree(world.rank < world.num_ranks - 1, device=device),
        "none": all_agree(False, device=device),
        "sums": sums([1.0, world.rank + 0.5, 2.0**53], device=device),
    }


def gathered_rows(world: World) -> list[list[int]]:
    """Two rows of each rank, which lie apart in memory."""
    rows = torch.tensor([[world.rank, 9], [10 + world.rank, 9]], device=world.device)[:, :1]
    found: list[list[int]] = gather_rows(rows).tolist()
    flat = torch.zeros(rows.numel() * world.num_ranks, dtype=rows.dtype)
    gather_into(flat, rows.flatten())
    assert flat.tolist() == [value for row in found for value in row]
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rows_are_in_rank_order(num_ranks: int) -> None:
    expected = [[0], [10], [1], [11]][: 2 * num_ranks]
    assert run_ranks(gathered_rows, num_ranks=num_ranks) == [expected] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_rank_gets_the_same(num_ranks: int) -> None:
    expected = {
        "gathered": VALUES[:num_ranks],
        "empty": ["", *[[]] * (num_ranks - 1)],
        "broadcast": VALUES[1],
        "all": True,
        "not_last": False,
        "none": False,
        "sums": [float(num_ranks), sum(rank + 0.5 for rank in range(num_ranks)), num_ranks * 2.0**53],
    }
    assert run_ranks(exchange, num_ranks=num_ranks) == [expected] * num_ranks


def refuse_nan(world: World) -> list[float]:
    """Sums a value that is NaN on only one rank."""
    return sums([float("nan") if world.is_first else 1.0, 1.0], device=world.device)


def test_sums_hide_no_nan() -> None:
    for first, second in run_ranks(refuse_nan, num_ranks=2):
        assert math.isnan(first)
        assert second == 2.0

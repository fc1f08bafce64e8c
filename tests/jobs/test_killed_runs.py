"""When runs are killed, as a function of numbers; what a run says that fails; test_verify_resume.py kills real ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.killed_runs import Topology, planned_moments


@given(st.integers(2, 500), st.integers(1, 40), st.integers(1, 60), st.integers(0, 9))
def test_every_kill_is_within_the_run_and_in_order(num_steps: int, num_kills: int, save_steps: int, seed: int) -> None:
    moments = planned_moments(num_kills, num_steps=num_steps, save_steps=save_steps, seed=seed)
    assert len(moments) == num_kills
    steps = [moment.step for moment in moments]
    assert steps == sorted(steps)
    assert all(1 <= step < num_steps for step in steps)
    assert all(moment.is_in_save <= (moment.step % save_steps == 0) for moment in moments)
    assert all(step > save_steps for step in steps) or num_steps <= save_steps + 1
    assert moments == planned_moments(num_kills, num_steps=num_steps, save_steps=save_steps, seed=seed)


def test_kills_fall_into_saves_and_between_them() -> None:
    moments = planned_moments(6, num_steps=100, save_steps=5, seed=1)
    assert [moment.is_in_save for moment in moments] == [True, False] * 3
    others = planned_moments(6, num_steps=100, save_steps=5, seed=2)
    assert [moment.step for moment in moments] != [moment.step for moment in others]


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (Topology(num_ranks=1, zero_stage=3), "1 rank, ZeRO-3"),
        (Topology(num_ranks=8, zero_stage=1), "8 ranks, ZeRO-1"),
    ],
)
def test_a_topology_in_words(topology: Topology, words: str) -> None:
    assert str(topology) == words

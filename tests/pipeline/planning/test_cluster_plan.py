"""The plan on several nodes: its numbers from those of the forecast, and the goodput of a run with failures.

Goodput is compared with special cases in closed form and with the ledgers of real runs that were killed.
"""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.resolve import default_job
from pipeline.planning.cluster_plan import PUBLISHED_RATES, Cluster, NodesPlan, Regime, outcome, plan_nodes, regime_of
from pipeline.planning.forecast import Forecast, cost_of, forecast
from pipeline.planning.rates import Rates
from tests.soak.goodput import RESULT

CLUSTER = Cluster(
    gpus_per_node=8,
    limit_seconds=0.0,
    price=2.0,
    failures_per_node_day=0.0065,
    startup_seconds=180.0,
    queue_seconds=122.0,
    restart_seconds=0.0,
    writer_bytes_per_second=1e9,
    image_bytes=110_000,
    samples_per_block=64,
    lanes=64,
)
DAY = 86_400.0
QUIET = Regime(interval=600.0, stall=6.0, commit=60.0, mean_to_failure=1e12, startup=120.0, down=400.0, queue=100.0)
REGIMES = st.builds(
    Regime,
    interval=st.floats(60, 7200),
    stall=st.floats(0, 60),
    commit=st.floats(60, 60),
    mean_to_failure=st.floats(5e3, 1e9),
    startup=st.floats(0, 600),
    down=st.floats(0, 5000),
    queue=st.floats(0, 5000),
    limit=st.floats(3600, 1e6) | st.just(math.inf),
)


def found_on(num_nodes: int) -> Forecast:
    job = default_job("plan", "vit_h14_jft")
    cost = cost_of(job.training, num_images=job.num_images, num_classes=job.num_classes, days=7)
    return forecast(
        job.training, cost, gpu="h200", num_gpus=8 * num_nodes, rates=Rates(mfu=0.28), num_classes=job.num_classes
    )


def planned(num_nodes: int, **changes: float) -> NodesPlan:
    return plan_nodes(found_on(num_nodes), replace(CLUSTER, **changes), num_nodes=num_nodes)  # type: ignore[arg-type]


def test_the_numbers_follow_from_the_forecast() -> None:
    plan, found = planned(8), found_on(8)
    assert (plan.num_gpus, plan.ideal_days) == (64, found.days)
    assert plan.days == pytest.approx(found.days / plan.outcome.goodput)
    assert plan.cost == 2 * plan.gpu_hours
    assert plan.gpu_hours == pytest.approx(plan.days * 24 * 64, rel=0.001), "little is spent in the queue"
    assert plan.restart_seconds == 300 + 122 + 180
    assert plan.commit_seconds == pytest.approx(found.stall_seconds + found.checkpoint_bytes / 8 / 1e9)
    assert planned(8, price=0.0).cost == 0


def test_the_store_is_asked_for_what_the_rate_needs() -> None:
    traffic, found = planned(8).traffic, found_on(8)
    assert traffic.times_read == 1
    assert traffic.read_bytes_per_second == pytest.approx(found.images_per_second * 112_816)
    assert traffic.reads_per_second == pytest.approx(found.images_per_second / 64)
    assert traffic.read_bytes == 64 * 112_816
    interval = planned(8).interval_seconds
    assert traffic.upload_bytes_per_second == pytest.approx(found.checkpoint_bytes / interval, rel=0.01)


@pytest.mark.parametrize(("num_nodes", "lanes"), [(1, 64), (2, 64), (16, 64), (32, 64), (2, 48), (4, 1024), (2, 12)])
def test_ranks_that_share_lanes_read_them_several_times(num_nodes: int, lanes: int) -> None:
    """Rank r takes entries r B/R to (r + 1) B/R of each batch, in which lane g has entries g B/L to (g + 1) B/L."""
    ranks = 8 * num_nodes
    batch = ranks * lanes
    touched = sum(
        (((rank + 1) * (batch // ranks) - 1) // (batch // lanes)) - (rank * (batch // ranks) // (batch // lanes)) + 1
        for rank in range(ranks)
    )
    assert planned(num_nodes, lanes=lanes).traffic.times_read == pytest.approx(touched / lanes)


def test_published_rates_in_their_order() -> None:
    plan = planned(32)
    assert list(plan.goodputs) == list(PUBLISHED_RATES)
    shares = list(plan.goodputs.values())
    assert shares == sorted(shares, reverse=True)
    assert plan.goodputs["RSC-1"] == plan.outcome.goodput


def test_a_limit_makes_pieces() -> None:
    plan = planned(8, limit_seconds=24 * 3600.0)
    assert plan.outcome.num_pieces == 4
    assert plan.days > planned(8).days
    assert regime_of(found_on(8), CLUSTER, num_nodes=8, failures_per_node_day=1).limit == float("inf")


def test_without_failures_only_stalls_cost_anything() -> None:
    found = outcome(QUIET, work_seconds=100 * DAY)
    assert found.goodput == pytest.approx(600 / 606, rel=1e-4)
    assert found.num_failures < 1e-4
    assert found.num_pieces == 1


def test_a_short_run_has_a_whole_start_up_and_a_whole_save() -> None:
    found = outcome(QUIET, work_seconds=60.0)
    assert found.wall_seconds == pytest.approx(60 + 120 + 60, rel=0.01)
    assert found.held_seconds == pytest.approx(found.wall_seconds)


def test_every_piece_costs_a_start_up_a_save_and_a_wait() -> None:
    regime = replace(QUIET, stall=0.0, limit=3720.0)
    found = outcome(regime, work_seconds=10 * 3600.0)
    assert found.num_pieces == 10
    assert found.num_failures == pytest.approx(0, abs=1e-6)
    assert found.wall_seconds == pytest.approx(10 * (120 + 3600 + 60) + 9 * 100)
    assert found.held_seconds == pytest.approx(10 * (120 + 3600 + 60)), "nothing is held in the queue"


def test_without_a_background_save_it_is_dalys_expression() -> None:
    mean, stall, interval = 20_000.0, 100.0, 1_500.0
    regime = replace(QUIET, interval=interval, stall=stall, commit=stall, mean_to_failure=mean, down=0.0)
    wall = mean * math.exp(120 / mean) * math.expm1((interval + stall) / mean) / interval
    assert outcome(regime, work_seconds=1e9).goodput == pytest.approx(1 / wall, rel=1e-4)


@pytest.mark.parametrize(
    ("num_nodes", "per_node_day", "percent"),
    [  # of 5 s of stall, 600 s to restart, the best interval: computed before, from the exact expression
        pytest.param(8, 0.0065, 99.7, id="8 nodes"),
        pytest.param(128, 0.0065, 98.5, id="128 nodes"),
        pytest.param(512, 0.0065, 95.8, id="512 nodes"),
        pytest.param(512, 0.0237, 88.5, id="512 nodes that fail more often"),
        pytest.param(2048, 0.0237, 66.2, id="2,048 of them"),
    ],
)
def test_known_clusters(num_nodes: int, per_node_day: float, percent: float) -> None:
    mean = DAY / (num_nodes * per_node_day)
    interval = math.sqrt(2 * 5 * mean)
    regime = replace(
        QUIET, interval=interval, stall=5.0, commit=5.0, mean_to_failure=mean, startup=600.0, down=0.0, queue=0.0
    )
    assert 100 * outcome(regime, work_seconds=1000 * DAY).goodput == pytest.approx(percent, abs=0.35)


@given(regime=REGIMES, days=st.floats(0.01, 1000))
def test_what_is_worse_costs_more(regime: Regime, days: float) -> None:
    found = outcome(regime, work_seconds=days * DAY)
    assert 0 < found.goodput <= 1
    assert 0 < found.held_seconds <= found.wall_seconds * (1 + 1e-9)
    worse = outcome(replace(regime, down=regime.down + 1000, queue=regime.queue + 1000), work_seconds=days * DAY)
    assert worse.wall_seconds >= found.wall_seconds * (1 - 1e-9)
    half = outcome(replace(regime, mean_to_failure=regime.mean_to_failure / 2), work_seconds=days * DAY)
    assert half.num_failures >= found.num_failures


@pytest.mark.parametrize("made", json.loads(RESULT.read_text())["runs"], ids=lambda made: f"{made['num_kills']} kills")
def test_the_ledgers_of_real_runs_that_were_killed(made: dict[str, Any]) -> None:
    """The formula knows only the means of what interrupted a run, and how often it was killed. Allowed: 5 points. Where
    in their intervals a dozen kills fall, and how long each start-up takes on a busy machine, is worth some."""
    assert made["num_kills"] >= 3
    expected = outcome(Regime(**made["regime"]), work_seconds=made["work_seconds"])
    assert expected.goodput == pytest.approx(made["of_ledger"], abs=0.05)
    assert expected.goodput == pytest.approx(made["of_formula"], abs=0.001), "python -m tests.soak.goodput"
    assert expected.num_failures == pytest.approx(made["num_kills"], rel=0.5)

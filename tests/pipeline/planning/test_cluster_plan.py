"""The plan on several nodes: its numbers from those of the forecast, and what ranks read of the order."""

from dataclasses import replace

import pytest

from jobs.recipes.plan import RECIPES
from pipeline.planning.cluster_plan import PUBLISHED_RATES, Cluster, NodesPlan, plan_nodes, regime_of
from pipeline.planning.forecast import Forecast, cost_of, forecast
from shards.errors import UserError

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


def found_on(num_nodes: int) -> Forecast:
    job = RECIPES["vit_h14_jft"]()
    cost = cost_of(job.training, num_images=job.num_images, num_classes=job.num_classes, days=7)
    return forecast(job.training, cost, gpu="h200", num_gpus=8 * num_nodes, mfu=0.28, num_classes=job.num_classes)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"restart_seconds": 60.0}, "--restart-seconds is 60, less than the start-up in it", id="restart"),
        pytest.param({"limit_seconds": 300.0}, "--max-time is 0.0833333 hours, and a job starts up", id="limit"),
    ],
)
def test_times_that_leave_none_to_train(changes: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned(8, **changes)

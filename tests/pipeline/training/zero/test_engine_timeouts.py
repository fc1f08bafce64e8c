"""There is one process group, DeepSpeed's too, and the heartbeat comes before its timeout."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from pipeline.models import ModelConfig, build_model
from pipeline.ranks.environment import TimeLimits
from pipeline.ranks.world import World, joined
from pipeline.training.settings.job import EngineConfig, HangConfig, OptimizerConfig
from pipeline.training.watchdog.heartbeat import time_limits
from pipeline.training.watchdog.heartbeat_files import Phase, Place, limit_seconds
from pipeline.training.zero.batch_plan import plan_batch
from pipeline.training.zero.engine import Engine
from tests.rigs.forks import forks
from tests.rigs.processes import one_world
from tests.rigs.s3 import free_port

TINY = ModelConfig(name="vit", image_size=16, num_classes=3, patch=8, depth=1, width=24, mlp_width=40, num_heads=2)
TIMEOUT = timedelta(minutes=77)  # no library's default


def timeouts(group: dist.ProcessGroup) -> set[timedelta]:
    """The times after which an exchange in a group fails, over all kinds of devices."""
    return {group._get_backend(device).options._timeout for device in group._device_types}


def timeouts_of_an_engine(world: World, stage: int) -> list[set[timedelta]]:
    with joined(world, limits=TimeLimits(exchange_seconds=TIMEOUT.total_seconds())):
        for _ in range(2):  # as after a check of gradients, or a trial that ran out of memory
            Engine(
                build_model(TINY),
                config=EngineConfig(zero_stage=stage, precision="fp32"),  # type: ignore[arg-type]
                plan=plan_batch(8, micro_batch=4, num_ranks=2, lanes=2),
                optimizer=OptimizerConfig(),
                clip_norm=0.0,
            )
        dist.barrier()
        return [timeouts(group) for group in dist.distributed_c10d._world.pg_map]


@pytest.mark.parametrize("stage", [1, 3])
def test_all_engines_share_the_one_group_and_its_timeout(stage: int) -> None:
    port = free_port()
    worlds = [one_world(rank, 2, port=port) for rank in range(2)]
    with ProcessPoolExecutor(2, mp_context=forks()) as pool:
        for found in pool.map(timeouts_of_an_engine, worlds, [stage, stage], timeout=60):
            assert found == [{TIMEOUT}], "DeepSpeed has no group of its own"


def places() -> Iterator[Place]:
    for phase in Phase:
        for is_first in (False, True):
            yield Place(phase=phase, step=2, is_first=is_first)


@pytest.mark.parametrize(
    "config",
    [
        HangConfig(),
        HangConfig(step_seconds=5000, other_seconds=10),
        HangConfig(step_seconds=1, other_seconds=1),
        HangConfig(step_seconds=1, other_seconds=1, join_seconds=5000),
        HangConfig(step_seconds=0),
    ],
)
def test_the_heartbeat_comes_first(config: HangConfig) -> None:
    longest = max(limit_seconds(place, config, longest_seconds=0) for place in places())
    limits = time_limits(config)
    assert limits.exchange_seconds >= max(2 * longest, 30 * 60)
    assert limits.join_seconds == config.join_seconds

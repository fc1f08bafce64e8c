"""What a partition allows, with scontrol as a script; tests/slurm/test_submit.py has a real one."""

from pathlib import Path

import pytest

from jobs.cluster.limits import PartitionLimits, gate_minutes, limits_of, partition_for, refuse_over_limits
from jobs.cluster.settings import ClusterConfig
from shards.errors import UserError
from tests.jobs.cluster.test_slurm import programs

SHOWN = (
    "PartitionName=long Default=NO DefaultTime=00:01:00 MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP\\n"
    "PartitionName=main Default=YES DefaultTime=NONE MaxNodes=4 MaxTime=2-00:00:00 State=UP\\n"
    "PartitionName=tiny Default=NO DefaultTime=NONE MaxNodes=8 MaxTime=00:10:00 State=UP\\n"
)


@pytest.mark.parametrize(
    ("partition", "limits"),
    [
        ("", PartitionLimits(name="main", seconds=172800, default_seconds=172800, nodes=4)),
        ("long", PartitionLimits(name="long", default_seconds=60)),
        ("tiny,main", PartitionLimits(name="tiny,main", seconds=172800, default_seconds=172800, nodes=8)),
        ("tiny,long", PartitionLimits(name="tiny,long")),
        ("none", PartitionLimits(name="none")),
    ],
)
def test_limits(tmp_path: Path, partition: str, limits: PartitionLimits) -> None:
    assert limits_of(partition, programs(tmp_path, scontrol=f"printf '{SHOWN}'")) == limits


def test_no_limits_if_slurm_does_not_say(tmp_path: Path) -> None:
    assert limits_of("main", programs(tmp_path, scontrol="exit 1")) == PartitionLimits(name="main")
    assert limits_of("main", {"PATH": ""}) == PartitionLimits(name="main")


@pytest.mark.parametrize(
    ("nodes", "time_limit", "message"),
    [
        (1, "11", r"the time limit is 11 min 0 s, and partition tiny allows 10 min 0 s.*lower --time"),
        (1, "1-00", "would wait for ever"),
        (9, "5", "9 nodes are asked for.*allows 8.*lower --nodes"),
        (1, "", "partition tiny ends a job without a time limit after 1 min 30 s.*give --time"),
    ],
)
def test_what_would_wait_for_ever_is_refused(nodes: int, time_limit: str, message: str) -> None:
    limits = PartitionLimits(name="tiny", seconds=600, default_seconds=90, nodes=8)
    with pytest.raises(UserError, match=message):
        refuse_over_limits(limits, nodes=nodes, time_limit=time_limit, margin=120)


def test_what_fits_passes() -> None:
    limits = PartitionLimits(name="tiny", seconds=600, default_seconds=600, nodes=8)
    for time_limit in ("10", "10:00", ""):
        refuse_over_limits(limits, nodes=8, time_limit=time_limit, margin=120)
    refuse_over_limits(PartitionLimits(name="x"), nodes=10_000, time_limit="365-00", margin=120)


def test_the_partition_of_a_job() -> None:
    both = ClusterConfig(partition="gpu", cpu_partition="cpu")
    assert [partition_for(both, has_ranks=each) for each in (True, False)] == ["gpu", "cpu"]
    assert partition_for(ClusterConfig(partition="gpu"), has_ranks=False) == "gpu"
    with pytest.raises(UserError, match="set `partition:` instead"):
        ClusterConfig(partition="gpu", options=("--partition=x",))


def test_gates_fit_the_partition() -> None:
    assert [gate_minutes(PartitionLimits(name="x", seconds=each)) for each in (None, 7200, 630, 120)] == [30, 30, 10, 2]
    with pytest.raises(
        UserError, match="partition x allows 1 min 0 s, and a gate of a chain needs 2 minutes; set cpu_"
    ):
        gate_minutes(PartitionLimits(name="x", seconds=60))

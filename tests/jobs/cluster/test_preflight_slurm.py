"""What is said of Slurm's settings: a table of what scontrol shows, and the finding about it."""

import pytest

from jobs.cluster.preflight import (
    fields_of,
    holds,
    judge_config,
    judge_limit,
    judge_nodes,
    judge_partition,
    slurm_checks,
)
from jobs.cluster.preflight_nodes import options_of
from jobs.cluster.settings import ClusterConfig
from jobs.cluster.submit_checks import limits_in

GOOD = {"KillWait": "30 sec", "SlurmdTimeout": "300 sec", "RequeueExit": "75", "MaxArraySize": "1001"}


def test_lines_of_scontrol() -> None:
    text = "Configuration data\nKillWait                = 30 sec\nRequeueExit             = \n"
    assert fields_of(text) == {"KillWait": "30 sec", "RequeueExit": ""}


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"KillWait": "5 sec"}, "KillWait", "no time for a save"),
        ({"SlurmdTimeout": "0 sec"}, "SlurmdTimeout", "never missed"),
        ({"SlurmdTimeout": "3600 sec"}, "SlurmdTimeout", "waits for the lost node"),
        ({"RequeueExit": "(null)"}, "RequeueExit", "RequeueExit=75"),
        ({"MaxArraySize": "0"}, "MaxArraySize", "arrays are off"),
        ({"PreemptMode": "CANCEL"}, "PreemptMode", "not requeued"),
        ({"PreemptMode": "SUSPEND"}, "PreemptMode", "keeps its GPU memory"),
    ],
)
def test_a_setting_that_costs_work_is_a_warning_with_a_remedy(change: dict[str, str], name: str, words: str) -> None:
    found = {one.name: one for one in judge_config(GOOD | change, {}, ClusterConfig())}
    assert (found[name].status, words in found[name].todo) == ("warning", True), found[name]
    assert {one.status for one in found.values() if one.name != name} == {"ok"}


@pytest.mark.parametrize(("codes", "has"), [("75", True), ("1,70-80", True), ("", False), ("(null)", False)])
def test_lists_of_exit_codes(codes: str, has: bool) -> None:
    assert holds(codes, 75) == has


@pytest.mark.parametrize(
    ("limit", "margin", "most", "status"),
    [
        ("24:00:00", 120, "2-00:00:00", "ok"),
        ("3-00:00:00", 120, "2-00:00:00", "fault"),
        ("2", 120, "UNLIMITED", "fault"),  # two minutes: no more than the margin
        ("", 120, "UNLIMITED", "ok"),
        ("", 600, "05:00", "fault"),
    ],
)
def test_time_limits(limit: str, margin: int, most: str, status: str) -> None:
    partition = {"PartitionName": "gpu", "MaxTime": most}
    found = judge_limit(ClusterConfig(time_limit=limit, margin_seconds=margin), partition)
    assert (found.status, bool(found.todo)) == (status, status != "ok")


@pytest.mark.parametrize(
    ("asked", "states", "most", "status"),
    [
        (2, ["idle", "allocated", "drained"], "UNLIMITED", "ok"),
        (3, ["idle", "allocated", "drained*"], "UNLIMITED", "warning"),  # it may come back
        (3, ["idle", "allocated", "idle*"], "UNLIMITED", "warning"),  # it does not answer
        (4, ["idle"] * 3, "UNLIMITED", "fault"),
        (3, ["idle"] * 3, "2", "fault"),
    ],
)
def test_nodes(asked: int, states: list[str], most: str, status: str) -> None:
    limits = limits_in([{"PartitionName": "gpu", "MaxNodes": most}], name="")
    assert judge_nodes(asked, states, limits).status == status


def test_partitions() -> None:
    assert judge_partition("gpu", {"PartitionName": "gpu", "State": "UP"}).status == "ok"
    down = judge_partition("gpu", {"PartitionName": "gpu", "State": "DOWN"})
    missing = judge_partition("gpuu", {})
    assert (down.status, missing.status) == ("fault", "fault")
    assert "sinfo -s" in missing.todo
    assert (missing.found, missing.allowed) == ("gpuu: does not exist", "a partition of this cluster")


def test_options_of_a_job() -> None:
    cluster = ClusterConfig(
        partition="gpu", account="vision", gpus_per_node=8, gpu_type="h100", options=("--exclude=n7",)
    )
    words = ["--partition=gpu", "--account=vision", "--gpus-per-node=h100:8", "--nodes=2", "--exclude=n7"]
    assert options_of(cluster, nodes=2) == words


def test_without_slurm_there_is_one_finding() -> None:
    (found,) = slurm_checks(ClusterConfig(), nodes=1, environ={"PATH": "/nowhere"})
    assert (found.status, "cannot run scontrol" in found.found) == ("fault", True)

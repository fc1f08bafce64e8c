"""`patchline preflight` without Slurm, and its findings about Slurm's settings: a table of what scontrol shows.
tests/slurm has a real Slurm."""

import json
import re
from pathlib import Path

import pytest

from jobs.cluster.preflight import (
    PORTS,
    fields_of,
    holds,
    judge_config,
    judge_flock,
    judge_limit,
    judge_locked,
    judge_nodes,
    judge_partition,
    judge_ports,
    slurm_checks,
)
from jobs.cluster.preflight_nodes import options_of
from jobs.cluster.settings import ClusterConfig
from jobs.cluster.submit_checks import limits_in
from tests.rigs.processes import patchline

GOOD = {"KillWait": "30 sec", "SlurmdTimeout": "300 sec", "RequeueExit": "75", "MaxArraySize": "1001"}


def test_a_store_alone(tmp_path: Path, s3_bucket: str) -> None:
    ended = patchline("preflight", "--url", f"s3://{s3_bucket}/x", "--out", str(tmp_path / "found.json"))
    assert ended.code == 0, ended.output + ended.errors
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"S3 parts", "command here", "ports"} <= {one["name"] for one in found["checks"]}
    assert "0 faults, " in ended.output


def test_a_command_that_does_not_answer_fails(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("command: [/nowhere/patchline]\n")
    ended = patchline("preflight", "--cluster", str(tmp_path / "cluster.yaml"), "--json")
    found = {one["name"]: one for one in json.loads(ended.output)["checks"]}
    assert (ended.code, found["command here"]["status"]) == (1, "fault")
    assert "correct `command:`" in found["command here"]["todo"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--url", "data"), "--url is 'data'; allowed: s3://bucket/prefix"),
        (("--deep",), "--deep says nothing without --cluster"),
        (("--run-dir", "runs"), "--run-dir says nothing without --cluster"),
        (("--nodes", "0"), "--nodes is 0; allowed: 1 to"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str) -> None:
    ended = patchline("preflight", *words)
    assert (ended.code, message in " ".join(ended.errors.split())) == (2, True), ended.errors


@pytest.mark.parametrize(("soft", "status"), [(-1, "ok"), (1 << 30, "ok"), (8 << 20, "warning")])
def test_locked_memory(soft: int, status: str) -> None:
    assert judge_locked(soft).status == status


@pytest.mark.parametrize(("text", "status"), [("32768\t60999\n", "ok"), ("1024 65535", "warning"), ("", "ok")])
def test_ports(text: str, status: str) -> None:
    assert judge_ports(text).status == status


def test_the_ports_are_those_of_the_batch_script() -> None:
    text = (Path(__file__).parents[3] / "slurm" / "stage.sbatch").read_text()
    found = re.search(r"MASTER_PORT:-\$\(\((\d+) \+ RANDOM % (\d+)\)\)", text)
    assert found
    assert range(int(found[1]), int(found[1]) + int(found[2])) == PORTS


def test_the_lock_of_a_run_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    found = judge_flock(tmp_path / "runs" / "new")
    assert (found.status, found.found) == ("ok", "flock")
    assert not list(tmp_path.iterdir())


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

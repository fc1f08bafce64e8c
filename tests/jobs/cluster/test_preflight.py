"""`patchline preflight` without Slurm: this machine, the store, and what is wrong in the words."""

import json
from pathlib import Path

import pytest

from jobs.cluster.preflight import judge_flock, judge_locked, judge_ports
from tests.rigs.processes import patchline


def test_a_store_alone(tmp_path: Path, s3_bucket: str) -> None:
    ended = patchline("preflight", "--url", f"s3://{s3_bucket}/x", "--out", str(tmp_path / "found.json"))
    assert ended.code == 0, ended.output + ended.errors
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"S3 parts", "command here", "ports"} <= {one["name"] for one in found["checks"]}
    assert "0 failed, " in ended.output


def test_a_command_that_does_not_answer_fails(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("command: [/nowhere/patchline]\n")
    ended = patchline("preflight", "--cluster", str(tmp_path / "cluster.yaml"), "--json")
    found = {one["name"]: one for one in json.loads(ended.output)["checks"]}
    assert (ended.code, found["command here"]["status"]) == (1, "failed")
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


def test_the_lock_of_a_run_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    found = judge_flock(tmp_path / "runs" / "new")
    assert (found.status, found.value) == ("ok", "flock")
    assert not list(tmp_path.iterdir())

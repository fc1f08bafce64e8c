"""`patchline preflight` on a real Slurm of two nodes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.slurm import SlurmCluster, SlurmConfig
from tests.slurm.test_stage import PATCHLINE
from tests.slurm.test_submit import settings_in

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def preflight(cluster: SlurmCluster, *words: str, **environ: str) -> tuple[int, dict[str, dict[str, Any]]]:
    ended = subprocess.run(
        [str(PATCHLINE), "preflight", "--json", *words],
        env=cluster.job_environment() | environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.stdout, ended.stderr
    return ended.returncode, {one["name"]: one for one in json.loads(ended.stdout)["checks"]}


def test_a_cluster_that_is_well(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The nodes read each other's files and exchange numbers. Nothing stays in the folder."""
    bare = settings_in(tmp_path, "options: [--export=NONE]")
    words = (bare, f"--run-dir={slurm_cluster.folder}", "--nodes=2", "--deep", "--wait-seconds=120")
    code, found = preflight(slurm_cluster, *words)
    assert code == 0, found
    assert found["partition"]["found"] == "main is up"
    assert "written and read on n1 and n2" in found["run directory"]["found"]
    assert found["exchange"]["status"] == "ok", found["exchange"]
    assert "torch and DeepSpeed in" in found["imports"]["found"]
    assert "on 2 nodes" in found["product"]["found"]  # which of two is slow on a busy machine is chance
    assert found["RequeueExit"]["status"] == "ok"
    assert found["KillWait"]["status"] == "warning", "5 s in this cluster"
    assert list(slurm_cluster.folder.glob(".patchline-preflight-*")) == []


def test_what_slurm_would_refuse_fails(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    code, found = preflight(slurm_cluster, settings_in(tmp_path), "--nodes=3")
    assert (code, found["nodes"]["status"], found["admission"]["status"]) == (1, "fault", "fault")
    other = tmp_path / "other.yaml"
    other.write_text("partition: gpuu\n")
    code, found = preflight(slurm_cluster, f"--cluster={other}", f"--run-dir={tmp_path}")
    assert (code, found["partition"]["status"], "run directory" in found) == (1, "fault", False)
    slurm_cluster.scontrol("create", "PartitionName=brief", "Nodes=ALL", "MaxTime=5", "State=UP")
    try:
        other.write_text("partition: main\ncpu_partition: brief\ntime_limit: '10'\n")
        code, found = preflight(slurm_cluster, f"--cluster={other}")
        statuses = [found[name]["status"] for name in ("MaxTime", "cpu_partition", "MaxTime of cpu_partition")]
        assert (code, statuses) == (1, ["ok", "ok", "fault"]), found
    finally:
        slurm_cluster.scontrol("delete", "PartitionName=brief")


def test_gpus_are_asked_for_by_their_type(tmp_path: Path) -> None:
    settings = tmp_path / "site.yaml"
    with SlurmCluster(SlurmConfig(num_nodes=1, gpus_per_node=2, first_job=40_000)) as cluster:
        for kind, status in (("h100", "ok"), ("a100", "fault")):
            settings.write_text(f"partition: main\ngpus_per_node: 2\ngpu_type: {kind}\ncpus_per_rank: 1\n")
            assert preflight(cluster, f"--cluster={settings}")[1]["admission"]["status"] == status


def test_a_full_queue_is_a_warning(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    words = ("--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 300")
    holds = int(slurm_cluster.command("sbatch", "--parsable", *words))
    try:
        slurm_cluster.wait_for(lambda: slurm_cluster.squeue_state(holds) == "RUNNING", deadline_seconds=60)
        code, found = preflight(slurm_cluster, settings_in(tmp_path), f"--run-dir={tmp_path}", "--wait-seconds=2")
    finally:
        slurm_cluster.command("scancel", str(holds))
    assert (code, found["run directory"]["status"]) == (0, "warning")
    assert "no nodes were free within 2 s" in found["run directory"]["found"]

"""`patchline status`, `logs` and `cancel` on a real Slurm of two nodes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.test_ls import make
from tests.rigs.slurm import SlurmCluster
from tests.slurm.test_stage import JOB_SECONDS, PATCHLINE, program, wait_until_ended
from tests.slurm.test_submit import settings_in, submit

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def patchline(cluster: SlurmCluster, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [str(PATCHLINE), *words]
    environ = cluster.job_environment()
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)


def status(cluster: SlurmCluster, run_dir: Path) -> Any:
    return json.loads(patchline(cluster, "status", str(run_dir), "--json").stdout)


def words_of(found: Any) -> str:
    return "\n".join(f"{finding['words']} > {finding['todo']}" for finding in found["findings"])


def test_a_running_a_held_and_a_waiting_job(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    sleeps = program(tmp_path / "sleeps", 'echo "rank $SLURM_PROCID is here"', "exec sleep 600")
    runs = []
    for name, lines in {"first": "", "held": "options: [--hold]", "waits": ""}.items():
        folder = tmp_path / name
        folder.mkdir()
        path = settings_in(folder, f"command: [{sleeps}]", lines)
        run_dir = make(folder / "run")
        words = ("pretrain", "digits_smoke", path, "--nodes=2", "--data.url=d", f"--run-dir={run_dir}")
        assert (ended := submit(slurm_cluster, *words)).returncode == 0, ended.stderr
        runs.append(run_dir)
    first, held, waits = runs

    def is_there() -> bool:
        logs = list((first / "submit").glob("*.out"))
        return bool(logs) and logs[0].read_text().count("is here") == 2

    slurm_cluster.wait_for(is_there, deadline_seconds=JOB_SECONDS)
    running = status(slurm_cluster, first)
    assert running["jobs"][0]["state"] == "RUNNING"
    assert "on n[1-2]" in words_of(running)
    assert patchline(slurm_cluster, "logs", str(first), "--rank=1").stdout == "1: rank 1 is here\n"
    slurm_cluster.scontrol("update", "NodeName=n2", "State=drain", "Reason=bad disk")
    assert "node n2 is draining: bad disk > once it is repaired: scontrol update NodeName=n2 State=resume" in words_of(
        status(slurm_cluster, first)
    )
    slurm_cluster.scontrol("update", "NodeName=n2", "State=resume")
    (finding,) = status(slurm_cluster, held)["findings"]
    assert "is held by its user" in finding["words"]
    number = status(slurm_cluster, held)["jobs"][0]["job"]
    assert finding["todo"] == f"scontrol release {number}"
    slurm_cluster.command(*finding["todo"].split())
    slurm_cluster.wait_for(
        lambda: status(slurm_cluster, waits)["jobs"][0]["reason"] in ("Resources", "Priority"),
        deadline_seconds=JOB_SECONDS,
    )
    for run_dir in (waits, held, first):
        said = patchline(slurm_cluster, "cancel", str(run_dir)).stderr
        assert "cancelled " in said
        job = status(slurm_cluster, run_dir)["jobs"][0]["job"]
        assert wait_until_ended(slurm_cluster, int(job))["JobState"] == "CANCELLED"
    assert "was cancelled > submit again to continue" in words_of(status(slurm_cluster, first))

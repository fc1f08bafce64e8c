"""`patchline doctor RUN` of ends on a real Slurm of two nodes: a killed rank, a user's error, the time limit, a job
that is held."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.reports.test_ls import make
from tests.rigs.slurm import SlurmCluster
from tests.slurm.test_stage import PATCHLINE, program, wait_until_ended
from tests.slurm.test_submit import settings_in, submit

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def submitted(cluster: SlurmCluster, folder: Path, *lines: str, options: str = "") -> tuple[Path, int]:
    """Submits a run whose ranks are these lines of shell. Returns its folder and its job."""
    folder.mkdir()
    path = settings_in(folder, f"command: [{program(folder / 'ranks', *lines)}]", "retries: 0", options)
    run_dir = make(folder / "run")
    words = ("pretrain", "digits_smoke", path, "--nodes=2", "--data.url=d", f"--run-dir={run_dir}", "--no-check")
    assert (ended := submit(cluster, *words)).returncode == 0, ended.stderr
    return run_dir, json.loads((run_dir / "submit" / "submitted.jsonl").read_text())["job"]


def first_cause(cluster: SlurmCluster, run_dir: Path) -> Any:
    command = [str(PATCHLINE), "doctor", str(run_dir), "--json"]
    done = subprocess.run(
        command, env=cluster.job_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, ""), done.stdout
    return [cause for cause in json.loads(done.stdout)["causes"] if cause["is_fault"]]


def test_ends(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    held, number = submitted(slurm_cluster, tmp_path / "held", "exit 0", options="options: [--hold]")
    first = first_cause(slurm_cluster, held)[0]
    assert first["words"] == f"job {number} is held by its user"
    assert first["todo"] == f"scontrol release {number}"
    slurm_cluster.command("scancel", str(number))

    dies = ("[[ $1 != __done ]] || exit 1", '[[ $SLURM_PROCID == 0 ]] || kill -9 "$$"', "sleep 600")
    killed, number = submitted(slurm_cluster, tmp_path / "killed", *dies)
    slurm_cluster.wait_for((killed / "submit" / "tries.jsonl").exists, deadline_seconds=120)
    slurm_cluster.command("scancel", str(number))
    words = [cause["words"] for cause in first_cause(slurm_cluster, killed)]
    assert any(one.startswith("rank 1 was killed by SIGKILL") for one in words), words
    wait_until_ended(slurm_cluster, number)

    refuses = ('echo "error: no dataset in s3://b/d; pack it first" >&2', "exit 2")
    wrong, number = submitted(slurm_cluster, tmp_path / "wrong", *refuses)
    assert wait_until_ended(slurm_cluster, number)["JobState"] == "FAILED"
    first = first_cause(slurm_cluster, wrong)[0]
    assert first["words"] == "no dataset in s3://b/d; pack it first"
    assert ".out:" in first["evidence"]

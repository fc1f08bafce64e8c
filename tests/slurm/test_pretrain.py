"""slurm/pretrain.sbatch on a real Slurm: two nodes, one rank each, real training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.slurm import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SCRIPT = Path(__file__).resolve().parents[2] / "slurm" / "pretrain.sbatch"
PATCHLINE = Path(sys.executable).parent / "patchline"
STEPS = 40
RECIPE = (
    "digits_smoke",
    f"--steps={STEPS}",
    "--global-batch=32",
    "--schedule.warmup-steps=5",
    "--checkpoint.every-steps=5",
)
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
JOB_SECONDS = 300


@pytest.fixture(scope="module")
def digits_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = tmp_path_factory.mktemp("data") / "digits"
    subprocess.run([PATCHLINE, "pack", "digits", "--out", url], check=True, timeout=120)
    return str(url)


def submit(cluster: SlurmCluster, *arguments: str, run_dir: Path) -> int:
    output = cluster.folder / f"{run_dir.name}.out"
    return cluster.sbatch(
        SCRIPT,
        *arguments,
        f"--run-dir={run_dir}",
        options=["--nodes=2", f"--output={output}"],
        env={"PATCHLINE": str(PATCHLINE)},
    )


def wait_until_ended(cluster: SlurmCluster, job_id: int) -> dict[str, str]:
    cluster.wait_for(lambda: cluster.squeue_state(job_id) in ENDED, deadline_seconds=JOB_SECONDS)
    return cluster.job(job_id)


def logged_steps(run_dir: Path) -> list[tuple[int, float]]:
    """(step, loss) of every whole line that metrics.jsonl has now."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(record["step"], record["loss"]) for record in records]


def test_a_run_cut_off_half_way_equals_an_unbroken_one(
    slurm_cluster: SlurmCluster, digits_url: str, tmp_path: Path
) -> None:
    arguments = (*RECIPE, f"--data.url={digits_url}")
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"

    job = wait_until_ended(slurm_cluster, submit(slurm_cluster, *arguments, run_dir=unbroken))
    assert job["JobState"] == "COMPLETED", slurm_cluster.log_tail()

    job_id = submit(slurm_cluster, *arguments, run_dir=broken)
    slurm_cluster.wait_for(lambda: len(logged_steps(broken)) >= STEPS // 2, deadline_seconds=JOB_SECONDS)
    slurm_cluster.scontrol("requeue", str(job_id))
    job = wait_until_ended(slurm_cluster, job_id)

    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), slurm_cluster.log_tail()
    assert (broken / "DONE").exists()
    assert [step for step, _ in logged_steps(unbroken)] == list(range(1, STEPS + 1))
    assert logged_steps(broken) == logged_steps(unbroken)


def test_a_users_mistake_is_not_tried_again(slurm_cluster: SlurmCluster, digits_url: str, tmp_path: Path) -> None:
    arguments = ("digits_smoke", f"--data.url={digits_url}", "--global-batch=33")  # not divisible by 2 ranks

    job = wait_until_ended(slurm_cluster, submit(slurm_cluster, *arguments, run_dir=tmp_path / "mistake"))

    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0"), slurm_cluster.log_tail()

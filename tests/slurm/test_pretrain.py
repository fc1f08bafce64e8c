"""slurm/pretrain.sbatch on a real Slurm: two nodes, one rank each, real training."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
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


def output_of(cluster: SlurmCluster, run_dir: Path) -> Path:
    return cluster.folder / f"{run_dir.name}.out"


def submit(cluster: SlurmCluster, *arguments: str, run_dir: Path) -> int:
    return cluster.sbatch(
        SCRIPT,
        *arguments,
        f"--run-dir={run_dir}",
        options=["--nodes=2", f"--output={output_of(cluster, run_dir)}"],
        env={"PATCHLINE": str(PATCHLINE)},
    )


def wait_until_ended(cluster: SlurmCluster, job_id: int) -> dict[str, str]:
    cluster.wait_for(lambda: cluster.squeue_state(job_id) in ENDED, deadline_seconds=JOB_SECONDS)
    return cluster.job(job_id)


def logged_steps(run_dir: Path) -> list[tuple[int, float]]:
    """(step, loss) of every whole line in metrics.jsonl so far."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(record["step"], record["loss"]) for record in records]


@pytest.fixture(scope="module")
def unbroken(
    slurm_cluster: SlurmCluster, digits_url: str, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[int, float]]:
    """The losses of an undisturbed run."""
    run_dir = tmp_path_factory.mktemp("runs") / "unbroken"
    job = wait_until_ended(slurm_cluster, submit(slurm_cluster, *RECIPE, f"--data.url={digits_url}", run_dir=run_dir))
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), slurm_cluster.log_tail()
    losses = logged_steps(run_dir)
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    return losses


def requeue(cluster: SlurmCluster, job_id: int) -> None:
    cluster.scontrol("requeue", str(job_id))


def signal_batch_shell(cluster: SlurmCluster, job_id: int) -> None:
    """Sends the signal that --signal=B:USR1@120 sends before the time limit."""
    cluster.command("scancel", "--batch", "--signal=USR1", str(job_id))


def kill_a_rank(cluster: SlurmCluster, job_id: int) -> None:
    """Not one of the processes beside a rank, such as the writer of its checkpoints."""
    ranks = [pid for pid in cluster.processes() if is_python(pid) and b"pretrain" in words_of(pid)]
    os.kill(max(ranks), signal.SIGKILL)


def is_python(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")


def words_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


@pytest.mark.parametrize(
    "cut_off",
    [
        requeue,  # as in a preemption or node failure: TERM to all, KILL soon after
        signal_batch_shell,  # the script forwards it, the ranks save, the script requeues itself
        kill_a_rank,  # a crash: Slurm would not requeue, the script does
    ],
)
def test_a_run_cut_off_half_way_equals_an_unbroken_one(
    slurm_cluster: SlurmCluster,
    digits_url: str,
    unbroken: list[tuple[int, float]],
    tmp_path: Path,
    cut_off: Callable[[SlurmCluster, int], None],
) -> None:
    run_dir = tmp_path / cut_off.__name__
    job_id = submit(slurm_cluster, *RECIPE, f"--data.url={digits_url}", run_dir=run_dir)
    slurm_cluster.wait_for(lambda: len(logged_steps(run_dir)) >= STEPS // 2, deadline_seconds=JOB_SECONDS)
    cut_off(slurm_cluster, job_id)
    job = wait_until_ended(slurm_cluster, job_id)

    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), slurm_cluster.log_tail()
    assert (run_dir / "DONE").exists()
    assert "continuing from step " in output_of(slurm_cluster, run_dir).read_text()  # resumed, not started again
    assert logged_steps(run_dir) == unbroken


def test_a_users_mistake_is_not_tried_again(slurm_cluster: SlurmCluster, digits_url: str, tmp_path: Path) -> None:
    arguments = ("digits_smoke", f"--data.url={digits_url}", "--global-batch=33")  # not divisible by 2 ranks

    job = wait_until_ended(slurm_cluster, submit(slurm_cluster, *arguments, run_dir=tmp_path / "mistake"))

    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0"), slurm_cluster.log_tail()

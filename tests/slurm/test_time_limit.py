"""The time limit of a real Slurm comes while a slow disk takes a checkpoint: strace delays each fsync of the run."""

import shutil
from pathlib import Path

import pytest

from pipeline.checkpoints.manifest import MANIFEST_NAME
from tests.rigs.slurm import SlurmCluster
from tests.slurm.test_stage import (
    ENDED,
    PATCHLINE,
    logged_steps,
    output_of,
    program,
    submit,
    tries_of,
)

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(900)]
STEPS = 50
RECIPE = (
    "digits_smoke",
    f"--steps={STEPS}",
    "--global-batch=32",
    "--schedule.warmup-steps=5",
    "--checkpoint.every-steps=10",
)


@pytest.fixture(scope="module")
def unbroken(slurm_cluster: SlurmCluster, digits_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "unbroken"
    job = ended(slurm_cluster, slow_run(slurm_cluster, digits_url, run_dir, margin=120, limit=10))
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), slurm_cluster.log_tail()
    return run_dir


def ended(cluster: SlurmCluster, job_id: int) -> dict[str, str]:
    cluster.wait_for(lambda: cluster.squeue_state(job_id) in ENDED, deadline_seconds=600)
    return cluster.job(job_id)


def slow_run(
    cluster: SlurmCluster, url: str, run_dir: Path, *, margin: int, limit: int, fsync_seconds: float = 0.0
) -> int:
    """Submits the run. `limit`: minutes."""
    patchline = PATCHLINE
    if fsync_seconds:
        fault = f"-e trace=fsync -e inject=fsync:delay_enter={int(fsync_seconds * 1e6)}"
        words = f'[[ $1 != pretrain ]] || exec strace -D -f --seccomp-bpf -qqq -o /dev/null {fault} {PATCHLINE} "$@"'
        patchline = program(run_dir.with_suffix(".sh"), words, f'exec {PATCHLINE} "$@"')
    options = ["--nodes=1", f"--time={limit}", f"--signal=B:USR1@{margin}"]
    env = {"PATCHLINE": str(patchline), "PATCHLINE_MARGIN": str(margin)}
    return submit(cluster, *RECIPE, f"--data.url={url}", run_dir=run_dir, options=options, env=env)


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
@pytest.mark.parametrize(("margin", "fsync_seconds", "state"), [(45, 3.0, "COMPLETED"), (10, 25.0, "TIMEOUT")])
def test_a_limit_in_the_middle_of_a_save(
    slurm_cluster: SlurmCluster,
    digits_url: str,
    unbroken: Path,
    tmp_path: Path,
    margin: int,
    fsync_seconds: float,
    state: str,
) -> None:
    """A save that fits into the margin is committed, and the job requeues itself. One that does not is lost as a whole,
    and the next job begins at the newest whole checkpoint."""
    run_dir = tmp_path / state
    job = ended(
        slurm_cluster, slow_run(slurm_cluster, digits_url, run_dir, limit=2, margin=margin, fsync_seconds=fsync_seconds)
    )
    said = output_of(slurm_cluster, run_dir).read_text()
    assert job["JobState"] == state, said
    if state == "COMPLETED":
        ends = [one["end"] for one in tries_of(run_dir)]
        assert ends[0] == "stopped", said
        assert ends[-1] == "done", said
        assert "continuing from step " in said
    else:
        assert not list((run_dir / "checkpoints").glob(f"step-*/*/{MANIFEST_NAME}")), said
        again = slow_run(slurm_cluster, digits_url, run_dir, margin=60, limit=10)
        assert ended(slurm_cluster, again)["JobState"] == "COMPLETED", slurm_cluster.log_tail()
    assert logged_steps(run_dir) == logged_steps(unbroken)

"""slurm/stage.sbatch with PATCHLINE_LAUNCHER=torchrun, on a real Slurm: two nodes, a torchrun and two ranks each."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.processes import patchline
from tests.rigs.slurm import SlurmCluster, SlurmConfig
from tests.slurm.test_stage import (
    JOB_SECONDS,
    PATCHLINE,
    is_python,
    logged_steps,
    output_of,
    program,
    signal_batch_shell,
    submit,
    tries_of,
    wait_until_ended,
    words_of,
)

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
STEPS = 240
RECIPE = ("digits_smoke", f"--steps={STEPS}", "--global-batch=32", "--checkpoint.every-steps=20")
OPTIONS = ["--ntasks-per-node=2"]
TORCHRUN = {"PATCHLINE_LAUNCHER": "torchrun"}


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Starts a cluster with two CPUs per node, for two ranks each."""
    with SlurmCluster(SlurmConfig(num_nodes=2, cpus_per_node=2)) as cluster:
        yield cluster


def kill_a_rank(cluster: SlurmCluster) -> None:
    """Kills a rank. A torchrun has the same words in its command, but is not a rank."""
    ranks = [pid for pid in cluster.processes() if is_python(pid) and "pretrain" in words_of(pid)[2].decode()]
    os.kill(max(ranks), signal.SIGKILL)


@pytest.mark.long
def test_a_run_of_torchruns_equals_one_of_srun(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """A rank is killed, and later a signal asks the ranks to save."""
    url, expected, run_dir = tmp_path / "digits", tmp_path / "srun", tmp_path / "torchrun"
    subprocess.run([PATCHLINE, "pack", "digits", "--out", url], check=True, timeout=120)
    words = (*RECIPE, f"--data.url={url}")
    job = wait_until_ended(slurm_cluster, submit(slurm_cluster, *words, run_dir=expected, options=OPTIONS))
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), slurm_cluster.log_tail()

    job_id = submit(slurm_cluster, *words, run_dir=run_dir, options=OPTIONS, env=TORCHRUN)
    slurm_cluster.wait_for(lambda: len(logged_steps(run_dir)) >= 30, deadline_seconds=JOB_SECONDS)
    kill_a_rank(slurm_cluster)
    slurm_cluster.wait_for(lambda: len(logged_steps(run_dir)) >= 70, deadline_seconds=JOB_SECONDS)
    signal_batch_shell(slurm_cluster, job_id)
    job = wait_until_ended(slurm_cluster, job_id)
    log = output_of(slurm_cluster, run_dir).read_text()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log
    assert [each["end"] for each in tries_of(run_dir)] == ["crashed", "stopped", "done"], log
    assert [each["exit_codes"] for each in tries_of(run_dir)][1:] == [[75], [0]], log
    assert logged_steps(run_dir) == logged_steps(expected)
    assert len(logged_steps(run_dir)) == STEPS
    ended = patchline("logs", str(run_dir), "--rank=3", environ=slurm_cluster.job_environment())
    assert {line.partition(": ")[2][:8] for line in ended.output.splitlines()} == {"[rank3]:"}, ended.errors


@pytest.mark.long
def test_a_mistake_under_torchrun_is_not_tried_again(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """torchrun itself ends with 1, whatever the exit codes of its ranks are."""
    job_id = submit(slurm_cluster, "digits_smoke", run_dir=tmp_path / "run", options=OPTIONS, env=TORCHRUN)
    job = wait_until_ended(slurm_cluster, job_id)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0"), slurm_cluster.log_tail()


TWO_RANKS = r"""
for word; do case $word in --node-rank=*) node=${word#*=} ;; esac; done
while [[ $1 != --no-python ]]; do shift; done
for local in 0 1; do
    TORCHELASTIC_RUN_ID=one LOCAL_RANK=$local RANK=$((2 * node + local)) "${@:2}" &
done
wait
"""


def test_each_line_names_its_rank(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """A shell starts the ranks instead of torchrun, which would take seconds of CPU. The long test runs torchrun."""
    program(tmp_path / "torchrun", TWO_RANKS)
    ranks = program(
        tmp_path / "patchline",
        '[[ $1 != __done ]] || exit 0; echo "12:00:00 of $RANK"; echo "a warning of $RANK" >&2',
    )
    run_dir, env = tmp_path / "lines", TORCHRUN | {"PATCHLINE": str(ranks)}
    wait_until_ended(slurm_cluster, submit(slurm_cluster, "digits_smoke", run_dir=run_dir, options=OPTIONS, env=env))
    for rank in (0, 3):
        ended = patchline("logs", str(run_dir), f"--rank={rank}", environ=slurm_cluster.job_environment())
        lines = [line.partition(": ")[2] for line in ended.output.splitlines()]
        expected = [f"[rank{rank}]: {said}" for said in (f"12:00:00 of {rank}", f"a warning of {rank}")]
        assert (ended.code, lines) == (0, expected), (ended.errors, output_of(slurm_cluster, run_dir).read_text())

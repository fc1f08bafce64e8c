"""Two jobs in one run directory, on a real Slurm: the later one continues the run, and it alone commits."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.slurm import SlurmCluster, SlurmConfig
from tests.rigs.training import losses, resumed_steps, run
from tests.slurm.test_stage import (
    JOB_SECONDS,
    is_python,
    output_of,
    submit,
    tries_of,
    wait_until_ended,
    words_of,
)

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
STEPS = 120
WORDS = (
    "digits_smoke",
    f"--steps={STEPS}",
    "--global-batch=64",
    "--checkpoint.every-steps=10",
    "--schedule.warmup-steps=5",
)
ON_ONE = ("--nodes=1",)


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Starts a cluster for this module alone, because its first node does not come back."""
    with SlurmCluster(SlurmConfig(num_nodes=2, cpus_per_node=1)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone(digits_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Returns the losses of the same run without Slurm."""
    folder = tmp_path_factory.mktemp("runs")
    words = ["pretrain", *WORDS, f"--data.url={digits_url}", f"--run-dir={folder / 'alone'}"]
    assert run(words, num_ranks=1, log_dir=folder) == 0
    return losses(folder / "alone")


def freeze(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def thaw(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def ranks_of(cluster: SlurmCluster) -> list[int]:
    return [pid for pid in cluster.processes() if is_python(pid) and b"pretrain" in words_of(pid)]


def begins(cluster: SlurmCluster, digits_url: str, run_dir: Path) -> int:
    """Submits a job on the first node, and waits for its first checkpoint."""
    job = submit(cluster, *WORDS, f"--data.url={digits_url}", run_dir=run_dir, options=ON_ONE)
    cluster.wait_for(lambda: committed_by(run_dir) != [], deadline_seconds=JOB_SECONDS)
    return job


def committed_by(run_dir: Path) -> list[str]:
    """Returns the attempts that wrote the checkpoints, ordered by step."""
    manifests = sorted((run_dir / "checkpoints").glob("step-*/**/MANIFEST.json"))
    return [json.loads(path.read_text())["id"]["attempt"] for path in manifests]


@pytest.mark.long
def test_the_later_of_two_jobs_continues_the_run(
    slurm_cluster: SlurmCluster, digits_url: str, alone: dict[int, float], tmp_path: Path
) -> None:
    """Both were submitted by hand, without `patchline submit`, which would have refused the second. The first is frozen
    until the second has begun, so that it cannot end before."""
    run_dir = tmp_path / "two"
    first = begins(slurm_cluster, digits_url, run_dir)
    frozen = ranks_of(slurm_cluster)
    freeze(frozen)
    try:
        words = (*WORDS, f"--data.url={digits_url}")
        second = submit(slurm_cluster, *words, run_dir=run_dir, options=ON_ONE)
        slurm_cluster.wait_for(lambda: len(resumed_steps(run_dir)) == 2, deadline_seconds=JOB_SECONDS)
    finally:
        thaw(frozen)
    ends = [wait_until_ended(slurm_cluster, job) for job in (first, second)]
    said = output_of(slurm_cluster, run_dir).read_text()
    assert [(job["JobState"], job["ExitCode"]) for job in ends] == [("FAILED", "78:0"), ("COMPLETED", "0:0")], said
    assert losses(run_dir) == alone
    assert len(resumed_steps(run_dir)) == 2
    assert all(attempt.startswith("0002-") for attempt in committed_by(run_dir))


@pytest.fixture
def lost(slurm_cluster: SlurmCluster) -> Iterator[list[int]]:
    """Yields a list for the processes of a node that Slurm believes to be gone, and ends them afterwards."""
    frozen: list[int] = []
    yield frozen
    thaw(frozen)
    slurm_cluster.kill_jobs_of("n1")


@pytest.mark.long
def test_a_zombie_commits_nothing(
    slurm_cluster: SlurmCluster, digits_url: str, alone: dict[int, float], tmp_path: Path, lost: list[int]
) -> None:
    """A node freezes, Slurm requeues its job on the other one, and the frozen ranks wake up beside the new ones."""
    run_dir = tmp_path / "zombie"
    job = begins(slurm_cluster, digits_url, run_dir)
    slurm_cluster.kill_node("n1", spares_jobs=True)
    lost += ranks_of(slurm_cluster)
    freeze(lost)
    slurm_cluster.wait_for(lambda: len(resumed_steps(run_dir)) == 2, deadline_seconds=JOB_SECONDS)
    thaw(lost)
    ended = wait_until_ended(slurm_cluster, job)
    said = output_of(slurm_cluster, run_dir).read_text()
    assert (ended["JobState"], ended["Restarts"], ended["BatchHost"]) == ("COMPLETED", "1", "n2"), said
    assert losses(run_dir) == alone
    assert len(resumed_steps(run_dir)) == 2, "the zombie's script started no ranks"
    assert all(attempt.startswith("0002-") for attempt in committed_by(run_dir))
    assert [each["end"] for each in tries_of(run_dir)] == ["ended from outside", "done"]

"""Tests of the rig: a real Slurm runs jobs on two nodes, and ends without leaving a process behind."""

from collections.abc import Iterator

import pytest

from tests.rigs.listening import addresses_of
from tests.rigs.slurm import SlurmCluster, SlurmConfig

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(SlurmConfig(num_nodes=2)) as cluster:
        yield cluster


def test_srun_reaches_every_node(slurm_cluster: SlurmCluster) -> None:
    output = slurm_cluster.command(
        "srun", "--nodes=2", "--ntasks=2", "--label", "bash", "-c", "hostname; echo $SLURMD_NODENAME"
    )

    assert {line.split(": ")[1] for line in output.splitlines() if line.endswith(("n1", "n2"))} == {"n1", "n2"}


def test_the_daemons_listen_on_loopback_only(slurm_cluster: SlurmCluster) -> None:
    found = [addresses_of(pid) for pid in slurm_cluster.processes()]
    assert set().union(*found) == {"127.0.0.1"}


@pytest.mark.long
def test_nothing_is_left_after_the_end() -> None:
    with SlurmCluster(SlurmConfig(num_nodes=1)) as cluster:
        script = cluster.folder / "stubborn.sbatch"
        script.write_text("#!/bin/bash\ntrap : TERM\nsrun bash -c 'trap : TERM; echo up; sleep 600; sleep 600'\n")
        output = cluster.folder / "stubborn.out"
        job_id = cluster.sbatch(script, options=[f"--output={output}"])
        cluster.wait_for(lambda: output.exists() and "up" in output.read_text(), deadline_seconds=120)
        assert cluster.squeue_state(job_id) == "RUNNING"

    assert cluster.processes() == []
    assert not cluster.folder.exists()


def test_commands_that_fail_say_why(slurm_cluster: SlurmCluster) -> None:
    with pytest.raises(RuntimeError, match="Invalid job id"):
        slurm_cluster.scontrol("show", "job", "4000000")


def test_nodes_and_the_controller_can_be_lost_and_come_back() -> None:
    with SlurmCluster(SlurmConfig(num_nodes=2)) as cluster:
        script = cluster.folder / "sleeps.sbatch"
        script.write_text("#!/bin/bash\nsrun bash -c 'echo up; sleep 600'\n")
        output = cluster.folder / "sleeps.out"
        job_id = cluster.sbatch(script, options=["--nodes=2", "--nodelist=n[1-2]", f"--output={output}"])
        cluster.wait_for(lambda: output.exists() and "up\nup" in output.read_text(), deadline_seconds=120)
        assert cluster.processes(node="n2")
        cluster.kill_node("n2")
        assert cluster.processes(node="n2") == []
        assert cluster.processes(node="n1")
        cluster.kill_controller()
        cluster.start_controller()
        cluster.start_node("n2")
        cluster.wait_for(lambda: answers(cluster, job_id), deadline_seconds=120)
        cluster.command("scancel", str(job_id))
        cluster.wait_for(lambda: cluster.squeue_state(job_id) == "CANCELLED", deadline_seconds=120)


def answers(cluster: SlurmCluster, job_id: int) -> bool:
    try:
        return cluster.squeue_state(job_id) in ("RUNNING", "PENDING")
    except RuntimeError:
        return False

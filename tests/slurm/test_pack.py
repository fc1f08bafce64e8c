"""slurm/pack.sbatch on a real Slurm: four phases as job arrays, each waiting for the one before it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.datasets import file_hashes
from tests.rigs.images import class_folders
from tests.rigs.slurm import SlurmCluster, SlurmConfig

pytestmark = [pytest.mark.slurm, pytest.mark.long]

SCRIPT = Path(__file__).resolve().parents[2] / "slurm" / "pack.sbatch"
PATCHLINE = Path(sys.executable).parent / "patchline"
SLOW_AT_FIRST = """#!/usr/bin/env bash
fault=(-e trace=fsync -e inject=fsync:delay_enter=4000000)
[[ ${SLURM_RESTART_COUNT:-0} != 0 ]] || exec strace -D -f -qqq -o /dev/null "${fault[@]}" """
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
JOB_SECONDS = 300


def submit(cluster: SlurmCluster, phase: str, words: list[str], *options: str) -> int:
    output = f"--output={cluster.folder}/pack-{phase}-%j.out"
    return cluster.sbatch(SCRIPT, phase, *words, options=[output, *options], env={"PATCHLINE": str(PATCHLINE)})


def states(cluster: SlurmCluster, job_id: int) -> set[str]:
    return set(cluster.squeue_state(job_id).split())


def test_arrays_write_the_bytes_of_one_machine(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images", num_classes=3, images_a_class=8)
    words = ["folder", f"--source.root={root}", "--samples-per-shard=3"]
    subprocess.run([PATCHLINE, "pack", *words, f"--out={tmp_path}/one"], check=True, timeout=120)
    words.append(f"--out={tmp_path}/out")
    scan = submit(slurm_cluster, "scan", words, "--array=0-1")
    plan = submit(slurm_cluster, "plan", words, f"--dependency=afterany:{scan}")
    shards = submit(slurm_cluster, "shards", words, f"--dependency=afterany:{plan}", "--array=5-7")
    merge = submit(slurm_cluster, "merge", words, f"--dependency=afterany:{shards}")
    slurm_cluster.wait_for(lambda: states(slurm_cluster, merge) <= ENDED, deadline_seconds=JOB_SECONDS)
    assert states(slurm_cluster, merge) == {"COMPLETED"}, slurm_cluster.log_tail()
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "one")


def test_a_phase_that_comes_too_early_says_so_and_is_not_requeued(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    root = class_folders(tmp_path / "images", num_classes=1, images_a_class=2)
    merge = submit(slurm_cluster, "merge", ["folder", f"--source.root={root}", f"--out={tmp_path}/out"])
    slurm_cluster.wait_for(lambda: states(slurm_cluster, merge) <= ENDED, deadline_seconds=JOB_SECONDS)
    job = slurm_cluster.job(merge)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0")
    assert "has no plan yet" in (slurm_cluster.folder / f"pack-merge-{merge}.out").read_text()


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
@pytest.mark.parametrize("reached", ["blocks.parquet", "quarantine.parquet"])
def test_a_node_lost_in_the_middle_of_the_merge(tmp_path: Path, reached: str) -> None:
    """A slow disk takes the tables one after another. After the first or the last of them, the node vanishes."""
    root, out = class_folders(tmp_path / "images", num_classes=3, images_a_class=8), tmp_path / "out"
    words = ["folder", f"--source.root={root}", "--samples-per-shard=3"]
    subprocess.run([PATCHLINE, "pack", *words, f"--out={tmp_path}/one"], check=True, timeout=120)
    for phase in ("scan", "plan", "shards"):
        subprocess.run([PATCHLINE, "pack", *words, f"--out={out}", f"--phase={phase}"], check=True, timeout=120)
    slow = tmp_path / "slow"
    slow.write_text(f'{SLOW_AT_FIRST}{PATCHLINE} "$@"\nexec {PATCHLINE} "$@"\n')
    slow.chmod(0o755)
    with SlurmCluster(SlurmConfig(num_nodes=2, cpus_per_node=1)) as cluster:
        output = f"--output={tmp_path}/merge.out"
        job = cluster.sbatch(SCRIPT, "merge", *words, f"--out={out}", options=[output], env={"PATCHLINE": str(slow)})
        cluster.wait_for((out / reached).exists, deadline_seconds=JOB_SECONDS)
        assert not (out / "manifest.json").exists()
        cluster.kill_node(cluster.job(job)["NodeList"])
        cluster.wait_for(lambda: states(cluster, job) <= ENDED, deadline_seconds=JOB_SECONDS)
        ended = cluster.job(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), (tmp_path / "merge.out").read_text()
    assert file_hashes(out) == file_hashes(tmp_path / "one")

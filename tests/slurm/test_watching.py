"""`patchline status`, `watch`, `logs`, `doctor` and `cancel` on a real Slurm of two nodes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.reports.test_ls import make
from tests.rigs.slurm import SlurmCluster
from tests.slurm.test_chain import chain_file, jobs_of, submit_chain
from tests.slurm.test_stage import JOB_SECONDS, PATCHLINE, SCRIPT, program, wait_until_ended
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


@pytest.mark.long
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


def first_line(cluster: SlurmCluster, *words: str) -> str:
    """Returns the output of a command that runs until it is killed."""
    process = subprocess.Popen(
        [str(PATCHLINE), *words], env=cluster.job_environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        return process.stdout.readline()
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_an_array_of_a_chain_and_its_runs(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """One of three runs has a running job. Their logs are in the chain's folder."""
    sleeps = program(tmp_path / "sleeps", 'echo "rank $SLURM_PROCID of $*"', "exec sleep 600")
    step = (
        "{name: tune, stage: finetune, recipe: digits_48, nodes: 2, at_once: 1, "
        "flags: [--data.url=d, --initial.weights=w, --steps=4, --schedule.warmup-steps=1], "
        "variants: [[--seed=1], [--seed=2], [--seed=3]]}"
    )
    folder = submit_chain(slurm_cluster, chain_file(tmp_path, step), "--no-check", command=f"'{sleeps}'")
    log, run_dir = folder / "chain" / "jobs", folder / "tune" / "0"

    def is_there() -> bool:
        return any("rank 1 of" in path.read_text() for path in log.glob("tune-*_0.out"))

    slurm_cluster.wait_for(is_there, deadline_seconds=JOB_SECONDS)
    (job,) = jobs_of(folder, "tune")
    lines = patchline(slurm_cluster, "status", str(folder)).stdout.splitlines()
    assert f"        task {job.job}_0: runs for 00:00:" in "\n".join(lines)
    assert any(line.startswith(f"        2 tasks {job.job}_[1-2]: waits for ") for line in lines), lines
    assert patchline(slurm_cluster, "logs", str(run_dir), "--rank=1").stdout.startswith("1: rank 1 of finetune")
    found = status(slurm_cluster, run_dir)
    assert ([one["job"] for one in found["jobs"]], found["state"]) == ([f"{job.job}_0"], "never started")
    assert "not started yet, no record yet\nnothing is wrong" in patchline(slurm_cluster, "doctor", str(run_dir)).stdout
    assert "0/1 steps complete  tune running: tune/0  not started" in first_line(slurm_cluster, "watch", str(folder))
    assert "cancelled" in patchline(slurm_cluster, "cancel", str(folder)).stderr


@pytest.mark.long
def test_a_job_of_plain_sbatch_that_waits_and_then_runs(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    sleeps = program(tmp_path / "sleeps", 'echo "rank $SLURM_PROCID is here"', "exec sleep 600")
    run_dir, log = tmp_path / "my run", tmp_path / "my log.txt"
    job_id = slurm_cluster.sbatch(
        SCRIPT,
        *("pretrain", "digits_smoke", "--data.url=d", f"--run-dir={run_dir}"),
        options=["--nodes=2", f"--output={log}"],
        env={"PATCHLINE": str(sleeps)},
    )
    slurm_cluster.wait_for(lambda: log.exists() and "is here" in log.read_text(), deadline_seconds=JOB_SECONDS)
    assert "is here" in patchline(slurm_cluster, "logs", str(run_dir)).stdout
    assert f"job {job_id}: runs for" in words_of(status(slurm_cluster, run_dir))
    slurm_cluster.command("scancel", str(job_id))
    wait_until_ended(slurm_cluster, job_id)
    assert f"job {job_id}: was cancelled > submit again to continue" in words_of(status(slurm_cluster, run_dir))


def test_a_held_job_is_watched_before_it_starts(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    path = settings_in(tmp_path, f"command: [{program(tmp_path / 'never', 'exit 0')}]", "options: [--hold]")
    run_dir = tmp_path / "run"
    words = ("pretrain", "digits_smoke", path, "--data.url=d", f"--run-dir={run_dir}", "--no-check")
    assert (ended := submit(slurm_cluster, *words)).returncode == 0, ended.stderr
    assert "not started  step 0  job " in (line := first_line(slurm_cluster, "watch", str(run_dir)))
    assert "is held by its user" in line
    assert "cancelled" in patchline(slurm_cluster, "cancel", str(run_dir)).stderr

"""slurm/stage.sbatch on a real Slurm while its S3 server does not answer, or its disk takes no file."""

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from shards.store import open_store
from tests.rigs.cutting_proxy import cutting_proxy
from tests.rigs.s3 import free_port
from tests.rigs.slurm import SlurmCluster
from tests.rigs.small_disk import filled, small_disk
from tests.slurm.test_chain import chain_file, logs, wait_until_over
from tests.slurm.test_stage import PATCHLINE, SCRIPT, logged_steps, program, tries_of, wait_until_ended
from tests.slurm.test_submit import settings_in
from tests.slurm.test_submit import submit as submit_words

pytestmark = pytest.mark.slurm


def submit(cluster: SlurmCluster, folder: Path, command: Path, url: str, **environ: str) -> tuple[int, Path]:
    """Submits a job that packs into the bucket. Returns the job and its log."""
    log = folder / "log"
    words = ("pack", "digits", f"--out={url}", "--samples-per-shard=500")
    keys = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    env = keys | {"PATCHLINE": str(command), "PATCHLINE_STATE": str(folder)} | environ
    return cluster.sbatch(SCRIPT, *words, options=[f"--output={log}"], env=env), log


@pytest.mark.long
def test_a_server_that_is_away_at_the_start_is_waited_for(
    slurm_cluster: SlurmCluster, s3_bucket: str, s3_endpoint: str, tmp_path: Path
) -> None:
    port, url = free_port(), f"s3://{s3_bucket}/digits"
    job_id, log = submit(slurm_cluster, tmp_path, PATCHLINE, url, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
    slurm_cluster.wait_for(lambda: log.exists() and "waiting for it" in log.read_text(), deadline_seconds=60)
    with cutting_proxy(s3_endpoint, port=port):
        job = wait_until_ended(slurm_cluster, job_id)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), log.read_text()
    assert "answers" in log.read_text()
    assert open_store(url).exists("manifest.json")


@pytest.mark.long
def test_a_server_that_goes_as_the_ranks_start_is_no_mistake(
    slurm_cluster: SlurmCluster, s3_bucket: str, s3_endpoint: str, tmp_path: Path
) -> None:
    """A try meets a closed port, although the nodes have just reached it. The next one waits for it to open."""
    port, url = free_port(), f"s3://{s3_bucket}/again"
    endpoint = f"http://127.0.0.1:{port}"
    waits = program(
        tmp_path / "waits",
        f"touch {tmp_path}/began; until [[ -e {tmp_path}/go ]]; do sleep 0.1; done",
        f'exec {PATCHLINE} "$@"',
    )
    with cutting_proxy(s3_endpoint, port=port):
        job_id, log = submit(slurm_cluster, tmp_path, waits, url, AWS_ENDPOINT_URL=endpoint)
        slurm_cluster.wait_for((tmp_path / "began").exists, deadline_seconds=60)
    (tmp_path / "go").touch()
    slurm_cluster.wait_for(lambda: "waiting for it" in log.read_text(), deadline_seconds=60)
    with cutting_proxy(s3_endpoint, port=port):
        job = wait_until_ended(slurm_cluster, job_id)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), log.read_text()
    assert "S3 is unreachable" in log.read_text()
    assert open_store(url).exists("manifest.json")


@pytest.mark.long
def test_the_last_try_gives_a_server_two_minutes(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The storage answers, but with errors (exit code 74). A fake `sleep` records the length of the pause."""
    tools = tmp_path / "bin"
    tools.mkdir()
    program(tools / "sleep", f'echo "$1" >>{tmp_path}/sleeps')
    fails = program(tmp_path / "fails", "exit 74")
    path = f"{tools}:{slurm_cluster.job_environment()['PATH']}"
    job_id, log = submit(slurm_cluster, tmp_path, fails, str(tmp_path / "out"), PATH=path)
    job = wait_until_ended(slurm_cluster, job_id)
    assert (job["ExitCode"], job["Restarts"]) == ("78:0", "0"), log.read_text()
    assert (tmp_path / "sleeps").read_text().split() == ["120"]


def says(log: Path, words: str) -> bool:
    return log.exists() and words in log.read_text()


def test_a_disk_that_takes_no_file_is_waited_for(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The disk fills up in the first try, and is remounted read-only in the second. The third try finds it in order."""
    tools = tmp_path / "bin"
    tools.mkdir()
    program(tools / "sleep", "exec /bin/sleep 0.2")  # for the pauses of the script
    with small_disk(tmp_path / "disk", num_bytes=4 << 20) as disk:
        fails = program(
            tmp_path / "fails",
            f"echo began >>{tmp_path}/tries; case $(wc -l <{tmp_path}/tries) in",
            f"    1) cat /dev/zero >{disk}/filler 2>/dev/null; exit 74 ;;",
            f"    2) mount -o remount,ro {disk}; exit 74 ;;",
            "esac",
        )
        environ = {"PATCHLINE_STATE": str(disk), "PATCHLINE_RETRIES": "0"}
        environ["PATH"] = f"{tools}:{slurm_cluster.job_environment()['PATH']}"
        job_id, log = submit(slurm_cluster, tmp_path, fails, str(tmp_path / "out"), **environ)
        for words, mend in (
            ("takes no file (No space left on device): waiting", ["rm", f"{disk}/filler"]),
            ("takes no file (Read-only file system): waiting", ["mount", "-o", "remount,rw", str(disk)]),
        ):
            slurm_cluster.wait_for(partial(says, log, words), deadline_seconds=60)
            subprocess.run(mend, check=True)
        job = wait_until_ended(slurm_cluster, job_id)
        assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), log.read_text()
        assert [each["end"] for each in tries_of(disk / f"patchline-{job_id}")] == ["done"], log.read_text()
    assert log.read_text().count("this end is not on record") == 2


@pytest.mark.long
def test_training_on_a_disk_that_fills_up_ends_by_itself(
    slurm_cluster: SlurmCluster, digits_url: str, tmp_path: Path
) -> None:
    """The disk is full from step 60 on, until the batch script waits for room or all steps are done."""
    with small_disk(tmp_path / "disk", num_bytes=64 << 20) as disk:
        run_dir, log = disk / "run", tmp_path / "log"
        words = ("--steps=200", "--global-batch=32", "--schedule.warmup-steps=5", "--checkpoint.every-steps=10")
        job_id = slurm_cluster.sbatch(
            SCRIPT,
            *("pretrain", "digits_smoke", f"--data.url={digits_url}", f"--run-dir={run_dir}", *words),
            options=["--nodes=1", f"--output={log}"],
            env={"PATCHLINE": str(PATCHLINE)},
        )
        slurm_cluster.wait_for(lambda: len(logged_steps(run_dir)) >= 60, deadline_seconds=120)
        filler = filled(disk)
        slurm_cluster.wait_for(lambda: says(log, "takes no file") or says(log, "done"), deadline_seconds=120)
        filler.unlink(missing_ok=True)
        job = wait_until_ended(slurm_cluster, job_id)
        assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), log.read_text()
        assert [step for step, _ in logged_steps(run_dir)] == list(range(1, 201)), log.read_text()
    assert "No space left on device" in log.read_text()


@pytest.mark.long
def test_a_chain_on_a_disk_that_fills_up_goes_on(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The disk is full when the gate after the first step starts. The gate waits for room."""
    with small_disk(tmp_path / "disk", num_bytes=16 << 20) as disk:
        fills = program(
            tmp_path / "fills",
            f'if [[ $1 == __gate ]] && mkdir "{tmp_path}/gate" 2>/dev/null; then cat /dev/zero >{disk}/filler; fi',
            f'exec {PATCHLINE} "$@" 2> >(tee -a "{tmp_path}/said" >&2)',  # its log is on the full disk
        )
        steps = [
            "{name: pack, stage: pack, recipe: digits, flags: [--samples-per-shard=250]}",
            "{name: again, stage: verify, data: pack}",
        ]
        path = chain_file(tmp_path, *steps)
        path.write_text(path.read_text().replace(f"{tmp_path}/a chain", f"{disk}/a chain"))
        done = submit_words(slurm_cluster, str(path), settings_in(tmp_path, f"command: ['{fills}']"), "--no-check")
        assert done.returncode == 0, done.stderr
        folder = disk / "a chain"
        slurm_cluster.wait_for(lambda: says(tmp_path / "said", "asking again"), deadline_seconds=120)
        (disk / "filler").unlink()
        assert wait_until_over(slurm_cluster, folder) == "done", logs(folder)

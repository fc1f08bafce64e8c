"""Chains of jobs on a real Slurm of two nodes: packing to report, each step behind a gate."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from jobs.chains.state import ChainJob, read_record_of, state_folder
from jobs.chains.status import status_of_chain
from tests.rigs.slurm import SlurmCluster
from tests.slurm.test_stage import PATCHLINE, program
from tests.slurm.test_submit import settings_in, submit

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
CHAIN_SECONDS = 400
PACK = "{name: pack, stage: pack, recipe: digits, flags: [--samples-per-shard=250], tasks: 4, at_once: 2}"
STEPS = "[--steps=10, --global-batch=32, --schedule.warmup-steps=2, --checkpoint.every-steps=5]"
PRETRAIN = f"{{name: pretrain, stage: pretrain, recipe: digits_smoke, data: pack, nodes: 2, flags: {STEPS}}}"
FINETUNE = (
    "{name: finetune, stage: finetune, recipe: digits_48, data: pack, weights: pretrain, "
    "flags: [--steps=4, --global-batch=32, --schedule.warmup-steps=1], "
    "variants: [[--schedule.learning-rate=0.01], [--schedule.learning-rate=0.02]]}"
)
EVALUATE = "{name: evaluate, stage: evaluate, data: pack, weights: finetune}"
FEWSHOT = (
    "{name: fewshot, stage: fewshot, data: pack, weights: pretrain, after: [pretrain], "
    "flags: [--shots=2, '--data.test-url=FOLDER/pack']}"
)
REPORT = "{name: report, stage: report, run: pretrain}"


def chain_file(folder: Path, *steps: str, rounds: int = 2) -> Path:
    path = folder / "my chain.yaml"
    path.write_text(
        "\n".join([f"folder: '{folder}/a chain'", f"rounds: {rounds}", "steps:", *(f"- {s}" for s in steps), ""])
    )
    return path


def submit_chain(cluster: SlurmCluster, path: Path, *words: str, command: str = str(PATCHLINE)) -> Path:
    done = submit(cluster, str(path), settings_in(path.parent, f"command: [{command}]"), *words)
    assert done.returncode == 0, done.stderr
    return path.parent / "a chain"


def wait_until_over(cluster: SlurmCluster, folder: Path) -> str:
    """Waits until the chain has no job in the queue, and returns how it ended."""
    state = folder / "chain"

    def is_over() -> bool:
        ended = [name for name in ("done", "gave-up", "cancelled") if (state / name).exists()]
        return bool(ended) and not cluster.command("squeue", "--noheader").strip()

    try:
        cluster.wait_for(is_over, deadline_seconds=CHAIN_SECONDS)
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{logs(folder)}") from error
    return next(name for name in ("done", "gave-up", "cancelled") if (state / name).exists())


def logs(folder: Path) -> str:
    paths = sorted((folder / "chain" / "jobs").glob("*.out"))
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)


def status(cluster: SlurmCluster, folder: Path) -> str:
    words = [str(PATCHLINE), "status", str(folder)]
    environ = cluster.job_environment()
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=True).stdout


def jobs_of(folder: Path, unit: str) -> Sequence[ChainJob]:
    return [job for job in read_record_of(state_folder(str(folder))).jobs if (job.unit, job.kind) == (unit, "job")]


@pytest.mark.long
def test_a_whole_chain_ends_by_itself_and_submits_nothing_twice(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The chain is submitted twice at the same time, and its file is changed afterwards."""
    fewshot = FEWSHOT.replace("FOLDER", f"{tmp_path}/a chain")
    path = chain_file(tmp_path, PACK, PRETRAIN, FINETUNE, EVALUATE, fewshot, REPORT)
    words = [str(PATCHLINE), "submit", str(path), settings_in(tmp_path, f"command: [{PATCHLINE}]")]
    both = [
        subprocess.Popen(words, env=slurm_cluster.job_environment(), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [one.communicate(timeout=120)[1] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    path.write_text("no chain any more")
    folder = tmp_path / "a chain"
    assert wait_until_over(slurm_cluster, folder) == "done", logs(folder)
    assert [step.state for step in status_of_chain(folder, None).steps] == ["complete"] * 9
    packing = ("pack.scan", "pack.plan", "pack.shards", "pack.merge")
    for unit in (*packing, "pretrain", "finetune", "evaluate", "fewshot", "report"):
        assert len(jobs_of(folder, unit)) == 1, logs(folder)
    numbers = [job.job for job in read_record_of(folder / "chain").jobs]
    assert {slurm_cluster.job(number)["ExitCode"] for number in numbers} == {"0:0"}, logs(folder)
    assert (folder / "pretrain" / "report.html").exists()
    lines = status(slurm_cluster, folder).splitlines()
    assert lines[0] == f"chain {folder}: done"
    assert {"pretrain", "finetune/0", "finetune/1"} <= {line.split()[0] for line in lines[10:]}, lines
    assert json.loads((folder / "fewshot" / "fewshot.json").read_text())
    assert all(json.loads((folder / "evaluate" / n / "scores.json").read_text())["num_images"] for n in ("0", "1"))


@pytest.mark.long
def test_a_finished_chain_is_submitted_again_with_other_settings_and_after_its_folder_was_deleted(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    pack = PACK.replace(", tasks: 4, at_once: 2", "")
    steps = [pack, PRETRAIN.replace("nodes: 2", "nodes: 1"), EVALUATE.replace("finetune", "pretrain")]
    folder = submit_chain(slurm_cluster, chain_file(tmp_path, *steps))
    assert wait_until_over(slurm_cluster, folder) == "done", logs(folder)
    steps[2] = steps[2].replace("}", ", flags: [--data.transform.mode=central_crop]}")
    submit_chain(slurm_cluster, chain_file(tmp_path, *steps))
    assert wait_until_over(slurm_cluster, folder) == "done", logs(folder)
    assert "central_crop" in (folder / "evaluate" / "job.yaml").read_text()
    assert [len(jobs_of(folder, unit)) for unit in ("pack", "pretrain", "evaluate")] == [0, 0, 1]
    other = [step.replace("--steps=10", "--steps=10, --seed=5") for step in steps]
    refused = submit(slurm_cluster, str(chain_file(tmp_path, *other)), settings_in(tmp_path))
    assert (refused.returncode, "seed: before 0, now 5" in refused.stderr) == (2, True), refused.stderr
    assert status(slurm_cluster, folder).splitlines()[0] == f"chain {folder}: done"
    last = max(job.job for job in read_record_of(folder / "chain").jobs)
    shutil.rmtree(folder)
    submit_chain(slurm_cluster, chain_file(tmp_path, pack))
    assert min(job.job for job in read_record_of(folder / "chain").jobs) > last
    assert wait_until_over(slurm_cluster, folder) == "done", logs(folder)


@pytest.mark.long
def test_only_the_killed_task_of_an_array_is_packed_again(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    kills = program(
        tmp_path / "kills one task once",
        f'if [[ $* == *--phase=shards*--part=2/4* ]] && mkdir "{tmp_path}/killed" 2>/dev/null; then',
        "    scancel ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; sleep 60",
        "fi",
        f'exec {PATCHLINE} "$@"',
    )
    folder = submit_chain(slurm_cluster, chain_file(tmp_path, PACK), command=f"'{kills}'")
    assert wait_until_over(slurm_cluster, folder) == "done", logs(folder)
    assert [job.tasks for job in jobs_of(folder, "pack.shards")] == [(0, 1, 2, 3), (2,)], logs(folder)
    assert (folder / "pack" / "manifest.json").exists()


@pytest.mark.long
def test_a_gate_that_is_lost_has_a_second_one_where_jobs_are_not_requeued(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    waits = program(
        tmp_path / "waits",
        f'if [[ $1 == __gate ]] && mkdir "{tmp_path}/gate" 2>/dev/null; then sleep 300; fi',
        f'exec {PATCHLINE} "$@"',
    )
    path = chain_file(tmp_path, "{name: pack, stage: pack, recipe: digits, flags: [--samples-per-shard=250]}")
    done = submit(slurm_cluster, str(path), settings_in(tmp_path, f"command: ['{waits}']", "requeue: no"))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "a chain"
    gate, second = (job.job for job in read_record_of(folder / "chain").jobs if job.kind == "gate")
    slurm_cluster.wait_for((tmp_path / "gate").exists, deadline_seconds=CHAIN_SECONDS)
    slurm_cluster.command("scancel", "--signal=KILL", str(gate))
    assert wait_until_over(slurm_cluster, folder) == "done", logs(folder)
    assert slurm_cluster.job(second)["ExitCode"] == "0:0", logs(folder)


@pytest.mark.long
def test_a_crash_loop_ends_the_chain_with_one_message(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    crashes = program(tmp_path / "crashes", "[[ $1 != pretrain ]] || exit 9", f'exec {PATCHLINE} "$@"')
    train = (
        PRETRAIN.replace("data: pack,", "")
        .replace("nodes: 2", "nodes: 1")
        .replace("[--steps", "[--data.url=d, --steps")
    )
    folder = submit_chain(slurm_cluster, chain_file(tmp_path, train, REPORT), command=f"'{crashes}'")
    assert wait_until_over(slurm_cluster, folder) == "gave-up", logs(folder)
    (message,) = (folder / "chain" / "gave-up").read_text().splitlines()
    assert message.startswith(
        "pretrain saved nothing new in three tries, and would end the same way again; see its log"
    )
    said = status(slurm_cluster, folder)
    assert f"gave up, 0 of 2 steps complete: {message}" in " ".join(said.split())
    assert "gave up: it would not succeed" in said
    (gate,) = [job for job in read_record_of(folder / "chain").jobs if job.kind == "gate"]
    assert slurm_cluster.job(gate.job)["ExitCode"] == "78:0"
    assert [len(jobs_of(folder, unit)) for unit in ("pretrain", "report")] == [1, 0]
    assert slurm_cluster.command("squeue", "--noheader").strip() == ""


@pytest.mark.long
def test_a_cancelled_chain_submits_nothing_more_and_can_be_submitted_again(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    waits = program(
        tmp_path / "waits", f'[[ $1 == pretrain && ! -e "{tmp_path}/go" ]] && exec sleep 300', f'exec {PATCHLINE} "$@"'
    )
    train = (
        PRETRAIN.replace("data: pack,", "")
        .replace("nodes: 2", "nodes: 1")
        .replace("[--steps", "[--data.url=d, --steps")
    )
    path = chain_file(tmp_path, train, REPORT)
    folder = submit_chain(slurm_cluster, path, command=f"'{waits}'")
    (job,) = jobs_of(folder, "pretrain")
    slurm_cluster.wait_for(lambda: slurm_cluster.squeue_state(job.job) == "RUNNING", deadline_seconds=60)
    environ = slurm_cluster.job_environment()
    assert f"job {job.job}: runs for" in status(slurm_cluster, folder)
    words = [str(PATCHLINE), "cancel", str(folder)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"cancelled {job.job}, which was RUNNING: pretrain.e1.r0.p0" in done.stderr
    assert "which was PENDING: gate.pretrain.e1.r0" in done.stderr
    assert slurm_cluster.command("squeue", "--noheader", "--states=PD,R").strip() == ""
    assert f"chain {folder}: cancelled, 0 of 2 steps complete" in status(slurm_cluster, folder)
    late = [str(PATCHLINE), "__gate", str(folder), "pretrain"]
    gate = subprocess.run(late, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (gate.returncode, "the chain is cancelled: nothing is submitted" in gate.stderr) == (78, True), gate.stderr
    submit_chain(slurm_cluster, path, command=f"'{waits}'")
    assert [job.tag for job in jobs_of(folder, "pretrain")] == ["pretrain.e2.r0"]
    assert subprocess.run(words, env=environ, check=False, timeout=120).returncode == 0


def test_a_dry_run_shows_scripts_graph_and_slurms_answers_and_writes_nothing(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    path = chain_file(tmp_path, PACK, PRETRAIN, FINETUNE, EVALUATE, REPORT)
    shown = submit(slurm_cluster, str(path), settings_in(tmp_path), "--dry-run", "--full")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("#!/usr/bin/env bash") == 16
    assert "└─ finetune " in shown.stdout
    assert shown.stderr.count("to start at") == 16
    assert not (tmp_path / "a chain").exists()
    refused = submit(slurm_cluster, str(chain_file(tmp_path, PRETRAIN)), settings_in(tmp_path))
    assert (refused.returncode, "names 'pack'" in refused.stderr) == (2, True), refused.stderr


def test_a_chain_that_cannot_work_is_refused_before_anything_waits(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    away = settings_in(tmp_path, "s3_endpoint: http://127.0.0.1:1")
    to_s3 = PACK.replace("flags: [", "flags: [--out=s3://none/x, ")
    keys = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine"}
    refused = submit(slurm_cluster, str(chain_file(tmp_path, to_s3)), away, **keys)
    assert (refused.returncode, "S3 is unreachable" in refused.stderr) == (2, True), refused.stderr
    in_memory = PRETRAIN.replace("data: pack,", "").replace("[--", "[--data.url=d, --run-dir=/dev/shm/run, --", 1)
    path = chain_file(tmp_path, in_memory)
    refused = submit(slurm_cluster, str(path), settings_in(tmp_path))
    assert "step pretrain: --run-dir /dev/shm/run is on tmpfs" in refused.stderr
    assert submit(slurm_cluster, str(path), settings_in(tmp_path), "--no-check", "--dry-run").returncode == 0
    assert not (tmp_path / "a chain").exists()


@pytest.mark.long
def test_links_continue_a_run_where_requeueing_is_forbidden(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The first link is asked to stop, the second completes the run, and the third ends at once. None is requeued."""
    data, run_dir = tmp_path / "digits", tmp_path / "run"
    subprocess.run([PATCHLINE, "pack", "digits", "--out", data], check=True, timeout=120)
    stops = program(
        tmp_path / "stops",
        f'if [[ $1 == pretrain ]] && mkdir "{tmp_path}/stopped" 2>/dev/null; then sleep 2; exit 75; fi',
        f'exec {PATCHLINE} "$@"',
    )
    settings = settings_in(tmp_path, "requeue: no", f"command: ['{stops}']")
    words = ("pretrain", "digits_smoke", settings, "--links=3", f"--data.url={data}", f"--run-dir={run_dir}")
    small = ("--steps=10", "--global-batch=32", "--schedule.warmup-steps=2")
    first = submit(slurm_cluster, *words, *small)
    assert first.returncode == 0, first.stderr
    again = submit(slurm_cluster, *words, *small)
    assert "has a job already" in again.stderr
    ids = [json.loads(line)["job"] for line in (run_dir / "submit" / "submitted.jsonl").read_text().splitlines()]
    assert len(ids) == 3
    slurm_cluster.wait_for(
        lambda: slurm_cluster.command("squeue", "--noheader").strip() == "", deadline_seconds=CHAIN_SECONDS
    )
    jobs = [slurm_cluster.job(number) for number in ids]
    text = "\n".join(path.read_text() for path in sorted((run_dir / "submit").glob("*.out")))
    assert [(job["ExitCode"], job["Restarts"]) for job in jobs] == [("74:0", "0"), ("0:0", "0"), ("0:0", "0")], text
    assert "done by a job before this one" in text

"""slurm/stage.sbatch on a real Slurm: two nodes, one rank each, real training."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.slurm import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SCRIPT = Path(__file__).resolve().parents[2] / "slurm" / "stage.sbatch"
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


def output_of(cluster: SlurmCluster, run_dir: Path) -> Path:
    return cluster.folder / f"{run_dir.name}.out"


def submit(
    cluster: SlurmCluster,
    *arguments: str,
    run_dir: Path,
    stage: str = "pretrain",
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> int:
    return cluster.sbatch(
        SCRIPT,
        stage,
        *arguments,
        f"--run-dir={run_dir}",
        options=["--nodes=2", f"--output={output_of(cluster, run_dir)}", *options],
        env={"PATCHLINE": str(PATCHLINE)} | dict(env or {}),
    )


def wait_until_ended(cluster: SlurmCluster, job_id: int) -> dict[str, str]:
    cluster.wait_for(lambda: cluster.squeue_state(job_id) in ENDED, deadline_seconds=JOB_SECONDS)
    return cluster.job(job_id)


def logged_steps(run_dir: Path) -> list[tuple[int, float]]:
    """Returns the step and the loss of every complete line in metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(record["step"], record["loss"]) for record in records]


@pytest.fixture(scope="module")
def unbroken(slurm_cluster: SlurmCluster, digits_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    run_dir = tmp_path_factory.mktemp("runs") / "unbroken"
    job = wait_until_ended(slurm_cluster, submit(slurm_cluster, *RECIPE, f"--data.url={digits_url}", run_dir=run_dir))
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), slurm_cluster.log_tail()
    assert [step for step, _ in logged_steps(run_dir)] == list(range(1, STEPS + 1))
    return run_dir


def requeue(cluster: SlurmCluster, job_id: int) -> None:
    cluster.scontrol("requeue", str(job_id))


def signal_batch_shell(cluster: SlurmCluster, job_id: int) -> None:
    """Sends the signal that --signal=B:USR1@120 sends before the time limit."""
    cluster.command("scancel", "--batch", "--signal=USR1", str(job_id))


def kill_a_rank(cluster: SlurmCluster, job_id: int) -> None:
    """Kills a rank, and none of the processes beside it, such as the writer of its checkpoints."""
    ranks = [pid for pid in cluster.processes() if is_python(pid) and b"pretrain" in words_of(pid)]
    os.kill(max(ranks), signal.SIGKILL)


def is_python(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")


def words_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


@pytest.mark.parametrize(
    ("cut_off", "restarts"),
    [
        pytest.param(
            requeue, 1, marks=pytest.mark.long
        ),  # as in a preemption or node failure: TERM to all, KILL soon after
        (signal_batch_shell, 1),  # the script forwards it, the ranks save, the script requeues itself
        pytest.param(
            kill_a_rank, 0, marks=pytest.mark.long
        ),  # a crash, at which Slurm would end the job: tried again in the same allocation
    ],
)
def test_a_run_cut_off_half_way_equals_an_unbroken_one(
    slurm_cluster: SlurmCluster,
    digits_url: str,
    unbroken: Path,
    tmp_path: Path,
    cut_off: Callable[[SlurmCluster, int], None],
    restarts: int,
) -> None:
    run_dir = tmp_path / cut_off.__name__
    job_id = submit(slurm_cluster, *RECIPE, f"--data.url={digits_url}", run_dir=run_dir)
    slurm_cluster.wait_for(lambda: len(logged_steps(run_dir)) >= STEPS // 2, deadline_seconds=JOB_SECONDS)
    cut_off(slurm_cluster, job_id)
    job = wait_until_ended(slurm_cluster, job_id)

    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", str(restarts)), slurm_cluster.log_tail()
    assert (run_dir / "DONE").exists()
    assert "continuing from step " in output_of(slurm_cluster, run_dir).read_text()  # resumed, not started again
    assert logged_steps(run_dir) == logged_steps(unbroken)
    ends = [each["end"] for each in tries_of(run_dir)]
    assert ends[-1] == "done"
    assert len(ends) == 2 or cut_off is requeue, "of a job that Slurm ends there may be no line"


def tries_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "submit" / "tries.jsonl").read_text().splitlines()]


def test_a_users_mistake_is_not_tried_again(slurm_cluster: SlurmCluster, digits_url: str, tmp_path: Path) -> None:
    arguments = ("digits_smoke", f"--data.url={digits_url}", "--global-batch=33")  # not divisible by 2 ranks

    job = wait_until_ended(slurm_cluster, submit(slurm_cluster, *arguments, run_dir=tmp_path / "mistake"))

    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0"), slurm_cluster.log_tail()


@pytest.mark.long
def test_other_stages_use_the_same_script(
    slurm_cluster: SlurmCluster, digits_url: str, unbroken: Path, tmp_path: Path
) -> None:
    """Fine-tuning is done when its marker says so, and an evaluation when its ranks exit with 0."""
    run_dir, data = tmp_path / "tuned", f"--data.url={digits_url}"
    words = ("digits_48", f"--initial.weights={unbroken}/weights", data, "--steps=4", "--schedule.warmup-steps=1")
    job = wait_until_ended(slurm_cluster, submit(slurm_cluster, *words, stage="finetune", run_dir=run_dir))
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), slurm_cluster.log_tail()
    assert (run_dir / "DONE").exists()
    output = slurm_cluster.folder / "evaluated.out"
    scored = slurm_cluster.sbatch(
        SCRIPT,
        *("evaluate", f"--weights={run_dir}/weights", data),
        options=["--nodes=2", f"--output={output}"],
        env={"PATCHLINE": str(PATCHLINE)},
    )
    job = wait_until_ended(slurm_cluster, scored)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), slurm_cluster.log_tail()
    assert "accuracy" in output.read_text()
    assert not (slurm_cluster.folder / f"patchline-{scored}").exists(), "it leaves nothing behind"


def program(path: Path, *lines: str) -> Path:
    """Writes an executable script. It can replace `patchline`, because it answers the batch script's questions."""
    judge = f'[[ ${{1-}} != __judge ]] || exec {PATCHLINE} "$@"'
    path.write_text("\n".join(["#!/usr/bin/env bash", judge, *lines, ""]))
    path.chmod(0o755)
    return path


@pytest.mark.long
def test_a_crash_loop_ends_after_three_tries_in_all(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The count continues after a requeue, is believed only if it is a number, and ends the later links."""
    run_dir = tmp_path / "loop"
    (run_dir / "submit").mkdir(parents=True)
    (run_dir / "submit" / "idle").write_text(f"a[$(touch {tmp_path}/executed)]")
    crashes = {"PATCHLINE": str(program(tmp_path / "crashes", "exit 9")), "PATCHLINE_RETRIES": "1"}
    job_id = submit(slurm_cluster, "digits_smoke", run_dir=run_dir, env=crashes)
    after = [f"--dependency=afterany:{job_id}"]  # as in a chain for sites that forbid to requeue
    link = submit(slurm_cluster, "digits_smoke", run_dir=run_dir, env=crashes, options=after)
    job, linked = wait_until_ended(slurm_cluster, job_id), wait_until_ended(slurm_cluster, link)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "78:0", "1"), slurm_cluster.log_tail()
    assert (linked["JobState"], linked["ExitCode"], linked["Restarts"]) == ("FAILED", "78:0", "0")
    output = output_of(slurm_cluster, run_dir).read_text()
    assert "the last of 3 tries in a row that saved nothing new: not tried again" in output
    assert "a job of this run has given up since this one was submitted" in output
    assert [each["end"] for each in tries_of(run_dir)] == ["crashed", "crashed", "gave up"]
    assert all(each["exit_codes"][0] == 9 for each in tries_of(run_dir)), "srun may end the other rank, with 143"
    assert not (tmp_path / "executed").exists()
    again = wait_until_ended(slurm_cluster, submit(slurm_cluster, "digits_smoke", run_dir=run_dir, env=crashes))
    assert (again["ExitCode"], again["Restarts"]) == ("78:0", "1"), "submitted again, it is tried again"


def without_code(path: Path, *lines: str, when: str) -> Path:
    """Writes a command that does not answer the batch script if this condition of bash is true."""
    program(path, *lines)
    path.write_text(path.read_text().replace("\n", f"\n[[ $1 != __judge ]] || ! {when} || exit 127\n", 1))
    return path


@pytest.mark.parametrize(
    ("code", "expected", "ends"), [(2, "2:0", ["at fault"]), (9, "78:0", ["crashed"] * 2 + ["gave up"])]
)
def test_a_job_whose_code_was_removed_decides_by_the_exit_codes(
    slurm_cluster: SlurmCluster, tmp_path: Path, code: int, expected: str, ends: list[str]
) -> None:
    """The script then chooses the nodes itself, and counts the tries that saved nothing. What a job with the same
    number has left in the folder does not count."""
    gone, state = tmp_path / "gone", tmp_path / "run" / "submit"
    removed = without_code(tmp_path / "removed", f"touch {gone}; exit {code}", when=f"[[ -e {gone} ]]")
    environ = {"PATCHLINE": str(removed)}
    job_id = submit(slurm_cluster, "digits_smoke", run_dir=tmp_path / "run", options=["--hold"], env=environ)
    (state / f"exits-{job_id}-0-0").mkdir(parents=True)
    (state / f"exits-{job_id}-0-0" / "rank-7").write_text("78\n")
    (state / "crashes").write_text(f"{job_id} n1\n{job_id}0 n2\n")
    slurm_cluster.scontrol("release", str(job_id))
    job = wait_until_ended(slurm_cluster, job_id)
    log = output_of(slurm_cluster, tmp_path / "run").read_text()
    assert (job["ExitCode"], job["Restarts"]) == (expected, "0"), log
    assert (state / "crashes").read_text() == f"{job_id}0 n2\n"
    assert "does not start (exit code 127): this script decides by itself" in log
    assert [each["end"] for each in tries_of(tmp_path / "run")] == ends, log


@pytest.mark.long
def test_a_job_without_code_is_requeued_three_times(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """Another node may have the code."""
    never = without_code(tmp_path / "never", f"touch {tmp_path}/ran", when="true")
    job_id = submit(slurm_cluster, "digits_smoke", run_dir=tmp_path / "run", env={"PATCHLINE": str(never)})
    job = wait_until_ended(slurm_cluster, job_id)
    assert (job["ExitCode"], job["Restarts"]) == ("78:0", "3"), slurm_cluster.log_tail()
    assert not (tmp_path / "ran").exists()


def test_a_task_of_an_array_requeues_itself_alone(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The last task has the id of the whole array, and would restart all tasks with it."""
    once = program(
        tmp_path / "once",
        f'echo "$SLURM_ARRAY_TASK_ID" >>{tmp_path}/began',
        f"[[ $SLURM_ARRAY_TASK_ID == 1 && ! -e {tmp_path}/crashed ]] && touch {tmp_path}/crashed && exit 9",
        f"[[ $SLURM_ARRAY_TASK_ID == 1 ]] || until [[ -e {tmp_path}/go ]]; do sleep 0.2; done",
    )
    job_id = slurm_cluster.sbatch(
        SCRIPT,
        *("evaluate", "weights"),
        options=["--array=0-1", "--nodes=1", f"--output={slurm_cluster.folder}/array-%a.out"],
        env={"PATCHLINE": str(once), "PATCHLINE_RETRIES": "0"},
    )
    began = tmp_path / "began"

    def lines() -> list[str]:
        return sorted(began.read_text().split()) if began.exists() else []

    slurm_cluster.wait_for(lambda: lines() == ["0", "1", "1"], deadline_seconds=JOB_SECONDS)
    (tmp_path / "go").touch()
    slurm_cluster.wait_for(
        lambda: set(slurm_cluster.squeue_state(job_id).split()) <= ENDED, deadline_seconds=JOB_SECONDS
    )
    assert slurm_cluster.squeue_state(job_id).split() == ["COMPLETED"] * 2, slurm_cluster.log_tail()
    assert lines() == ["0", "1", "1"]


@pytest.mark.long
def test_a_signal_before_the_ranks_start_is_not_lost(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The signal would end a naive script. Ours continues the job, and counts no crash."""
    run_dir = tmp_path / "early"
    slow = tmp_path / "bin"
    slow.mkdir()
    program(slow / "squeue", f"touch {tmp_path}/begun", "sleep 3", 'PATH=${PATH#*:} exec squeue "$@"')
    ends = program(tmp_path / "patchline", f"touch {tmp_path}/ran", "exit 2")
    environment = {"PATCHLINE": str(ends), "PATH": f"{slow}:{slurm_cluster.job_environment()['PATH']}"}
    job_id = submit(slurm_cluster, "digits_smoke", run_dir=run_dir, env=environment)
    slurm_cluster.wait_for((tmp_path / "begun").exists, deadline_seconds=JOB_SECONDS)
    signal_batch_shell(slurm_cluster, job_id)
    job = wait_until_ended(slurm_cluster, job_id)
    assert (job["ExitCode"], job["Restarts"]) == ("2:0", "1"), slurm_cluster.log_tail()
    assert tries_of(run_dir)[0]["end"] == "asked to stop"


@pytest.mark.long
def test_a_limit_that_comes_before_any_save_is_not_met_for_ever(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The job gives up after three times in a row. If --run-dir is given twice, the last one counts."""
    run_dir = tmp_path / "hasty"
    asks = program(tmp_path / "asks", 'scancel --batch --signal=USR1 "$SLURM_JOB_ID"; sleep 60')
    words = ("digits_smoke", f"--run-dir={tmp_path}/other")
    job_id = submit(slurm_cluster, *words, run_dir=run_dir, options=["--nodes=1"], env={"PATCHLINE": str(asks)})
    job = wait_until_ended(slurm_cluster, job_id)
    output = output_of(slurm_cluster, run_dir).read_text()
    assert (job["ExitCode"], job["Restarts"]) == ("78:0", "2"), output
    assert "it needs more time before its limit" in output
    assert [each["end"] for each in tries_of(run_dir)] == ["asked to stop", "asked to stop", "gave up"]
    assert not (tmp_path / "other").exists()


@pytest.mark.long
def test_a_run_that_is_told_to_stop_is_another_end_than_one_that_continues(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """A chain submits a run again that a time limit stopped, but not one that has a file STOP."""
    run_dir = tmp_path / "told"
    stops = program(tmp_path / "stops", f"touch {run_dir}/STOP; exit 75")
    options = ["--nodes=1", "--no-requeue"]
    job_id = submit(slurm_cluster, "digits_smoke", run_dir=run_dir, options=options, env={"PATCHLINE": str(stops)})
    assert wait_until_ended(slurm_cluster, job_id)["ExitCode"] == "78:0"
    assert [each["end"] for each in tries_of(run_dir)] == ["told to stop"]
    (run_dir / "STOP").unlink()
    saves = program(tmp_path / "saves", "exit 75")
    env = {"PATCHLINE": str(saves), "PATCHLINE_REQUEUE": "no"}
    again = submit(slurm_cluster, "digits_smoke", run_dir=run_dir, options=options, env=env)
    assert wait_until_ended(slurm_cluster, again)["ExitCode"] == "74:0"
    assert [each["end"] for each in tries_of(run_dir)] == ["told to stop", "stopped"]


@pytest.mark.long
def test_a_run_with_a_file_stop_stays_stopped(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The file may be there before the first try, or appear while ranks start, which then exit with 2."""
    run_dir, options = tmp_path / "kept", ["--nodes=1"]
    refuses = program(tmp_path / "refuses", f"touch {tmp_path}/ran {run_dir}/STOP; exit 2")
    for has_run in (True, False):
        job_id = submit(
            slurm_cluster, "digits_smoke", run_dir=run_dir, options=options, env={"PATCHLINE": str(refuses)}
        )
        assert wait_until_ended(slurm_cluster, job_id)["ExitCode"] == "78:0", slurm_cluster.log_tail()
        assert (tmp_path / "ran").exists() == has_run
        (tmp_path / "ran").unlink(missing_ok=True)
    assert [(each["exit_codes"], each["end"]) for each in tries_of(run_dir)] == [
        ([2], "told to stop"),
        ([], "told to stop"),
    ]


@pytest.mark.long
def test_a_link_behind_the_end_of_its_run_starts_no_rank(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """Jobs may even be requeued. A run that a later job extends was done before that job was submitted."""
    run_dir, options = tmp_path / "linked", ["--nodes=1"]
    lines = ("[[ $1 == __done ]] && exit 0", f"echo ran >>{tmp_path}/ran; touch {run_dir}/DONE")
    env = {"PATCHLINE": str(program(tmp_path / "ends", *lines))}
    first = submit(slurm_cluster, "digits_smoke", run_dir=run_dir, options=[*options, "--hold"], env=env)
    link = submit(slurm_cluster, "digits_smoke", run_dir=run_dir, options=[*options, f"-dafterany:{first}"], env=env)
    second = int(time.time())  # of which Slurm's times are
    slurm_cluster.wait_for(lambda: int(time.time()) > second, deadline_seconds=JOB_SECONDS)
    slurm_cluster.scontrol("release", str(first))
    assert wait_until_ended(slurm_cluster, link)["JobState"] == "COMPLETED", slurm_cluster.log_tail()
    assert (tmp_path / "ran").read_text() == "ran\n", output_of(slurm_cluster, run_dir).read_text()
    assert "done by a job before this one" in output_of(slurm_cluster, run_dir).read_text()
    later = submit(slurm_cluster, "digits_smoke", "--extend", run_dir=run_dir, options=options, env=env)
    assert wait_until_ended(slurm_cluster, later)["JobState"] == "COMPLETED", slurm_cluster.log_tail()
    assert (tmp_path / "ran").read_text() == "ran\nran\n"


@pytest.mark.long
def test_a_marker_that_vouches_for_nothing_is_no_end(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "forged"
    words = f'if [[ $1 == __done ]]; then exec {PATCHLINE} "$@"; fi'
    forges = program(tmp_path / "forges", words, f"touch {run_dir}/DONE; exit 0")
    job_id = submit(slurm_cluster, "digits_smoke", run_dir=run_dir, env={"PATCHLINE": str(forges)})
    job = wait_until_ended(slurm_cluster, job_id)
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "78:0"), slurm_cluster.log_tail()


@pytest.mark.parametrize(
    ("words", "options", "env", "message"),
    [
        (["pretrain"], [], {}, "usage: sbatch"),
        (["evaluate", "weights"], ["--time=2"], {}, "the time limit is 120 s"),
        (["evaluate", "weights"], ["--time=2"], {"SQUEUE_STATES": "COMPLETED"}, "the time limit is 120 s"),
        (["evaluate", "weights"], [], {"PATCHLINE_RETRIES": "a[$(id)]"}, "PATCHLINE_RETRIES is 'a[$(id)]'; allowed: 0"),
        (["evaluate", "weights"], [], {"PATCHLINE_LAUNCHER": "mpirun"}, "allowed: srun, torchrun"),
        (["evaluate", "weights"], [], {"PATCHLINE": "/nowhere/patchline"}, "no command /nowhere/patchline"),
    ],
)
def test_what_cannot_work_is_refused(
    slurm_cluster: SlurmCluster,
    tmp_path: Path,
    words: list[str],
    options: list[str],
    env: dict[str, str],
    message: str,
) -> None:
    output = slurm_cluster.folder / f"{tmp_path.name}.out"
    environment = {"PATCHLINE": str(PATCHLINE)} | env
    job_id = slurm_cluster.sbatch(SCRIPT, *words, options=[f"--output={output}", *options], env=environment)
    job = wait_until_ended(slurm_cluster, job_id)
    assert (job["ExitCode"], job["Restarts"]) == ("2:0", "0"), slurm_cluster.log_tail()
    assert message in output.read_text()


def shown_port(folder: Path, job_id: int) -> int:
    (port,) = set((folder / f"port-{job_id}").read_text().split())
    return int(port)


@pytest.mark.long
def test_a_port_that_is_taken_is_passed_over(slurm_cluster: SlurmCluster, digits_url: str, tmp_path: Path) -> None:
    """The port of the next job follows from its id, and another process on the node may use it."""
    # Appended, since the rank that ends first has the other one killed, perhaps between emptying a file and writing it.
    shows = program(tmp_path / "shows", f'echo "$MASTER_PORT" >>{tmp_path}/port-$SLURM_JOB_ID', "exit 2")
    first = submit(slurm_cluster, "digits_smoke", run_dir=tmp_path / "first", env={"PATCHLINE": str(shows)})
    wait_until_ended(slurm_cluster, first)
    port = shown_port(tmp_path, first)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 101))
        taken.listen()
        second = submit(slurm_cluster, "digits_smoke", run_dir=tmp_path / "second", env={"PATCHLINE": str(shows)})
        wait_until_ended(slurm_cluster, second)
    assert second == first + 1
    assert shown_port(tmp_path, second) == port + 101 + 997

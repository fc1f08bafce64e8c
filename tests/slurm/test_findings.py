"""What goes wrong under Slurm, each shown with a script of the kind that people write, which loses work, and with
slurm/stage.sbatch in the same place, which does not. docs/reference/slurm.md has the table.

The stage is a short program, since only the scripts differ; test_stage.py has real training.
"""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.slurm import SlurmCluster, SlurmConfig
from tests.slurm.test_stage import ENDED, JOB_SECONDS, SCRIPT, program, wait_until_ended

pytestmark = [pytest.mark.slurm, pytest.mark.long]
RANKS_SAVE = (
    "trap 'sleep 1; touch $WHICH-saved-$SLURM_PROCID; exit 75' USR2 TERM",
    "touch $WHICH-up-$SLURM_PROCID",
    "while [[ ! -e $WHICH-saved-$SLURM_PROCID ]]; do sleep 0.1; done",
)
FAILS_ONCE = ("[[ -e $WHICH-failed ]] || { touch $WHICH-failed; exit 9; }",)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """Starts a cluster with enough nodes for both scripts at the same time."""
    with SlurmCluster(SlurmConfig(num_nodes=5, cpus_per_node=1)) as cluster:
        yield cluster


class Both:
    """A naive script and ours, which are submitted at the same time, in their own folder."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *lines: str, naive: str) -> None:
        self.cluster, self.folder = cluster, folder
        self.program = program(folder / "program", *lines)
        self.naive_script = program(folder / "naive.sbatch", naive.replace("PROGRAM", str(self.program)))

    def naive(self, *options: str) -> int:
        return self._submit(self.naive_script, "naive", options, ())

    def ours(self, *options: str) -> int:
        return self._submit(SCRIPT, "ours", options, ("evaluate", "weights"))

    def _submit(self, script: Path, name: str, options: tuple[str, ...], words: tuple[str, ...]) -> int:
        own = [f"--chdir={self.folder}", f"--job-name={name}", f"--output={self.folder}/{name}.out", *options]
        return self.cluster.sbatch(script, *words, options=own, env={"PATCHLINE": str(self.program), "WHICH": name})

    def there(self, pattern: str) -> list[str]:
        return sorted(path.name for path in self.folder.glob(pattern))

    def wait_for(self, pattern: str, number: int) -> None:
        self.cluster.wait_for(lambda: len(self.there(pattern)) >= number, deadline_seconds=JOB_SECONDS)


def state(cluster: SlurmCluster, job: int) -> tuple[str, str]:
    found = wait_until_ended(cluster, job)
    return found["JobState"], found["Restarts"]


def test_1_term_to_srun_kills_the_ranks_before_they_save(cluster: SlurmCluster, tmp_path: Path) -> None:
    naive = "srun PROGRAM &\npid=$!\ntrap 'kill -TERM $pid' USR1\nwait $pid\nwait $pid"
    both = Both(cluster, tmp_path, *RANKS_SAVE, naive=naive)
    theirs, ours = both.naive("--nodes=2", "--ntasks=2"), both.ours("--nodes=2")
    both.wait_for("*-up-*", 4)
    for job in (theirs, ours):
        cluster.command("scancel", "--batch", "--signal=USR1", str(job))
    both.wait_for("ours-saved-*", 2)
    assert state(cluster, theirs)[0] == "FAILED"
    assert both.there("naive-saved-*") == []
    cluster.command("scancel", str(ours))
    wait_until_ended(cluster, ours)


def test_4_a_crashed_rank_is_not_requeued_by_slurm(cluster: SlurmCluster, tmp_path: Path) -> None:
    both = Both(cluster, tmp_path, *FAILS_ONCE, naive="#SBATCH --requeue\nsrun PROGRAM")
    theirs, ours = both.naive("--requeue"), both.ours()
    assert state(cluster, theirs) == ("FAILED", "0")
    assert state(cluster, ours) == ("COMPLETED", "0")


def test_5_what_waits_for_success_never_starts_after_a_failure(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The next job does not even start when the failed job is requeued and succeeds."""
    both = Both(cluster, tmp_path, *FAILS_ONCE, naive="srun PROGRAM")
    theirs, ours = both.naive(), both.ours()
    next_script = program(tmp_path / "next.sbatch", "touch $1")
    after = [
        cluster.sbatch(next_script, str(tmp_path / name), options=[f"--dependency=afterok:{job}", "--output=/dev/null"])
        for name, job in (("after-naive", theirs), ("after-ours", ours))
    ]
    assert state(cluster, theirs)[0] == "FAILED"
    cluster.wait_for(lambda: is_given_up(cluster, after[0]), deadline_seconds=JOB_SECONDS)
    cluster.scontrol("requeue", str(theirs))
    cluster.wait_for(lambda: cluster.squeue_state(theirs) == "COMPLETED", deadline_seconds=JOB_SECONDS)
    assert state(cluster, ours)[0] == "COMPLETED"
    assert state(cluster, after[1])[0] == "COMPLETED"
    assert both.there("after-*") == ["after-ours"]
    time.sleep(8)  # more than a round of the scheduler
    assert is_given_up(cluster, after[0])
    cluster.command("scancel", str(after[0]))


def is_given_up(cluster: SlurmCluster, job: int) -> bool:
    return cluster.job(job)["Reason"] == "DependencyNeverSatisfied"


def test_7_requeueing_by_the_jobs_number_restarts_a_whole_array(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The last task of an array has the number of the whole array."""
    lines = (
        "echo x >>$WHICH-began-$SLURM_ARRAY_TASK_ID",
        "[[ $SLURM_ARRAY_TASK_ID == 0 ]] || until [[ -e $WHICH-began-0 ]]; do sleep 0.1; done",
        "[[ $SLURM_ARRAY_TASK_ID == 1 && ! -e $WHICH-failed ]] && touch $WHICH-failed && exit 9",
        "[[ $SLURM_ARRAY_TASK_ID == 1 ]] || until [[ -e go-$WHICH ]]; do sleep 0.1; done",
        "exit 0",
    )
    both = Both(cluster, tmp_path, *lines, naive="srun PROGRAM || scontrol requeue $SLURM_JOB_ID")
    jobs = {"naive": both.naive("--array=0-1"), "ours": both.ours("--array=0-1", "--export=ALL,PATCHLINE_RETRIES=0")}
    for name, job in jobs.items():
        wait_until_begun(cluster, tmp_path / f"{name}-began-1", 2)
        (tmp_path / f"go-{name}").touch()
        wait_until_all_ended(cluster, job)
    assert (tmp_path / "ours-began-0").read_text().count("x") == 1
    assert (tmp_path / "naive-began-0").read_text().count("x") == 2, "the task that was well had to begin again"


def wait_until_begun(cluster: SlurmCluster, path: Path, number: int) -> None:
    cluster.wait_for(lambda: path.exists() and path.read_text().count("x") == number, deadline_seconds=JOB_SECONDS)


def wait_until_all_ended(cluster: SlurmCluster, array: int) -> None:
    cluster.wait_for(lambda: set(cluster.squeue_state(array).split()) <= ENDED, deadline_seconds=JOB_SECONDS)


def test_8_and_9_a_rank_dies_and_the_others_wait(cluster: SlurmCluster, tmp_path: Path) -> None:
    """By default, srun leaves the others running, as ranks do in a collective; and a requeued job waits until its old
    credential has expired, 2 minutes by default and 5 s here. Ours ends them and starts again where it is."""
    lines = (
        "date +%s.%N >>$WHICH-began-$SLURM_PROCID",
        "[[ -e $WHICH-died ]] && exit 0",
        "[[ $SLURM_PROCID == 1 ]] && { sleep 1; touch $WHICH-died; date +%s.%N >$WHICH-at; exit 9; }",
        "exec sleep 40",
    )
    naive = 'srun PROGRAM || [[ $SLURM_RESTART_COUNT ]] || scontrol requeue "$SLURM_JOB_ID"'
    both = Both(cluster, tmp_path, *lines, naive=naive)
    theirs, ours = both.naive("--nodes=2", "--ntasks=2"), both.ours("--nodes=2")
    assert state(cluster, ours) == ("COMPLETED", "0")
    both.wait_for("naive-at", 1)
    assert cluster.squeue_state(theirs) == "RUNNING", "nobody has told the other rank"
    assert len(times(tmp_path / "naive-began-1")) == 1
    wait_until_started_again(cluster, tmp_path)
    died = {name: times(tmp_path / f"{name}-at")[0] for name in ("naive", "ours")}
    again = {name: times(tmp_path / f"{name}-began-1")[1] - died[name] for name in died}
    assert again["ours"] < 20
    assert again["naive"] > 35, "40 s of the other rank, and the wait of a requeued job"
    assert wait_until_ended(cluster, theirs)["Restarts"] == "1"


def wait_until_started_again(cluster: SlurmCluster, folder: Path) -> None:
    cluster.wait_for(lambda: len(times(folder / "naive-began-1")) == 2, deadline_seconds=JOB_SECONDS)


def times(path: Path) -> list[float]:
    return [float(line) for line in path.read_text().split()]


def test_2_signals_of_a_step_reach_the_helpers_of_a_rank(cluster: SlurmCluster, tmp_path: Path) -> None:
    """A child with Python's default disposition dies of the signal that asks its rank to save. Ours ignore it: the
    run's writer of checkpoints does its work (test_stage.py, in which the ranks get it in real training)."""
    helper = tmp_path / "helper.py"
    helper.write_text(
        "import os, signal, subprocess, sys, time\n"
        "ignores = 'ignore' in sys.argv\n"
        "before = (lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN)) if ignores else None\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], preexec_fn=before)\n"
        "seen = []\n"
        "signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))\n"
        "open(sys.argv[1] + '-up', 'w').close()\n"
        "while not seen: time.sleep(0.05)\n"
        "time.sleep(1)\n"
        "open(sys.argv[1] + '-code', 'w').write(str(child.poll()))\n"
        "child.kill()\n"
    )
    script = program(tmp_path / "helpers.sbatch", 'srun python3 "$@"')
    jobs = {
        name: cluster.sbatch(
            script, str(helper), str(tmp_path / name), *more, options=[f"--output={tmp_path}/{name}.out"]
        )
        for name, more in (("default", ()), ("ignoring", ("ignore",)))
    }
    for name, job in jobs.items():
        cluster.wait_for((tmp_path / f"{name}-up").exists, deadline_seconds=JOB_SECONDS)
        cluster.command("scancel", "--signal=USR2", str(job))
        cluster.wait_for((tmp_path / f"{name}-code").exists, deadline_seconds=JOB_SECONDS)
        wait_until_ended(cluster, job)
    assert (tmp_path / "default-code").read_text() == str(-signal.SIGUSR2)
    assert (tmp_path / "ignoring-code").read_text() == "None", "alive"


def test_6_srun_returns_0_after_losing_a_node(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The last one, since a node is gone for a while. Half of the work is missing, and the job is COMPLETED. Ours does
    not ask to keep a job that has lost a node, and is requeued."""
    lines = (
        "touch $WHICH-up-$SLURM_PROCID",
        "[[ ${SLURM_RESTART_COUNT:-0} == 0 ]] || { touch $WHICH-finished-$SLURM_PROCID; exit 0; }",
        "until [[ -e go ]]; do sleep 0.2; done",
        "[[ $SLURM_PROCID == 0 ]] && touch $WHICH-finished-0",
        "exit 0",
    )
    both = Both(cluster, tmp_path, *lines, naive="srun --no-kill PROGRAM")
    theirs, ours = both.naive("--nodes=2", "--ntasks=2", "--no-kill"), both.ours("--nodes=2")
    both.wait_for("*-up-*", 4)
    lost = [last_node(cluster, job) for job in (theirs, ours)]
    for node in lost:
        cluster.kill_node(node)
    cluster.wait_for(lambda: all(is_down(cluster, node) for node in lost), deadline_seconds=JOB_SECONDS)
    (tmp_path / "go").touch()
    assert state(cluster, theirs)[0] == "COMPLETED"
    assert both.there("naive-finished-*") == ["naive-finished-0"], "the other rank never finished"
    for node in lost:
        cluster.start_node(node)
    cluster.wait_for(lambda: cluster.squeue_state(ours) == "COMPLETED", deadline_seconds=JOB_SECONDS)  # after NODE_FAIL
    assert cluster.job(ours)["Restarts"] == "1"
    assert both.there("ours-finished-*") == ["ours-finished-0", "ours-finished-1"]


def last_node(cluster: SlurmCluster, job: int) -> str:
    nodes = cluster.command("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split()
    return nodes[-1]


def is_down(cluster: SlurmCluster, node: str) -> bool:
    time.sleep(0.5)
    return "down" in cluster.command("sinfo", "--noheader", f"--nodes={node}", "--format=%T").lower()

"""slurm/stage.sbatch on a real Slurm of three nodes: sick nodes are left out, a spare takes the place of a lost one."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.slurm import SlurmCluster, SlurmConfig
from tests.slurm.test_stage import ENDED, SCRIPT, program

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
JOB_SECONDS = 200


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[SlurmCluster]:
    with SlurmCluster(SlurmConfig(num_nodes=3, cpus_per_node=1)) as cluster:
        yield cluster


def evaluate(cluster: SlurmCluster, patchline: Path, *options: str, **environ: str) -> tuple[dict[str, str], str]:
    """Runs a stage without a run directory, with this command. Returns the job after its end, and its log."""
    job_id = start(cluster, patchline, *options, **environ)
    return ended(cluster, job_id)


def start(cluster: SlurmCluster, patchline: Path, *options: str, **environ: str) -> int:
    output = f"--output={cluster.folder}/%j.out"
    words = ("evaluate", "weights", "--data.url", "data")
    return cluster.sbatch(SCRIPT, *words, options=[output, *options], env={"PATCHLINE": str(patchline)} | environ)


def ended(cluster: SlurmCluster, job_id: int) -> tuple[dict[str, str], str]:
    cluster.wait_for(lambda: cluster.squeue_state(job_id) in ENDED, deadline_seconds=JOB_SECONDS)
    return cluster.job(job_id), (cluster.folder / f"{job_id}.out").read_text()


def without_scratch(folder: Path, *bad: str) -> dict[str, str]:
    """Returns an environment in which the `bad` nodes have no TMPDIR. The path of TMPDIR has the node's name."""
    for name in {"n1", "n2", "n3"} - set(bad):
        (folder / name).mkdir()
    return {
        "BASH_ENV": str(program(folder / "env", f"[[ -z ${{SLURMD_NODENAME-}} ]] || TMPDIR={folder}/$SLURMD_NODENAME"))
    }


@pytest.mark.long
def test_healthy_nodes_are_checked_quickly(three_nodes: SlurmCluster, tmp_path: Path) -> None:
    names = program(tmp_path / "names", f'echo "$SLURMD_NODENAME" >>{tmp_path}/began')
    job, log = evaluate(three_nodes, names, "--nodes=3")
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), log
    found = re.search(r"checked 3 nodes in (\d+) s, 3 are healthy, 3 are needed", log)
    assert found, log
    assert int(found[1]) <= 5
    job, log = evaluate(three_nodes, names, "--nodes=3", PATCHLINE_PREFLIGHT="0")
    assert (job["JobState"], "checked" in log) == ("COMPLETED", False)
    assert sorted((tmp_path / "began").read_text().split()) == ["n1", "n1", "n2", "n2", "n3", "n3"]


@pytest.mark.long
def test_a_sick_node_is_named_and_left_out(three_nodes: SlurmCluster, tmp_path: Path) -> None:
    names = program(tmp_path / "names", f'echo "$SLURMD_NODENAME" >>{tmp_path}/began')
    sick = without_scratch(tmp_path, "n2")
    job, log = evaluate(three_nodes, names, "--nodes=3", "--no-kill", PATCHLINE_SPARES="1", **sick)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), log
    assert "node n2 is left out: no-scratch" in log
    assert sorted((tmp_path / "began").read_text().split()) == ["n1", "n3"]


@pytest.mark.long
def test_a_wrong_clock_on_the_first_node_is_its_own_fault(three_nodes: SlurmCluster, tmp_path: Path) -> None:
    """Also checks that links are not followed that another user has made under guessable names of temporary files."""
    names = program(tmp_path / "names", f'echo "$SLURMD_NODENAME" >>{tmp_path}/began')
    (tmp_path / "theirs").write_text("years of work")
    for node in ("n1", "n2", "n3"):
        (tmp_path / node).mkdir()
        for number in range(1, 200):
            (tmp_path / node / f"patchline-{number}-{node}").symlink_to(tmp_path / "theirs")
    lines = (
        f"[[ -z ${{SLURMD_NODENAME-}} ]] || TMPDIR={tmp_path}/$SLURMD_NODENAME",
        "if [[ ${SLURMD_NODENAME-n1} == n1 ]]; then unset EPOCHREALTIME; EPOCHREALTIME=4000000000.5; fi",
    )
    environ = str(program(tmp_path / "env", *lines))
    job, log = evaluate(three_nodes, names, "--nodes=3", "--no-kill", PATCHLINE_SPARES="1", BASH_ENV=environ)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), log
    assert re.findall("node (.*) is left out: (.*)", log) == [("n1", "clock")]
    assert sorted((tmp_path / "began").read_text().split()) == ["n2", "n3"]
    assert (tmp_path / "theirs").read_text() == "years of work"


@pytest.mark.long
@pytest.mark.parametrize("has_spare", [True, False])
def test_a_node_that_crashes_its_rank_is_left_out_after_the_second_time(
    three_nodes: SlurmCluster, tmp_path: Path, has_spare: bool
) -> None:
    """A spare takes the node's place, or the job is requeued elsewhere, before the node has used up all tries."""
    crashes = program(
        tmp_path / "crashes",
        f'echo "$SLURMD_NODENAME" >>{tmp_path}/began',
        "[[ $SLURMD_NODENAME != n2 ]] || { sleep 1; exit 139; }",
        f"for try in {{1..50}}; do [[ $(sort -u {tmp_path}/began | wc -l) -lt 3 ]] || exit 0; sleep 0.2; done",
        "exit 74",
    )
    options = ["--nodes=3", "--no-kill"] if has_spare else ["--nodes=2"]
    job, log = evaluate(three_nodes, crashes, *options, PATCHLINE_SPARES=str(int(has_spare)))
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0" if has_spare else "1"), log
    assert log.count("only ranks on n2 crashed by themselves") == 2
    assert "node n2 is left out: crashes" in log
    assert Counter((tmp_path / "began").read_text().split()) == {"n1": 3, "n2": 2, "n3": 1}


@pytest.mark.long
@pytest.mark.parametrize("has_spare", [True, False])
def test_a_job_of_one_node_that_crashes_it_goes_elsewhere_once(
    three_nodes: SlurmCluster, tmp_path: Path, has_spare: bool
) -> None:
    """Two crashes in a row that saved nothing are enough, since a third would end the job."""
    began = tmp_path / "began"
    crashes = program(
        tmp_path / "crashes",
        f'echo "$SLURMD_NODENAME" >>{began}',
        f"[[ $SLURMD_NODENAME != $(head -n 1 {began}) ]] || exit 139",
    )
    options = ["--nodes=2", "--no-kill"] if has_spare else ["--nodes=1"]
    job, log = evaluate(three_nodes, crashes, *options, PATCHLINE_SPARES=str(int(has_spare)))
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0" if has_spare else "1"), log
    first, second, third = began.read_text().split()
    assert first == second != third
    assert f"node {first} is left out: crashes" in log
    if not has_spare:
        began.unlink()
        job, log = evaluate(three_nodes, crashes, *options, PATCHLINE_REQUEUE="no")
        assert (job["ExitCode"], len(began.read_text().split())) == ("78:0", 3), "it stays, and keeps its third try"


@pytest.mark.long
def test_a_step_whose_srun_was_killed_holds_up_no_other(three_nodes: SlurmCluster, tmp_path: Path) -> None:
    """If srun is killed before it has started ranks, its step stays: no node knows it, and Slurm does not end it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    path = three_nodes.job_environment()["PATH"]
    steps = "squeue --noheader --steps --jobs $SLURM_JOB_ID --format %i"
    program(
        tools / "srun",
        f"PATH={path}",
        f'[[ $* != *--overlap* && ! -e {tmp_path}/killed ]] || exec srun "$@"',
        f"touch {tmp_path}/killed",
        'srun "$@" & pid=$!',
        f"until {steps} | grep -q '[.][0-9]$'; do :; done",
        "kill -KILL $pid; exit 137",
    )
    does = program(tmp_path / "does", "exit 0")
    job, log = evaluate(three_nodes, does, "--nodes=2", PATH=f"{tools}:{path}")
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), log
    assert (tmp_path / "killed").exists()


@pytest.mark.long
def test_too_few_healthy_nodes_give_up_in_the_end(three_nodes: SlurmCluster, tmp_path: Path) -> None:
    job, log = evaluate(
        three_nodes,
        program(tmp_path / "never", f"touch {tmp_path}/ran"),
        "--nodes=3",
        **without_scratch(tmp_path, "n3"),
    )
    assert (job["ExitCode"], job["Restarts"]) == ("78:0", "2"), log
    assert "submit with --exclude=n3" in log
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_a_sick_node_is_avoided_where_there_are_others(three_nodes: SlurmCluster, tmp_path: Path) -> None:
    """Slurm prefers this node to the third one, so a requeued job would get it again."""
    names = program(tmp_path / "names", f'echo "$SLURMD_NODENAME" >>{tmp_path}/began')
    job, log = evaluate(three_nodes, names, "--nodes=2", **without_scratch(tmp_path, "n2"))
    assert (job["JobState"], job["Restarts"], job["ExcNodeList"]) == ("COMPLETED", "1", "n2"), log
    assert "node n2 is left out: no-scratch" in log
    assert "it will avoid n2" in log
    assert sorted((tmp_path / "began").read_text().split()) == ["n1", "n3"]


@pytest.mark.long
def test_a_folder_that_only_one_node_sees_ends_the_job(three_nodes: SlurmCluster, tmp_path: Path) -> None:
    """The other nodes work in another folder, where the relative path of the records does not exist."""
    elsewhere = program(tmp_path / "env", f"[[ ${{SLURMD_NODENAME-n1}} == n1 ]] || cd {tmp_path}")
    never = program(tmp_path / "never", f"touch {tmp_path}/ran")
    job, log = evaluate(three_nodes, never, "--nodes=3", "--nodelist=n[1-3]", BASH_ENV=str(elsewhere))
    assert (job["ExitCode"], job["Restarts"]) == ("78:0", "0"), log
    assert "the nodes do not share" in log
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_node_that_vanished(three_nodes: SlurmCluster, tmp_path: Path) -> None:
    """This test is the last, because the cluster has one node less afterwards."""
    waits = program(
        tmp_path / "waits",
        f'echo "$SLURMD_NODENAME" >>{tmp_path}/began',
        f"[[ ! -e {tmp_path}/lost ]] || exit 0",
        f"until [[ -e {tmp_path}/lost ]]; do sleep 0.2; done",
        "exit 9",
    )
    job_id = start(three_nodes, waits, "--nodes=3", "--no-kill", PATCHLINE_SPARES="1")
    began = tmp_path / "began"
    three_nodes.wait_for(lambda: began.exists() and len(began.read_text().split()) == 2, deadline_seconds=JOB_SECONDS)
    three_nodes.kill_node("n2")
    killed = time.monotonic()
    (tmp_path / "lost").touch()
    job, log = ended(three_nodes, job_id)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), log
    assert "node n2 is left out: no-answer" in log
    assert began.read_text().split()[2:] in (["n1", "n3"], ["n3", "n1"])
    assert time.monotonic() - killed < 120

"""slurm/stage.sbatch on a real Slurm of three nodes: sick nodes are left out, a spare takes the place of a lost one."""

import os
import re
import subprocess
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
    """A stage without a run directory, whose command is `patchline`; the job at its end, and its log."""
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
    """TMPDIR that only some nodes have: the node's name is in its path."""
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
    """And links that another user has put where the names of temporary files were known are not followed."""
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
    """Before all tries are used up on it: a spare takes its place, or the job is requeued elsewhere."""
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
def test_a_step_whose_srun_was_killed_holds_up_no_other(three_nodes: SlurmCluster, tmp_path: Path) -> None:
    """Killed before it has started the ranks, its step stays: no node knows of it, and Slurm does not end it."""
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


@pytest.mark.parametrize(
    ("codes", "node"),
    [
        pytest.param({0: 139, 1: 74, 2: 74, 3: 74}, "n1", id="others have lost it"),
        pytest.param({2: 70, 3: 70, 0: 74}, "n2", id="both ranks of a node, and one was killed"),
        pytest.param({2: 137, 0: 137, 1: 143}, "n2", id="out of memory; srun kills the others later"),
        pytest.param({0: 70, 1: 70, 2: 70, 3: 70}, "", id="a bug"),
        pytest.param({0: 74, 1: 74, 2: 75, 3: 0}, "", id="a fault outside"),
        pytest.param({}, "", id="a node was lost"),
    ],
)
def test_the_node_whose_ranks_crash_by_themselves(tmp_path: Path, codes: dict[int, int], node: str) -> None:
    """Of two nodes with two ranks each; the codes are written in this order."""
    found = re.search(r"^crashed_node\(\) \{\n.*?^\}$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    for number, (rank, code) in enumerate(codes.items()):
        (tmp_path / f"rank-{rank}").write_text(f"{code}\n")
        os.utime(tmp_path / f"rank-{rank}", (number, number))
    lines = [
        "set -euo pipefail",
        f"nodes=(n1 n2) num_nodes=2 ranks_per_node=2 exits={tmp_path}",
        found[0],
        "crashed_node",
    ]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == node


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
    """Slurm prefers it to the third, so that without this it would be met again."""
    names = program(tmp_path / "names", f'echo "$SLURMD_NODENAME" >>{tmp_path}/began')
    job, log = evaluate(three_nodes, names, "--nodes=2", **without_scratch(tmp_path, "n2"))
    assert (job["JobState"], job["Restarts"], job["ExcNodeList"]) == ("COMPLETED", "1", "n2"), log
    assert "node n2 is left out: no-scratch" in log
    assert "it will avoid n2" in log
    assert sorted((tmp_path / "began").read_text().split()) == ["n1", "n3"]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"AWS_ENDPOINT_URL": "http://store:7480/x"}, "store:7480"),
        ({"AWS_ENDPOINT_URL": "https://store"}, "store:443"),
        ({"AWS_ENDPOINT_URL": "http://[::1]:7480"}, "::1:7480"),
        ({"AWS_ENDPOINT_URL": "https://[fe80::1]"}, "fe80::1:443"),
        ({"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b"}, "b:80"),
        ({"AWS_REGION": "eu-north-1"}, "s3.eu-north-1.amazonaws.com:443"),
        ({"AWS_ENDPOINT_URL": "http://store", "HTTP_PROXY": "http://proxy"}, ""),
        ({"AWS_ENDPOINT_URL": "http://store", "https_proxy": "http://proxy"}, ""),
    ],
)
def test_the_address_of_the_store(environ: dict[str, str], expected: str) -> None:
    found = re.search(r"^s3_host\(\) \{\n.*?^\}$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    words = ["bash", "-c", f"{found[0]}\ns3_host --data.url s3://bucket/x"]
    plain = {"PATH": os.environ["PATH"], "AWS_CONFIG_FILE": "/nowhere"} | environ
    done = subprocess.run(words, env=plain, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    ("clocks", "server", "odd", "said"),
    [
        pytest.param((1000, 1001, 1040), 1000, [], False, id="alike"),
        pytest.param((5000, 1001, 1000), 1000, ["n1"], False, id="that of the first node, where the script runs"),
        pytest.param((0, 1001, 1000), 1000, ["n1"], False, id="behind"),
        pytest.param((1000, 1001, 1000), 9000, [], False, id="that of the file server"),
        pytest.param((5000, 1000), 1000, ["n1"], False, id="the file server decides between two"),
        pytest.param((5000,), 1000, [], True, id="one against the file server"),
        pytest.param((5000, 5000, 1000), 1000, [], True, id="two against two"),
        pytest.param((5000, 1000, 1000, 9000), 1001, ["n1", "n4"], False, id="two different ones"),
    ],
)
def test_the_odd_clock_is_left_out(clocks: tuple[int, ...], server: int, odd: list[str], said: bool) -> None:
    """A wrong clock on the first node condemned all others."""
    found = re.search(r"^odd_clocks\(\) \{\n.*?^\}$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    answers = "\n".join(f"checked n{number} {clock} " for number, clock in enumerate(clocks, 1))
    lines = "\n".join(['say() { echo "$@" >&2; }', "set -euo pipefail", found[0], f"odd_clocks {server} 60"])
    done = subprocess.run(["bash", "-c", lines], input=answers, capture_output=True, text=True, check=True)
    assert (done.stdout.split(), "set them" in done.stderr) == (odd, said)


ALIKE = "n1 mixed h100,ib 64/1000/gpu:8\nn2 mixed h100,ib 64/1000/gpu:8\nn3 idle h100,ib 64/1000/gpu:8"


@pytest.mark.parametrize(
    ("job", "nodes", "avoided"),
    [
        ("gpu|(null)||(null)|", ALIKE, "n2"),
        ("gpu|h100||(null)|", ALIKE, "n2"),
        ("gpu|(null)||(null)|", f"{ALIKE}\n{ALIKE}", "n2"),
        ("gpu|(null)||(null)|n9", ALIKE, "n2,n9"),
        ("gpu|a100||(null)|", ALIKE, ""),
        ("gpu|h100&ib||(null)|", ALIKE, ""),
        ("gpu|(null)|n2|(null)|", ALIKE, ""),
        ("gpu|(null)||vit|", ALIKE, ""),
        ("gpu|(null)||(null)|n3", ALIKE, ""),
        ("gpu|(null)||(null)|", ALIKE.replace("idle", "drained"), ""),
        ("gpu|(null)||(null)|", ALIKE.replace("n3 idle h100,ib 64", "n3 idle h100,ib 32"), ""),
        ("gpu|(null)||(null)|", "", ""),
    ],
    ids=lambda value: value.splitlines()[0] if value else "none",
)
def test_nodes_are_avoided_only_if_others_can_take_their_place(job: str, nodes: str, avoided: str) -> None:
    """A job of two nodes, of which the second was sick. With too few others like its own it would wait for ever."""
    found = re.search(r"^nodes_to_avoid\(\) \{\n.*?^\}$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    lines = [
        found[0],
        f"of_job() {{ echo '{job}'; }}",
        f"sinfo() {{ printf '%s\\n' '{nodes}'; }}",
        "scontrol() { tr ',' '\\n' <<<\"$3\"; }",
        "SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST=n1,n2 left_out=n2",
        "set -euo pipefail",
        "nodes_to_avoid",
    ]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120, check=True)
    assert set(filter(None, done.stdout.strip().split(","))) == set(filter(None, avoided.split(",")))


@pytest.mark.long
def test_a_folder_that_only_one_node_sees_ends_the_job(three_nodes: SlurmCluster, tmp_path: Path) -> None:
    """The other nodes are elsewhere, where the relative path leads nowhere."""
    elsewhere = program(tmp_path / "env", f"[[ ${{SLURMD_NODENAME-n1}} == n1 ]] || cd {tmp_path}")
    never = program(tmp_path / "never", f"touch {tmp_path}/ran")
    job, log = evaluate(three_nodes, never, "--nodes=3", "--nodelist=n[1-3]", BASH_ENV=str(elsewhere))
    assert (job["ExitCode"], job["Restarts"]) == ("78:0", "0"), log
    assert "the nodes do not share" in log
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_node_that_vanished(three_nodes: SlurmCluster, tmp_path: Path) -> None:
    """Last: the cluster has one node less afterwards."""
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

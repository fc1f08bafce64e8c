"""What nodes print, and the finding about it; tests/slurm has it on a real Slurm."""

import json
import subprocess

import pytest

from jobs.cluster.preflight_nodes import _DEEP, judge_deep, judge_shared
from tests.rigs.processes import patchline

BOTH = "preflight n1 shared\npreflight n1 answers\npreflight n2 shared\npreflight n2 answers\n"


def line(node: str, rank: int, seconds: float, **more: object) -> str:
    return json.dumps({"node": node, "rank": rank, "product_seconds": seconds} | more) + "\n"


def done(node: str, rank: int, seconds: float = 0.1, fault: str = "") -> str:
    return line(node, rank, seconds) + line(node, rank, seconds, has_exchanged=True, fault=fault)


@pytest.mark.parametrize(
    ("text", "statuses", "words"),
    [
        (BOTH, ["ok", "ok"], "written and read on n1 and n2"),
        (BOTH.replace("n2 shared", "n2 unseen 0 login"), ["fault", "ok"], "n2 does not see what n1 wrote"),
        (BOTH.replace("n2 shared", "n2 missing"), ["fault", "ok"], "n2 has no such folder"),
        (BOTH.replace("n1 shared", "n1 unwritable"), ["fault", "ok"], "n1 cannot write there"),
        (BOTH.replace("n2 answers", "n2 silent 127"), ["ok", "fault"], "written and read"),
        ("preflight n1 shared\npreflight n1 answers\n", ["fault", "ok"], "only n1 answered"),
    ],
)
def test_a_run_directory(text: str, statuses: list[str], words: str) -> None:
    found = judge_shared(text, where="/shared", command="patchline")
    assert [one.status for one in found] == statuses
    assert words in found[0].found


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n[07-09,12],m3", "n07"), ("a,b[1-2]", "a"), ("r1c[2,4]-ib", "r1c2")]
)
def test_ranks_in_a_container_meet_at_the_first_node(nodes: str, first: str) -> None:
    """A container has no scontrol."""
    environ = {"PATH": "/usr/bin:/bin", "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "3", "SLURMD_NODENAME": first}
    words = ["bash", "-c", f"scontrol() {{ return 127; }}; {_DEEP}", "deep", "printenv", "MASTER_ADDR", "MASTER_PORT"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == [first, "20303"]


def test_nodes_that_are_well() -> None:
    found = judge_deep(done("n1", 0) + "a warning of a library\n" + done("n2", 1), nodes=2)
    assert [(one.name, one.status) for one in found] == [("imports", "ok"), ("product", "ok"), ("exchange", "ok")]


@pytest.mark.parametrize(("first", "cached", "status"), [(31.0, 2.5, "warning"), (31.0, 12.0, "ok"), (9.0, 2.5, "ok")])
def test_a_slow_environment_is_said(first: float, cached: float, status: str) -> None:
    ranks = ((0, 0.2, 0.0), (1, first, cached))
    text = "".join(
        line("n1", rank, 0.1, import_seconds=seconds, cached_seconds=again, imported_from="nfs4")
        for rank, seconds, again in ranks
    )
    imports = judge_deep(text, nodes=1)[0]
    assert (imports.name, imports.status) == ("imports", status)
    assert f"in {first:.1f} s on the slowest node, {cached:.1f} s once cached; from nfs4" in imports.found


def test_a_slow_node_is_named_by_its_slowest_rank() -> None:
    text = done("n1", 0) + done("n1", 1) + done("n2", 2) + done("n2", 3, 0.12) + done("n3", 4)
    _, speed, _ = judge_deep(text, nodes=3)
    assert (speed.status, "n2 20 % slower" in speed.found, "--exclude=n2" in speed.todo) == ("warning", True, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (done("n1", 0, fault="timed out") + done("n2", 1, fault="timed out"), "fails on n1, n2: timed out"),
        (done("n1", 0) + line("n2", 1, 0.1), "fails on n2: did not end"),
        (done("n1", 0), "fails on some nodes: not all answered"),
    ],
)
def test_an_exchange_that_fails_is_named_by_node(text: str, words: str) -> None:
    *_, exchange = judge_deep(text, nodes=2)
    assert (exchange.status, words in exchange.found) == ("fault", True), exchange


def test_nothing_printed() -> None:
    assert [one.status for one in judge_deep("{not json}\n", nodes=2)] == ["fault"]


@pytest.mark.long
def test_a_rank_prints_before_and_after_the_exchange() -> None:
    ended = patchline("__probe", "n1")
    assert ended.code == 0, ended.errors
    before, after = map(json.loads, ended.output.splitlines())
    assert (before["has_exchanged"], after["has_exchanged"], after["fault"]) == (False, True, "")
    assert (after["node"], after["product_seconds"] > 0) == ("n1", True)
    assert after["import_seconds"] > 0.1
    assert after["cached_seconds"] > 0.1
    assert after["imported_from"]


def test_it_needs_the_nodes_name() -> None:
    assert patchline("__probe").code == 2

"""Which ranks are missing, and on which hosts, from tables."""

from collections.abc import Mapping

import pytest

from pipeline.ranks.arrival import UNKNOWN, hosts_of, missing_message, nodes_in
from pipeline.ranks.environment import place_from

MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **MASTER}
SRUN = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1,2,1",
    "SLURM_STEP_NODELIST": "n[1-2],big",
    **MASTER,
}
PAIRS = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[09-10]"}


@pytest.mark.parametrize(
    ("environ", "arrived", "expected"),
    [
        pytest.param(SRUN, {0: "n1"}, ["n1", "n2", "n2", "big"], id="Slurm says where its tasks are"),
        pytest.param(PAIRS, {}, ["n09", "n09", "n10", "n10"], id="equally many on each node"),
        pytest.param(PAIRS | {"SLURM_DISTRIBUTION": "block:block"}, {}, ["n09", "n09", "n10", "n10"], id="blocks"),
        pytest.param(PAIRS | {"SLURM_DISTRIBUTION": "cyclic"}, {0: "a"}, ["a", *[UNKNOWN] * 3], id="dealt out"),
        pytest.param(
            SRUN | {"SLURM_STEP_NODELIST": "n[1-2"}, {0: "a"}, ["a", *[UNKNOWN] * 3], id="a list of another form"
        ),
        pytest.param(TORCHRUN, {0: "a", 3: "b"}, ["a", "a", "b", "b"], id="torchrun: where its neighbour is"),
        pytest.param(TORCHRUN, {0: "a"}, ["a", "a", UNKNOWN, UNKNOWN], id="a whole host is missing"),
        pytest.param(
            {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"},
            {0: "a"},
            ["a", *[UNKNOWN] * 3],
            id="on how many hosts is unknown",
        ),
    ],
)
def test_hosts(environ: Mapping[str, str], arrived: Mapping[int, str], expected: list[str]) -> None:
    assert hosts_of(environ, place_from(environ), arrived) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", ["n1"]),
        ("n[1-3,07],login", ["n1", "n2", "n3", "n07", "login"]),
        ("gpu[099-101]-ib,a", ["gpu099-ib", "gpu100-ib", "gpu101-ib", "a"]),
        ("", []),
        ("r[1-2]c[1-2]", []),
        ("n[1-x]", []),
    ],
)
def test_nodes(text: str, expected: list[str]) -> None:
    assert nodes_in(text) == expected


def test_the_message_names_ranks_by_host() -> None:
    hosts = ["n1", "n1", "n2", "n2", *[UNKNOWN] * 2]
    todo = "; see the logs of these ranks, or leave their hosts out"
    assert missing_message([1], hosts, seconds=300) == (
        f"rank 1 of 6 has not arrived within 300 s: rank 1 on host n1{todo}"
    )
    assert missing_message([2, 3, 4, 5], hosts, seconds=300) == (
        "ranks 2-5 of 6 have not arrived within 300 s: ranks 2, 3 on host n2; ranks 4, 5 on a host that is not known"
        + todo
    )
    many = missing_message(range(512), [f"n{rank // 8}" for rank in range(512)], seconds=300)
    assert "ranks 56-63 on host n7; 56 more hosts; see" in many

"""Ranks meet at a store that listens only where MASTER_ADDR says, and learn which ranks are missing.

A rank that is alone opens no socket: each collective of its group leaves what gloo leaves.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipeline.ranks.environment import place_from
from pipeline.ranks.host import free_port
from pipeline.ranks.rendezvous import (
    UNKNOWN,
    hosts_of,
    interface_towards,
    join_alone,
    listen_at,
    missing_message,
    nodes_in,
    reach_store,
    serve_store,
)
from shards.errors import TransientError
from tests.rigs.listening import addresses_of

TIMEOUT = timedelta(seconds=60)
ELSEWHERE = "203.0.113.7"  # RFC 5737: no host has it
EVERYWHERE = ("::", "0.0.0.0")  # noqa: S104
OWN_NAME = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]  # as Debian resolves a host's own name
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


def test_the_store_listens_at_the_address_alone() -> None:
    before, port = addresses_of(os.getpid()), free_port()
    with ThreadPoolExecutor() as pool:
        served = pool.submit(serve_store, "127.0.0.1", port, num_ranks=2, timeout=TIMEOUT)
        reached = pool.submit(reach_store, "127.0.0.1", port, num_ranks=2, timeout=TIMEOUT)
        served.result().set("key", "value")
        assert reached.result().get("key") == b"value"
        assert addresses_of(os.getpid()) - before == {"127.0.0.1"} - before


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_a_loopback_address_is_the_only_one(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with listen_at(address, 0) as listener:
        assert listener.getsockname()[0] in (address, "::1", "127.0.0.1")
    assert not caplog.messages


@pytest.mark.parametrize("address", [ELSEWHERE, "no-such-host.invalid", "n1"])
def test_an_address_that_is_not_this_hosts_is_said(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A launch behind an address translator still works, but the log says what to change."""
    if address == "n1":
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: OWN_NAME)
    with listen_at(address, 0) as listener:
        assert listener.getsockname()[0] in EVERYWHERE
    (message,) = caplog.messages
    assert message.startswith(f"MASTER_ADDR {address!r} resolves to no address of this host that others can reach")
    assert message.endswith("set MASTER_ADDR to an address of rank 0's host")


def test_a_port_that_is_taken_is_named() -> None:
    with listen_at("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            TransientError, match=rf"^rank 0 cannot listen at 127.0.0.1:{port} \(Address already in use"
        ):
            listen_at("127.0.0.1", port)


def test_the_interface_is_the_one_towards_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_towards("127.0.0.1") == interface_towards("localhost") == "lo"
    assert interface_towards("no-such-host.invalid") == ""
    assert interface_towards(ELSEWHERE) in ("", *(name for _, name in socket.if_nameindex() if name != "lo"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: OWN_NAME)
    assert interface_towards("n1") == ""


def test_free_ports_are_ports() -> None:
    assert 1024 <= free_port() <= 65535


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


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    before = addresses_of(os.getpid())
    join_alone()
    yield
    assert addresses_of(os.getpid()) == before
    dist.destroy_process_group()


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN])
def test_a_reduction_over_one_rank_is_its_own_value(op: dist.ReduceOp.RedOpType) -> None:
    tensor = torch.tensor([-0.0, 1.5, float("nan")])
    dist.all_reduce(tensor, op=op)
    work = dist.all_reduce(tensor, op=op, async_op=True)
    assert work is not None
    assert work.wait()
    assert torch.equal(tensor.view(torch.int32), torch.tensor([-0.0, 1.5, float("nan")]).view(torch.int32))


@pytest.mark.parametrize("group", ["default", "new"])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # DeepSpeed calls what torch 2.13 has renamed
def test_what_is_gathered_and_scattered_is_copied(group: str) -> None:
    members = dist.new_group([0]) if group == "new" else None
    tensor = torch.arange(6.0, requires_grad=True)
    outputs = [torch.zeros(6) for _ in range(4)]
    dist.all_gather([outputs[0]], tensor, group=members)
    dist.all_gather_into_tensor(outputs[1], tensor, group=members)
    dist.reduce_scatter(outputs[2], [tensor], group=members)
    dist.reduce_scatter_tensor(outputs[3], tensor, group=members)
    dist.broadcast(tensor, src=0, group=members)
    dist.barrier(group=members)
    assert all(torch.equal(output, tensor) and not output.requires_grad for output in outputs)
    assert (dist.get_rank(members), dist.get_world_size(members)) == (0, 1)


def test_it_can_be_left_and_joined_again() -> None:
    dist.destroy_process_group()
    assert not dist.is_initialized()
    join_alone()
    assert dist.is_initialized()

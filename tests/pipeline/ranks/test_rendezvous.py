"""The store listens where MASTER_ADDR says, on a port that is free; gloo's interface is the one that leads there."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from pipeline.ranks.free_port import free_port
from pipeline.ranks.rendezvous import interface_towards, listen_at, reach_store, serve_store
from shards.errors import TransientError
from tests.rigs.listening import addresses_of

TIMEOUT = timedelta(seconds=60)
ELSEWHERE = "203.0.113.7"  # RFC 5737: no host has it
EVERYWHERE = ("::", "0.0.0.0")  # noqa: S104
OWN_NAME = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]  # as Debian resolves a host's own name


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


def test_a_store_that_nobody_serves_is_rank_0_missing() -> None:
    port, soon = free_port(), timedelta(seconds=1)
    with pytest.raises(TransientError, match=rf"^rank 0 of 3 has not arrived within 1 s: .* at 127.0.0.1:{port}, "):
        reach_store("127.0.0.1", port, num_ranks=3, timeout=soon)


def test_free_ports_are_ports() -> None:
    assert 1024 <= free_port() <= 65535

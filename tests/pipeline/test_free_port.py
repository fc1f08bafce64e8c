"""Free ports for a rendezvous."""

from pipeline.free_port import free_port


def test_free_ports_are_ports() -> None:
    assert 1024 <= free_port() <= 65535

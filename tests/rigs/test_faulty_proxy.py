"""The proxy forwards everything that it is not told to spoil."""

import os

import pytest

from shards.store import open_store
from tests.rigs.faulty_connection import Fault, FaultyProxy
from tests.rigs.faulty_proxy import faulty_proxy, faulty_proxy_process


def test_everything_but_gets_of_objects_passes(any_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with faulty_proxy(os.environ["AWS_ENDPOINT_URL"], rates={"500": 1.0}) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(f"s3://{any_bucket}/a")
        store.write("b/x", os.urandom(1000))
        with store.create("big") as file:
            file.write(bytes(70 << 20))  # in parts
        assert list(store.list_sizes()) == [("b/x", 1000), ("big", 70 << 20)]
        assert store.size("big") == 70 << 20
        store.delete("big")
        assert not store.exists("big")
        assert proxy.seen == []


def test_the_same_seed_gives_the_same_faults() -> None:
    drawn = [
        [proxy.next_fault() for _ in range(1000)]
        for proxy in (FaultyProxy(upstream="", rates={"500": 0.1, "reset": 0.05}, seed=seed) for seed in (1, 1, 2))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert 70 < drawn[0].count(Fault(kind="500")) < 130
    assert 30 < drawn[0].count(Fault(kind="reset")) < 70


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="known are 500"):
        Fault(kind="fire")


def test_a_proxy_of_its_own_process_says_what_it_did(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(f"s3://{s3_bucket}").write("x", b"0123456789")
    with faulty_proxy_process(os.environ["AWS_ENDPOINT_URL"], rates={}) as process:
        monkeypatch.setenv("AWS_ENDPOINT_URL", process.endpoint)
        open_store.cache_clear()
        assert open_store(f"s3://{s3_bucket}").read_range("x", 3, 5) == b"34"
    assert process.counts == {"": 1}
    assert process.cpu_seconds > 0

"""What is said about GPUs, drivers and S3, the two steps of the probe of a node, and probes that hang or crash."""

import math
import socket
from pathlib import Path

import pytest
import torch

from pipeline.machine.probes import (
    Probe,
    decoder_checks,
    driver_words,
    exchange,
    judge_gpu,
    product_seconds,
    run_probes,
    s3_check,
    torch_checks,
)
from pipeline.ranks.world import World
from shards.store import open_store


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Fri Jan 17\nGCC version: gcc 12.3.0",
            "NVIDIA driver 570.86.15",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54  Release", "NVIDIA driver 550.54"),
        ("something else", "an NVIDIA driver of unknown version"),
        ("", "no driver found"),
    ],
)
def test_drivers(text: str, words: str) -> None:
    assert driver_words(text) == words


@pytest.mark.parametrize(
    ("error", "free_share", "status"),
    [
        pytest.param(0.003, 0.99, "ok", id="rounding of bf16"),
        pytest.param(0.003, 0.5, "warning", id="in use"),
        pytest.param(0.5, 0.99, "fault", id="wrong numbers"),
        pytest.param(math.nan, 0.99, "fault", id="no numbers"),
    ],
)
def test_gpus(error: float, free_share: float, status: str) -> None:
    assert judge_gpu("GPU 0", "H100", error=error, free_share=free_share).status == status


def test_a_gpu_that_is_announced_but_missing_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    gpu, driver = torch_checks()
    assert (gpu.status, "CUDA_VISIBLE_DEVICES is '0'" in gpu.found, "make setup TORCH=" in gpu.todo) == (
        "fault",
        True,
        True,
    )
    assert driver.status == "warning"


def test_the_decoder_is_named() -> None:
    (check,) = decoder_checks()
    assert ("crop decoder with" in check.found) == (check.status == "ok")
    assert check.status != "fault"


def test_s3(s3_bucket: str) -> None:
    store = open_store(f"s3://{s3_bucket}/some")
    assert s3_check(store.url).status == "warning"
    store.write("a/b", b"x")
    assert s3_check(store.url).status == "ok"
    missing = s3_check("s3://no-such-bucket/x")
    assert (missing.status, missing.todo) == ("fault", "create the bucket or correct the URL")
    wrong = s3_check("s3://key:secret@bucket/x")
    assert (wrong.status, "secret" in wrong.found + wrong.todo) == ("fault", False)


def test_a_product_takes_time() -> None:
    assert product_seconds(torch.device("cpu")) > 0


def test_a_single_rank_exchanges_with_itself() -> None:
    world = World(
        rank=0,
        num_ranks=1,
        local_rank=0,
        num_local_ranks=1,
        master_address="127.0.0.1",
        master_port=0,
        device=torch.device("cpu"),
        num_threads=1,
    )
    assert exchange(world) == ""


@pytest.mark.long
def test_a_probe_that_hangs_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        probes = [
            Probe(name="S3", words=("s3", "s3://bucket/x"), todo="start it"),
            Probe(name="disk", words=("disk", str(tmp_path)), todo="mount it"),
        ]
        s3, disk = run_probes(probes, seconds=30)
    assert (s3.name, s3.status, s3.found, s3.todo) == ("S3", "fault", "no answer within 30 s", "start it")
    assert disk.name == "disk"
    assert disk.status != "fault"


def test_a_probe_that_crashes_says_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = run_probes([Probe(name="torch", words=("torch",), todo="import it by hand")], seconds=60)
    assert (check.name, check.status, check.todo) == ("torch", "fault", "import it by hand")
    assert check.found.startswith("the check ended with exit code 1: ImportError: libcudart.so.13")


def test_a_probe_that_a_signal_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os\nos.write(1, b'hello\\n{}\\n')\nos.kill(os.getpid(), 11)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = run_probes([Probe(name="torch", words=("torch",), todo="-")], seconds=60)
    assert check.found == "the check ended with signal 11"

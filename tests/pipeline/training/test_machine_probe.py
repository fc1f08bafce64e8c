"""What is said about GPUs, drivers and S3, and the two steps of the probe of a node."""

import math

import pytest
import torch

from pipeline.training.machine_probe import decoder_checks, driver_words, judge_gpu, s3_check, torch_checks
from pipeline.training.node_speed import exchange, product_seconds
from pipeline.world import World
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

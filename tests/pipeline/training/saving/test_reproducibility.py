"""A run that continues where bits differ says so, and names everything that has changed."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.ranks.world import World
from pipeline.training.saving import save
from pipeline.training.saving.save import BITS, bits_of, differences_in_bits, say_bits, words_of_choice
from pipeline.training.settings.job import EngineConfig
from tests.rigs.processes import one_world

GPU_WORLD = replace(one_world(8, 16), device=torch.device("cuda", 0), local_rank=0, num_local_ranks=8)
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A rank on the second node of two with eight GPUs."""
    (tmp_path / "version").write_text(f"{DRIVER}\nGCC version:  gcc version 12.2.0\n")
    monkeypatch.setattr(save, "_NVIDIA", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    return GPU_WORLD


def test_a_checkpoint_records_model_layout_driver_and_choice(gpu: World) -> None:
    assert bits_of(gpu, deterministic=True) == {
        "device_type": "cuda",
        "device": "NVIDIA H100 80GB HBM3",
        "driver": DRIVER,
        "torch": torch.__version__,
        "num_ranks": 16,
        "ranks_per_node": 8,
        "num_threads": 1,
        "deterministic": True,
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, "", id="the same"),
        pytest.param({"device": "NVIDIA A100"}, "device NVIDIA A100, now NVIDIA H100 80GB HBM3", id="GPU"),
        pytest.param({"driver": "535"}, f"driver 535, now {DRIVER}", id="driver"),
        pytest.param({"ranks_per_node": 4}, "ranks per node 4, now 8", id="layout"),
        pytest.param({"deterministic": False}, "engine.deterministic False, now True", id="choice"),
        pytest.param({"torch": "2.12.0"}, f"PyTorch 2.12.0, now {torch.__version__}", id="version"),
        pytest.param(
            {"num_ranks": 8, "num_threads": 2},
            "ranks 8, now 16; threads per rank 2, now 1",
            id="two",
        ),
    ],
)
def test_what_changed_is_said(gpu: World, changes: dict[str, Any], expected: str) -> None:
    now = bits_of(gpu, deterministic=True)
    line = differences_in_bits({BITS: now | changes}, {BITS: now})
    assert line == (f"this run will equal an unbroken one to rounding at best: {expected}" if expected else "")


ENGINE = {"zero_stage": 1, "precision": "bf16", "reduce_precision": "fp32", "micro_batch": 8, "is_compiled": False}
NOW: dict[str, Any] = {"engine": ENGINE | {"reduce_bucket": 7_500_000}, "versions": {"deepspeed": "0.19.8"}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"zero_stage": 3}, "engine.zero_stage 3, now 1"),
        ({"reduce_precision": "bf16"}, "engine.reduce_precision bf16, now fp32"),
        ({"micro_batch": 4, "is_compiled": True}, "images per pass 4, now 8; compiled blocks True, now False"),
        ({"activation_checkpointing": True}, ""),
    ],
)
def test_so_is_what_changed_in_the_engine(changes: dict[str, Any], expected: str) -> None:
    line = differences_in_bits(NOW | {"engine": NOW["engine"] | changes}, NOW)
    assert line == (f"this run will equal an unbroken one to rounding at best: {expected}" if expected else "")


@pytest.mark.parametrize("record", [{}, {BITS: None}, {BITS: []}, {BITS: {}}])
def test_nothing_is_said_of_what_is_not_recorded(record: dict[str, Any]) -> None:
    assert differences_in_bits(record, {BITS: bits_of(one_world(), deterministic=False)}) == ""


def test_on_a_cpu_the_choice_and_the_nodes_change_nothing() -> None:
    before, now = (bits_of(one_world(), deterministic=choice) for choice in (False, True))
    assert differences_in_bits({BITS: before | {"ranks_per_node": 2}}, {BITS: now}) == ""
    assert words_of_choice(one_world(), deterministic=True) == ""
    assert now["device"], "the CPU's model"


def test_rank_0_says_it_once(gpu: World, caplog: pytest.LogCaptureFixture) -> None:
    record = {BITS: bits_of(gpu, deterministic=False)}
    with caplog.at_level(logging.INFO):
        on, off = (EngineConfig(deterministic=choice) for choice in (True, False))
        assert say_bits(gpu, on, {}, resumed=record) == bits_of(gpu, deterministic=True)
        assert not caplog.messages
        say_bits(replace(gpu, rank=0), on, {}, resumed=record)
        say_bits(replace(gpu, rank=0), off, {}, resumed={})
    assert caplog.messages == [
        "deterministic kernels: a resumed run has the bits of an unbroken one on this GPU model and node layout",
        "this run will equal an unbroken one to rounding at best: engine.deterministic False, now True",
        "a resumed run will equal an unbroken one to rounding; --engine.deterministic gives equal bits, more slowly",
    ]

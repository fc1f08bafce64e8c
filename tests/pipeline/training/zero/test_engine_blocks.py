"""Compiled blocks and recomputed ones are the same run: its losses, its gradients, its continuation."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jobs.ranks import start_ranks
from jobs.recipes.pretrain import digits_smoke
from pipeline.models.build import blocks_of
from pipeline.ranks.world import World, current_world
from pipeline.shared_settings import Recomputed
from pipeline.training.decisions import will_compile
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.saving.save import describe
from pipeline.training.settings.job import EngineConfig
from pipeline.training.start import starting_model
from pipeline.training.zero.batch_plan import plan_batch
from shards.errors import UserError
from tests.rigs.kills import run_and_kill, saving
from tests.rigs.processes import one_world
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words, resumed_steps, run

CPU, GPU = torch.device("cpu"), torch.device("cuda")
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
FP32 = ("--engine.precision", "fp32")
DROPOUT = ("--model.dropout", "0.1")
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler (Debian: g++)"
)


def world_on(device: torch.device, *, num_threads: int = 1) -> World:
    """A rank without others on a device that nothing here uses."""
    return replace(current_world("cpu"), device=device, num_threads=num_threads)


def forget_compile_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends; what is set meanwhile is unset again."""
    monkeypatch.setenv(COMPILE_THREADS, "")
    monkeypatch.delenv(COMPILE_THREADS)


def losses_and_norms(run_dir: Path) -> tuple[list[float], list[float]]:
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [float(line["loss"]) for line in lines], [float(line["grad_norm"]) for line in lines]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", *(pytest.param(stage, marks=pytest.mark.long) for stage in "23")])
def test_compiling_changes_results_to_rounding(finished_runs: FinishedRuns, stage: str) -> None:
    options = ("--engine.zero-stage", stage, *FP32)
    expected = losses_and_norms(finished_runs.get(2, *options))
    found = losses_and_norms(finished_runs.get(2, *options, "--engine.compile", "on"))
    assert found[0] == pytest.approx(expected[0], abs=2e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-4)


@pytest.mark.long
@needs_compiler
def test_recomputing_selectively_changes_no_bit_of_compiled_blocks(finished_runs: FinishedRuns) -> None:
    """In fp32; the gate compares the graphs that the compiler is given (tests/pipeline/models/test_residuals.py)."""
    options = ("--engine.zero-stage", "1", *FP32, "--engine.compile", "on")
    expected = losses_and_norms(finished_runs.get(2, *options))
    selective = ("--engine.activation-checkpointing", "selective")
    assert losses_and_norms(finished_runs.get(2, *options, *selective)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "recomputed"),
    [
        pytest.param("1", "selective", marks=pytest.mark.long),
        ("2", "full"),
        pytest.param("3", "selective", marks=pytest.mark.long),
    ],
)
def test_recomputing_changes_no_bit_under_dropout(finished_runs: FinishedRuns, stage: str, recomputed: str) -> None:
    options = ("--engine.zero-stage", stage, *FP32, *DROPOUT)
    expected = losses_and_norms(finished_runs.get(2, *options))
    assert losses_and_norms(finished_runs.get(2, *options, "--engine.activation-checkpointing", recomputed)) == expected
    assert expected != losses_and_norms(finished_runs.get(2, "--engine.zero-stage", stage, *FP32)), "no dropout at all"


@pytest.mark.long
@needs_compiler
def test_a_killed_run_of_compiled_blocks_continues_bit_by_bit(
    digits_url: str, finished_runs: FinishedRuns, run_dir: Path, tmp_path: Path
) -> None:
    """In bf16, with recomputation and with masks that inductor draws: compiling again in mid-run draws none of them."""
    compiled = ("--engine.compile", "on", "--engine.activation-checkpointing", "selective")
    options = ("--engine.zero-stage", "2", "--engine.precision", "bf16", *DROPOUT, *compiled)
    unbroken = finished_runs.get(2, *options)
    words = pretrain_words(digits_url, run_dir, *options)
    assert run_and_kill(words, run_dir, moment=saving(STEPS // 2), num_ranks=2, log_dir=tmp_path)

    assert run(words, num_ranks=2, log_dir=tmp_path) == 0

    assert len(resumed_steps(run_dir)) == 2
    assert losses(run_dir) == losses(unbroken)
    expected, found = (load_file(d / "weights" / "model.safetensors") for d in (unbroken, run_dir))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.long
@needs_compiler
def test_a_run_may_compile_after_its_continuation_only(
    digits_url: str, finished_runs: FinishedRuns, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And evaluates in batches of another size than it trains in, and says nothing that the user need not see."""
    words = pretrain_words(digits_url, run_dir, "--engine.zero-stage", "1", *FP32, "--evaluation.url", digits_url)
    words += ["--evaluation.every-steps", "4", "--evaluation.batch-size", "250"]
    assert run([*words, "--steps", "8", "--schedule.decay", "constant"], num_ranks=1, log_dir=tmp_path) == 0
    capfd.readouterr()
    words += ["--engine.compile", "on", "--engine.activation-checkpointing", "full", "--schedule.decay", "constant"]
    assert run([*words, "--extend"], num_ranks=1, log_dir=tmp_path) == 0
    said = capfd.readouterr().err
    assert said.count("compiling the model's blocks: the first step takes longer") == 1
    for noise in ("Warning", "torch._dynamo", "Traceback"):
        assert noise not in said
    assert resumed_steps(run_dir) == [0, 8]


@pytest.mark.long
def test_a_missing_compiler_is_one_message_before_the_run_begins(
    digits_url: str, run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    environ = {**os.environ, "CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "no-kernels")}
    words = pretrain_words(digits_url, run_dir, "--engine.compile", "on")
    # Not forked: torch reads CXX when it is loaded.
    assert start_ranks(words, num_ranks=1, environ=environ, log_dir=tmp_path).wait() == 2
    said = capfd.readouterr().err
    assert "No working C++ compiler found" in said
    assert "apt-get install g++" in said
    assert "--engine.compile off" in said
    assert "Traceback" not in said
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("asked", "stage", "device", "expected"),
    [
        ("auto", 1, GPU, True),
        ("auto", 2, GPU, True),
        ("auto", 3, GPU, False),  # no GPU has tried it
        ("on", 3, GPU, True),
        ("tuned", 1, GPU, True),
        ("auto", 1, CPU, False),  # a smoke test is over before its kernels are compiled
        ("off", 1, GPU, False),
        ("on", 2, CPU, True),
    ],
)
def test_auto_compiles_on_gpus(
    monkeypatch: pytest.MonkeyPatch, asked: str, stage: int, device: torch.device, expected: bool
) -> None:
    monkeypatch.setattr("pipeline.training.decisions.compile_fault", lambda _: "")
    config = EngineConfig(compile=asked, zero_stage=stage)  # type: ignore[arg-type]
    forget_compile_threads(monkeypatch)
    assert will_compile(config, world_on(device)) is expected
    assert (COMPILE_THREADS in os.environ) is expected


@pytest.mark.parametrize(
    ("threads", "users", "expected"),
    [
        (12, None, "8"),  # torch would take 32 on each rank: 256 processes on a node of 8 GPUs
        (2, None, "2"),  # a rank's share of its host
        (12, "3", "3"),  # the user's own
    ],
)
def test_a_rank_compiles_in_few_processes(
    monkeypatch: pytest.MonkeyPatch, threads: int, users: str | None, expected: str
) -> None:
    monkeypatch.setattr("pipeline.training.decisions.compile_fault", lambda _: "")
    forget_compile_threads(monkeypatch)
    if users:
        monkeypatch.setenv(COMPILE_THREADS, users)
    will_compile(EngineConfig(compile="on"), world_on(CPU, num_threads=threads))
    assert os.environ[COMPILE_THREADS] == expected


def test_where_compiling_fails_auto_goes_on_and_on_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget_compile_threads(monkeypatch)
    monkeypatch.setattr("pipeline.training.decisions.compile_fault", lambda _: "no C compiler")
    assert will_compile(EngineConfig(), world_on(GPU)) is False
    assert "does not work on this cuda: no C compiler" in caplog.text
    for asked in ("on", "tuned"):
        with pytest.raises(UserError, match=r"no C compiler.*Triton and a C compiler.*--engine\.compile off"):
            will_compile(EngineConfig(compile=asked), world_on(GPU))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("recomputed", ["off", "selective", "full"])
def test_the_model_runs_its_blocks_as_asked(is_compiled: bool, recomputed: Recomputed) -> None:
    engine = EngineConfig(activation_checkpointing=recomputed)
    job = replace(digits_smoke(), engine=engine)
    job = replace(job, model=replace(job.model, num_classes=10))
    model = starting_model(job, is_compiled=is_compiled)
    assert model.checkpoint_blocks is (recomputed == "full")
    has_hooks = recomputed == "selective" and not is_compiled
    assert {block.recompute is not None for block in blocks_of(model)} == {has_hooks}
    assert {block._compiled_call_impl is not None for block in blocks_of(model)} == {is_compiled}
    plan = plan_batch(job.global_batch, micro_batch=0, num_ranks=1, lanes=job.data.lanes)
    record = describe(job, one_world(), plan=plan, is_compiled=is_compiled)["engine"]
    assert (record["is_compiled"], record["activation_checkpointing"]) == (is_compiled, recomputed)


@pytest.mark.parametrize("deterministic", [False, True])
def test_inductor_times_its_kernels_unless_the_run_is_deterministic(deterministic: bool) -> None:
    job = replace(digits_smoke(), engine=EngineConfig(deterministic=deterministic))
    job = replace(job, model=replace(job.model, num_classes=10))
    for block in blocks_of(starting_model(job, is_compiled=True)):
        compiled: Any = block._compiled_call_impl
        assert compiled.get_compiler_config()["deterministic"] is deterministic

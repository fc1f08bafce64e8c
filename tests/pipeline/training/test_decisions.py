"""The precision of a run: the decision as a table, and small runs that start, resume and are given another one."""

import json
import logging
import platform
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

from jobs.recipes.pretrain import digits_smoke
from pipeline.models import ModelConfig, build_model, compile_blocks
from pipeline.ranks.host import Bf16
from pipeline.ranks.world import World
from pipeline.runs.starts import read_start_times
from pipeline.shared_settings import Recomputed
from pipeline.training import kernels
from pipeline.training.decisions import Undecided, choose_precision, decide_engine
from pipeline.training.fitting.fit import Budget, with_recomputed
from pipeline.training.fitting.memory import Topology, memory_of
from pipeline.training.kernels import KernelWatch
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.tokens import TokensConfig
from pipeline.training.zero.batch_plan import plan_batch
from tests.rigs.processes import Ended, one_world, patchline, program, run_ranks
from tests.rigs.training import pretrain_words

FAST = Bf16(is_native=True, reason="this CPU computes bf16 natively (AMX)")
SLOW = Bf16(is_native=False, reason="this CPU (AVX2) computes bf16 8 times slower than fp32")
EVERY_STEP = ("--checkpoint.every-steps", "1")
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@pytest.mark.parametrize(
    ("wanted", "recorded", "device", "precision", "message", "is_warning"),
    [
        ("auto", "", FAST, "bf16", f"precision bf16: {FAST.reason}", False),
        ("auto", "", SLOW, "fp32", f"precision fp32: {SLOW.reason}", False),
        ("auto", "bf16", FAST, "bf16", "precision bf16, as when the run started", False),
        ("auto", "fp32", SLOW, "fp32", "precision fp32, as when the run started", False),
        ("auto", "fp32", FAST, "fp32", f"precision fp32, as when the run started, though {FAST.reason}", False),
        ("auto", "bf16", SLOW, "bf16", f"precision bf16, as when the run started, though {SLOW.reason}", True),
        ("fp32", "", SLOW, "fp32", "", False),
        ("fp32", "bf16", FAST, "fp32", "precision fp32, as the job says (the run began with bf16)", False),
        ("bf16", "", FAST, "bf16", "", False),
        ("bf16", "bf16", FAST, "bf16", "", False),
        ("bf16", "fp32", FAST, "bf16", "precision bf16, as the job says (the run began with fp32)", False),
        (
            *("bf16", "", SLOW, "bf16"),
            f"precision bf16, as the job says, though {SLOW.reason}; --engine.precision auto would take fp32",
            True,
        ),
        ("bf16", "bf16", SLOW, "bf16", f"precision bf16, as the job says, though {SLOW.reason}", True),
    ],
)
def test_choices(wanted: str, recorded: str, device: Bf16, precision: str, message: str, is_warning: bool) -> None:
    choice = choose_precision(wanted, recorded=recorded, bf16=device)  # type: ignore[arg-type]
    assert (choice.precision, choice.message, choice.is_warning) == (precision, message, is_warning)


def words(url: str, run_dir: Path, *more: str) -> list[str]:
    return pretrain_words(url, run_dir, "--steps", "2", "--schedule.warmup-steps", "0", *EVERY_STEP, *more)


def cut_back(run_dir: Path) -> None:
    """Leaves the run as a kill after the first of two steps would have."""
    shutil.rmtree(run_dir / "checkpoints" / "step-00000002")
    shutil.rmtree(run_dir / "weights")
    (run_dir / "DONE").unlink()


def recorded(run_dir: Path) -> set[str]:
    """The precision in the job's record and in every checkpoint."""
    manifests = [json.loads(path.read_text()) for path in run_dir.glob("checkpoints/step-*/*/MANIFEST.json")]
    job = yaml.safe_load((run_dir / "job.yaml").read_text())["job"]
    return {job["engine"]["precision"], *(manifest["record"]["engine"]["precision"] for manifest in manifests)}


def lines_about_it(ended: Ended) -> list[str]:
    assert ended.code == 0, ended.errors
    return [line.partition(" ")[2] for line in ended.errors.splitlines() if "precision" in line]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86")
def test_a_cpu_with_avx2_alone_takes_fp32_and_the_run_keeps_it_elsewhere(digits_url: str, run_dir: Path) -> None:
    begun = patchline(*words(digits_url, run_dir), environ=AVX2)
    assert lines_about_it(begun) == [f"precision fp32: {SLOW.reason}"]
    assert recorded(run_dir) == {"fp32"}
    cut_back(run_dir)
    continued = patchline(*words(digits_url, run_dir), environ=dict.fromkeys(AVX2, ""))
    (line,) = lines_about_it(continued)
    assert line.startswith("precision fp32, as when the run started")
    assert recorded(run_dir) == {"fp32"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86")
def test_bf16_is_obeyed_where_it_is_slow_with_one_warning(digits_url: str, run_dir: Path) -> None:
    begun = patchline(*words(digits_url, run_dir, "--engine.precision", "bf16"), environ=AVX2)
    (line,) = lines_about_it(begun)
    assert line == (f"precision bf16, as the job says, though {SLOW.reason}; --engine.precision auto would take fp32")
    cut_back(run_dir)
    continued = patchline(*words(digits_url, run_dir), environ=AVX2)
    assert lines_about_it(continued) == [f"precision bf16, as when the run started, though {SLOW.reason}"]
    assert recorded(run_dir) == {"bf16"}


MODEL = ModelConfig(
    name="vit_b16", image_size=32, num_classes=5, depth=2, width=24, mlp_width=40, num_heads=3, pooling="attention"
)
JOB = TrainingJob(model=MODEL)
IMAGES = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)


@pytest.mark.parametrize(("chosen", "ran"), [("flash", "flash"), ("", "math"), ("math", "flash")])
def test_a_checkpoint_records_the_kernel_that_ran(
    chosen: str, ran: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever was chosen: a cache may have given the process another one."""
    monkeypatch.setattr(kernels, "kernel_in_use", lambda: chosen)
    engine: dict[str, Any] = {"attention": chosen}
    watch, model = KernelWatch(engine, JOB, one_world()), build_model(MODEL).train()
    backend = SDPBackend.FLASH_ATTENTION if ran == "flash" else SDPBackend.MATH
    with caplog.at_level(logging.INFO), sdpa_kernel(backend), watch.model_pass():
        model(IMAGES).sum().backward()
    assert engine["attention"] == ran
    (said,) = caplog.records
    assert said.levelno == (logging.INFO if chosen in ("", ran) else logging.WARNING)
    assert f"attention is computed by {ran}" in caplog.text
    with sdpa_kernel(SDPBackend.MATH), watch.model_pass():
        model(IMAGES)
    assert engine["attention"] == ran, "it looks once"


def test_it_is_looked_at_in_a_step_in_which_nothing_is_traced_and_no_trace_is_taken() -> None:
    engine: dict[str, Any] = {}
    watch, model = KernelWatch(engine, JOB, one_world()), build_model(MODEL).train()
    torch.compiler.reset()
    compile_blocks(model, backend="aot_eager")
    besides: tuple[AbstractContextManager[Any], ...] = (nullcontext(), profile(), nullcontext())
    for number, beside in enumerate(besides):
        assert engine == {}, number
        with beside, watch.model_pass():
            model(IMAGES).sum().backward()
    assert engine == {"attention": "flash"}


def test_steps_of_new_patch_sizes_do_not_decide() -> None:
    """Each compiles, so that what its trace calls would be taken for what ran."""
    engine: dict[str, Any] = {}
    job, model = replace(JOB, tokens=TokensConfig(patch_sizes=(4, 8, 16, 32))), build_model(MODEL).train()
    watch = KernelWatch(engine, job, one_world())
    torch.compiler.reset()
    compile_blocks(model, backend="aot_eager")
    for patch in (4, 16, 8, 32, 16):
        assert engine == {}, patch
        with watch.model_pass():
            model(IMAGES, patch=patch).sum().backward()
    assert engine == {"attention": "flash"}


def test_a_run_records_it_with_its_checkpoints(digits_url: str, run_dir: Path) -> None:
    """As a run on a GPU does: on a CPU, which has one way, nothing is looked at."""
    text = (
        "import sys\nfrom jobs.cli import main\nfrom pipeline.training import loop\n"
        "loop.watches_kernel = lambda *_: True\nsys.exit(main(sys.argv[1:]))"
    )
    ended = program(text, *words(digits_url, run_dir, "--engine.precision", "fp32"))
    assert ended.code == 0, ended.errors
    assert ended.errors.count("attention is computed by flash") == 1
    assert "USDT" not in ended.errors, "a line of the profiler's"
    manifests = [json.loads(path.read_text()) for path in run_dir.glob("checkpoints/step-*/*/MANIFEST.json")]
    assert [manifest["record"]["engine"]["attention"] for manifest in manifests] == ["flash"] * 2


# The least recomputation that fits, the checkpoint's, and what is decided.
RECOMPUTATIONS: list[tuple[Recomputed, str, Recomputed]] = [
    ("off", "", "off"),
    ("selective", "", "selective"),
    ("full", "", "full"),
    ("off", "selective", "selective"),  # a resumed run recomputes as before
    ("full", "selective", "full"),  # unless that does not fit
]


def recomputation_decided(world: World) -> list[list[Any]]:
    """The first two decisions of a start, in memory for 32 images and not a byte more."""
    job = digits_smoke()
    job = replace(job, model=MODEL, micro_batch=32, engine=replace(job.engine, precision="fp32"))
    plan = plan_batch(job.global_batch, micro_batch=32, num_ranks=1, lanes=job.data.lanes)
    found = []
    for fits, recorded, _ in RECOMPUTATIONS:
        topology = Topology(num_ranks=1, is_on_gpu=False)
        has = memory_of(with_recomputed(job, fits), topology, micro_batch=32).peak
        undecided = Undecided(
            job=replace(job, engine=replace(job.engine, activation_checkpointing="auto")),
            plan=plan,
            budget=Budget(total_bytes=has, reserve_bytes=0, where="a host"),
            world=world,
            is_compiled=False,
            record={"engine": {"activation_checkpointing": recorded}} if recorded else None,
        )
        decided, _, decisions = decide_engine(undecided)
        assert decisions[0].value == decided.engine.activation_checkpointing
        found.append([(one.setting, one.value, one.why) for one in decisions[:2]])
    return found


def test_recomputation_is_decided_by_memory_before_the_micro_batch() -> None:
    (found,) = run_ranks(recomputation_decided, num_ranks=1)
    assert found == [
        [
            ("engine.activation_checkpointing", expected, "by what fits the memory"),
            ("micro_batch", 32, "as the job says"),
        ]
        for _, _, expected in RECOMPUTATIONS
    ]


def test_a_start_records_what_it_decided_and_why(digits_url: str, tmp_path: Path) -> None:
    """In the order of the decisions, on a CPU, where nothing is measured."""
    words = ("--steps", "2", "--schedule.warmup-steps", "0", "--engine.activation-checkpointing", "auto")
    ended = patchline(*pretrain_words(digits_url, tmp_path, *words))
    assert ended.code == 0, ended.errors
    (manifest,) = tmp_path.glob("checkpoints/step-00000002/*/MANIFEST.json")
    assert json.loads(manifest.read_text())["record"]["engine"]["activation_checkpointing"] == "off"
    (line,) = read_start_times(tmp_path)
    assert [(one["setting"], one["value"], one["why"]) for one in line["decided"]] == [
        ("model.num_classes", 10, "as the data has"),
        ("engine.precision", line["decided"][1]["value"], line["decided"][1]["why"]),
        ("engine.activation_checkpointing", "off", "by what fits the memory"),
        ("micro_batch", 32, "the whole share"),
        ("engine.attention", "auto", "PyTorch chooses"),
        ("engine.compile", "off", "on GPUs with ZeRO-1 and 2, if it works"),
        ("engine.overlap", "off", "on GPUs, if gradients are checked and the check passes with it"),
    ]
    assert f"precision {line['decided'][1]['value']}" in line["decided"][1]["why"]


def test_a_run_resumed_with_auto_recomputes_as_its_checkpoint_did(digits_url: str, run_dir: Path) -> None:
    """Although nothing would have to be recomputed."""

    def trained(recomputed: str) -> str:
        ended = patchline(*words(digits_url, run_dir, "--engine.activation-checkpointing", recomputed))
        assert ended.code == 0, ended.errors
        (manifest,) = run_dir.glob("checkpoints/step-00000002/*/MANIFEST.json")
        found: dict[str, Any] = json.loads(manifest.read_text())
        assert found["record"]["engine"]["activation_checkpointing"] == "selective"
        assert found["job"]["job"]["engine"]["activation_checkpointing"] == "selective"
        return ended.errors

    trained("selective")
    cut_back(run_dir)
    assert "the backward pass recomputes: selective (engine.activation_checkpointing auto)" in trained("auto")
    decided = {one["setting"]: one["value"] for one in read_start_times(run_dir)[-1]["decided"]}
    assert decided["engine.activation_checkpointing"] == "selective"

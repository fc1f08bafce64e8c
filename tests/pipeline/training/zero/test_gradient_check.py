"""Sound engines pass the check of their gradients, and every planted error is refused by all ranks, by name."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file

from jobs.recipes.pretrain import digits_smoke
from pipeline.models import fused_mlp, recompute
from pipeline.models.build import compile_blocks, shapes_of
from pipeline.models.config import ModelConfig
from pipeline.ranks.world import World
from pipeline.training import kernels
from pipeline.training.settings.job import EngineConfig, TrainingJob
from pipeline.training.zero import gradient_check
from pipeline.training.zero.batch_plan import BatchPlan, plan_batch
from pipeline.training.zero.gradient_check import check_gradients, checks_gradients, overlaps
from pipeline.training.zero.loading import TESTED
from shards.errors import WillNotSucceedError
from shards.output.quantities import plural
from tests.rigs.processes import program, run_ranks
from tests.rigs.training import FinishedRuns, losses, pretrain_words, run

CPU, GPU = torch.device("cpu"), torch.device("cuda")
Stage = Literal[1, 2, 3]
Precision = Literal["fp32", "bf16"]
VIT = ModelConfig(name="vit", image_size=16, num_classes=5, patch=8, depth=3, width=16, mlp_width=32, num_heads=2)
MODERN = replace(VIT, layer_scale=0.1, registers=2, qk_norm=True, position="rope2d", pooling="attention")
SIGMOID = replace(VIT, head_bias=-10.0, representation=True, pooling="average", dropout=0.5)


def job_of(stage: Stage, precision: Precision, *, model: ModelConfig = VIT, bucket: int = 50_000_000) -> TrainingJob:
    """A job whose optimiser has two groups of parameters, and whose blocks are not compiled."""
    smoke = digits_smoke()
    engine = replace(smoke.engine, zero_stage=stage, precision=precision, reduce_bucket=bucket, compile="off")
    return replace(smoke, model=model, engine=engine, loss="softmax" if model in (VIT, MODERN) else "sigmoid")


def compiled(job: TrainingJob) -> TrainingJob:
    """The job with compiled blocks."""
    return replace(job, engine=replace(job.engine, compile="on"))


def selective(job: TrainingJob) -> TrainingJob:
    """The job whose blocks recompute norms and GELUs."""
    return replace(job, engine=replace(job.engine, activation_checkpointing="selective"))


def trained(job: TrainingJob, **fields: Any) -> TrainingJob:
    """The job with other fields of its optimiser."""
    return replace(job, optimizer=replace(job.optimizer, **fields))


def refusal(world: World, job: TrainingJob, accumulation: int, plant: Callable[[World], None] | None) -> str:
    """What the check says on this rank, after `plant` has broken something; empty if all is well."""
    if plant:
        plant(world)
    share = 4 * accumulation * world.num_ranks
    plan = plan_batch(share, micro_batch=4, num_ranks=world.num_ranks, lanes=1)
    try:
        check_gradients(job, plan, world)
    except WillNotSucceedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("job", "accumulation", "num_ranks"),
    [
        (job_of(1, "fp32"), 1, 2),
        (job_of(2, "fp32", bucket=1), 4, 3),  # every tensor is larger than a bucket
        (job_of(3, "fp32"), 2, 2),
        (job_of(1, "bf16"), 2, 2),  # summed whole, in fp32
        (job_of(2, "bf16", bucket=600), 1, 3),
        pytest.param(job_of(3, "bf16", model=SIGMOID), 2, 3, marks=pytest.mark.long),
        (job_of(1, "fp32", model=replace(VIT, num_classes=1)), 2, 1),
        (job_of(3, "fp32", model=MODERN), 2, 2),
        # In the gate, compiled blocks are checked with graphs that PyTorch runs.
        pytest.param(compiled(job_of(3, "fp32", model=MODERN)), 2, 2, marks=pytest.mark.long),
        (selective(job_of(3, "bf16")), 1, 2),
        # Without rotations, a constant added to all keys changes no share: k_norm.bias has no gradient but noise.
        pytest.param(job_of(1, "bf16", model=replace(VIT, qk_norm=True)), 2, 2, marks=pytest.mark.long),  # as 1-bf16
        (trained(job_of(2, "fp32"), layer_decay=0.5, first_moment="bf16"), 1, 2),
        pytest.param(
            trained(job_of(3, "bf16", model=SIGMOID), layer_decay=0.5, freeze_backbone=True),
            *(2, 2),
            marks=pytest.mark.long,  # as 2-layer-decay, 3-all-options, and the frozen runs of test_frozen.py
        ),
    ],
    ids=[
        *("1-fp32", "2-fp32-no-bucket", "3-fp32", "1-bf16", "2-bf16-buckets", "3-bf16-sigmoid", "alone"),
        *("3-all-options", "3-all-options-compiled", "3-bf16-selective", "1-bf16-qk-norm"),
        *("2-layer-decay", "3-frozen"),
    ],
)
def test_what_deepspeed_does_today_passes(job: TrainingJob, accumulation: int, num_ranks: int) -> None:
    assert run_ranks(refusal, job, accumulation, None, num_ranks=num_ranks) == [""] * num_ranks


def test_a_tensor_falls_into_a_bucket_as_in_the_run() -> None:
    """The head of 21,843 classes has 16.8 million elements: more than a bucket on a CPU, less than one on a GPU."""
    model = ModelConfig(name="vit_b16", image_size=32, num_classes=21_843)
    for on_cpu in (True, False):
        small = gradient_check._small_job(job_of(1, "fp32", model=model), on_cpu=on_cpu)
        head = math.prod(shapes_of(small.model)["head.weight"])
        assert (head > small.engine.reduce_bucket) is on_cpu


def drop_a_rank(world: World) -> None:
    """Rank 1's gradients are lost."""
    change_reductions(lambda tensor, _: tensor.zero_() if world.rank == 1 else None)


def drop_a_bucket(_: World) -> None:
    """The third bucket is not reduced."""
    import deepspeed  # noqa: PLC0415  # the server has loaded it, for CPUs

    real, seen = deepspeed.comm.all_reduce, [0]

    def all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        seen[0] += tensor.numel() > 1
        return None if seen[0] == 3 else real(tensor, *arguments, **options)

    deepspeed.comm.all_reduce = all_reduce


def double_one_tensor(_: World) -> None:
    """As in DeepSpeed #8224, gradients are added twice: those of the head, the first of each bucket."""
    change_reductions(lambda tensor, _: tensor.view(-1)[:85].mul_(2))


def recompute_wrongly(_: World) -> None:
    """The backward pass leaves out the norms' weights and biases."""
    recompute._normalised = lambda kind, shape, epsilon, x, *_: kind(x, shape, eps=epsilon)


def leave_out_the_mean(world: World) -> None:
    """Gradients are added up, and not divided by the number of ranks."""
    change_reductions(lambda tensor, _: tensor.mul_(world.num_ranks))


def lose_a_micro_batch(_: World) -> None:
    """The first micro-batch of each update is not accumulated."""
    from pipeline.training.zero.engine import Engine  # noqa: PLC0415

    real, seen = Engine.accumulate, [0]

    def accumulate(self: Engine, loss_of: Callable[[torch.nn.Module], torch.Tensor]) -> torch.Tensor:
        seen[0] += 1
        return real(self, (lambda model: 0.0 * loss_of(model)) if seen[0] % 2 else loss_of)

    Engine.accumulate = accumulate  # type: ignore[method-assign]


def keep_the_last_update(_: World) -> None:
    """The second update starts from the gradients of the first."""
    last: list[torch.Tensor] = []

    def change(tensor: torch.Tensor, number: int) -> None:
        if number == 1:
            last.append(tensor.clone())
        elif number == 2:
            tensor.add_(last[0])

    change_reductions(change)


def wobble(_: World) -> None:
    """One gradient of a query or key in a thousand is off by an ulp, another one in each pass: as a GPU's kernels of
    attention have it, which add up in whatever order their blocks finish."""
    real, draws = F.scaled_dot_product_attention, torch.Generator().manual_seed(0)

    def off(gradient: torch.Tensor) -> torch.Tensor:
        is_off = torch.rand(gradient.shape, generator=draws) < 1e-3
        is_off.view(-1)[int(torch.randint(is_off.numel(), (), generator=draws))] = True
        return gradient * (1 + is_off * torch.finfo(gradient.dtype).eps).to(gradient.dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        for each in (q, k):
            if each.requires_grad:
                each.register_hook(off)  # type: ignore[no-untyped-call]
        return real(q, k, v, **options)

    F.scaled_dot_product_attention = attend  # type: ignore[assignment]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("position", ["learned_1d", "relative", "rope2d"])
def test_kernels_that_round_anew_in_each_pass_are_no_fault(precision: Precision, position: Any) -> None:
    """Of k_norm.bias, whose gradient is zero but for rounding, they change everything."""
    job = job_of(1, precision, model=replace(VIT, qk_norm=True, position=position))
    found = run_ranks(refusal, job, 2, wobble, num_ranks=2)
    assert found == ["", ""]


def test_noise_is_left_out_and_still_has_to_be_held() -> None:
    """Elements that no rank holds are lost, whatever their gradient is."""
    job = job_of(1, "bf16", model=replace(VIT, qk_norm=True))
    found = run_ranks(errors_without, job, num_ranks=1)[0]
    assert found == ["blocks.0.attention.k_norm.bias"]


def errors_without(world: World, job: TrainingJob) -> list[str]:
    """The tensors that the check finds wrong if the engine holds no part of a tensor of noise."""
    real = gradient_check._reduced
    lost = "blocks.0.attention.k_norm.bias"

    def reduced(*arguments: Any) -> Any:
        return [fragment for fragment in real(*arguments) if fragment.name != lost]

    gradient_check._reduced = reduced  # type: ignore[assignment]
    plan = plan_batch(4, micro_batch=4, num_ranks=1, lanes=1)
    small = gradient_check._small_job(job, on_cpu=True)
    found = gradient_check.measure_gradients(small, gradient_check._small_plan(plan), world)
    return sorted({each.name for each in found if not each.error <= each.allowed})


def trace_blocks(_: World) -> None:
    """Blocks are traced and run by PyTorch, which takes less time than making kernels."""
    torch._dynamo.utils.counters.clear()
    choices: Any = kernels
    choices.compile_blocks = lambda model, **_: compile_blocks(model, backend="aot_eager")


def compile_wrongly(world: World) -> None:
    """Attention of a compiled block is wrong, in the engine and beside it."""
    trace_blocks(world)
    real = F.scaled_dot_product_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return real(q, k, -3 * v if torch.compiler.is_compiling() else v, **options)

    F.scaled_dot_product_attention = attend  # type: ignore[assignment]


def compiled_refusal(world: World, job: TrainingJob, plant: Callable[[World], None]) -> tuple[str, int]:
    """What the check says of a run that compiles its blocks, and how many graphs it has compiled."""
    said = refusal(world, compiled(job), 1, plant)
    return said, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_a_run_that_compiles_is_checked_with_compiled_blocks(precision: Precision) -> None:
    """Once for all layers and passes of the run's precision, which round as the run's do."""
    job = job_of(1, precision, model=replace(VIT, qk_norm=True))
    ((said, num_graphs),) = run_ranks(compiled_refusal, job, trace_blocks, num_ranks=1)
    assert (said, num_graphs) == ("", 1)
    ((said, _),) = run_ranks(compiled_refusal, job, compile_wrongly, num_ranks=1)
    plain = "fp32 without a compiler" if precision == "fp32" else "fp32"
    assert f"against plain PyTorch in {plain}, allowed 0.75" in said


def fuse_wrongly(_: World) -> None:
    """The gradient of a fused MLP's hidden layer is wrong, in the engine and beside it."""
    real: Any = fused_mlp._FusedMLP.backward

    def backward(ctx: Any, dy_BND: torch.Tensor) -> tuple[Any, ...]:
        dx_BND, is_tanh, dweight1_MD, dbias1_M, *others = real(ctx, dy_BND)
        return dx_BND, is_tanh, -3 * dweight1_MD, -3 * dbias1_M, *others

    fused_mlp._FusedMLP.backward = staticmethod(backward)  # type: ignore[method-assign]


def test_a_run_with_fused_mlps_is_checked_with_them() -> None:
    """As far as a CPU emulates them, and beside plain passes that have none."""
    job = job_of(1, "bf16")
    job = replace(job, engine=replace(job.engine, fused_mlp=True))
    assert run_ranks(refusal, job, 1, None, num_ranks=1) == [""]
    (said,) = run_ranks(refusal, job, 1, fuse_wrongly, num_ranks=1)
    assert "against plain PyTorch in fp32, allowed 0.75" in said
    assert "plain PyTorch in bf16" not in said


@pytest.mark.long
def test_kernels_of_the_compiler_pass() -> None:
    """Those of a CPU. In the gate, the same graphs are run by PyTorch."""
    for precision in ("fp32", "bf16"):
        ((said, _),) = run_ranks(compiled_refusal, job_of(1, precision), nothing, num_ranks=1)
        assert said == ""


def nothing(_: World) -> None:
    """Nothing is broken."""


def change_reductions(change: Callable[[torch.Tensor, int], object]) -> None:
    """Calls `change(tensor, number)` before each of DeepSpeed's reductions of more than one element."""
    import deepspeed  # noqa: PLC0415

    seen = [0]
    for name, place in (("all_reduce", 0), ("reduce_scatter_fn", 1)):
        real = getattr(deepspeed.comm, name)

        def reduce(*arguments: Any, _real: Any = real, _place: int = place, **options: Any) -> Any:
            if arguments[_place].numel() > 1:
                seen[0] += 1
                change(arguments[_place], seen[0])
            return _real(*arguments, **options)

        setattr(deepspeed.comm, name, reduce)
    # Where it was imported by its own name.
    deepspeed.runtime.comm.coalesced_collectives.dist.reduce_scatter_fn = deepspeed.comm.reduce_scatter_fn


@pytest.mark.parametrize(
    ("plant", "job", "accumulation", "num_ranks"),
    [
        (drop_a_rank, job_of(2, "fp32"), 1, 2),
        (drop_a_rank, job_of(1, "bf16"), 2, 2),
        (drop_a_rank, job_of(3, "bf16"), 1, 2),
        (drop_a_bucket, job_of(2, "bf16", bucket=600), 1, 2),
        (double_one_tensor, job_of(1, "bf16"), 1, 2),
        (double_one_tensor, job_of(2, "fp32"), 2, 2),
        (leave_out_the_mean, job_of(3, "fp32"), 2, 2),
        (lose_a_micro_batch, job_of(2, "bf16"), 2, 2),
        (keep_the_last_update, job_of(1, "fp32"), 1, 2),
        (recompute_wrongly, selective(job_of(1, "fp32")), 1, 2),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_error_is_refused_by_every_rank(
    plant: Callable[[World], None], job: TrainingJob, accumulation: int, num_ranks: int
) -> None:
    said = run_ranks(refusal, job, accumulation, plant, num_ranks=num_ranks)
    assert len(set(said)) == 1, "the same message everywhere"
    engine = job.engine
    counts = f"{plural(num_ranks, 'rank')} x {plural(accumulation, 'micro-batch')}"
    where = f"ZeRO-{engine.zero_stage} in {engine.precision}, {counts}"
    assert (
        f"gradients that reach the optimiser are wrong ({where}, reduction in fp32, DeepSpeed {TESTED[-1]}" in said[0]
    )
    assert f"torch {torch.__version__})" in said[0]
    worst = re.search(r"^  ([\w.]+): (\S+) against plain PyTorch in (\w+), allowed (\S+)$", said[0], re.MULTILINE)
    assert worst, said[0]
    assert worst[1] in shapes_of(VIT)
    assert float(worst[2]) > 8 * float(worst[4])
    for todo in ("--engine.zero-stage", "--engine.reduce-bucket", "--engine.check-gradients off"):
        assert todo in said[0]


@pytest.mark.parametrize(
    ("setting", "num_ranks", "accumulation", "device", "installed", "expected"),
    [
        ("auto", 8, 1, GPU, TESTED[-1], True),
        ("auto", 1, 2, GPU, TESTED[-1], True),
        ("auto", 1, 1, GPU, TESTED[-1], False),  # nothing is added up
        ("auto", 8, 2, CPU, TESTED[-1], False),  # small runs and tests
        ("auto", 1, 1, CPU, "0.99.0", True),  # a version that is allowed by name
        ("off", 8, 2, GPU, "0.99.0", False),
        ("on", 1, 1, CPU, TESTED[-1], True),
    ],
)
def test_auto_checks_on_gpus_that_add_up(
    monkeypatch: pytest.MonkeyPatch,
    setting: Literal["auto", "on", "off"],
    num_ranks: int,
    accumulation: int,
    device: torch.device,
    installed: str,
    expected: bool,
) -> None:
    monkeypatch.setattr("pipeline.training.zero.gradient_check.deepspeed_version", lambda: installed)
    plan = BatchPlan(global_batch=16, micro_batch=1, accumulation=accumulation, num_ranks=num_ranks)
    assert checks_gradients(EngineConfig(check_gradients=setting), plan, device) is expected


@pytest.mark.parametrize(
    ("num_ranks", "device", "installed", "is_checked", "expected"),
    [
        (8, GPU, TESTED[-1], True, True),
        (8, GPU, TESTED[-1], False, False),  # --engine.check-gradients off
        (1, GPU, TESTED[-1], True, False),  # nothing is sent
        (8, CPU, TESTED[-1], True, False),  # gloo computes on the cores of the passes
        (8, GPU, "0.99.0", True, False),  # it may lack a fix
    ],
)
def test_auto_overlaps_where_it_is_checked(
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    device: torch.device,
    installed: str,
    is_checked: bool,
    expected: bool,
) -> None:
    monkeypatch.setattr("pipeline.training.zero.gradient_check.deepspeed_version", lambda: installed)
    plan = BatchPlan(global_batch=16, micro_batch=1, accumulation=1, num_ranks=num_ranks)
    assert overlaps(plan, device, is_checked=is_checked) is expected


def test_a_run_after_the_check_is_the_same_bit_by_bit(
    digits_url: str,
    finished_runs: FinishedRuns,
    run_dir: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = ("--engine.zero-stage", "3", "--engine.precision", "fp32")
    unchecked = finished_runs.get(2, *options)
    capfd.readouterr()
    words = pretrain_words(digits_url, run_dir, *options, "--engine.check-gradients", "on")
    assert run(words, num_ranks=2, log_dir=tmp_path) == 0
    assert capfd.readouterr().err.count("gradients checked in") == 1
    assert losses(run_dir) == losses(unchecked)
    expected, found = (load_file(folder / "weights" / "model.safetensors") for folder in (unchecked, run_dir))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


COMMAND = """
import sys
from jobs.cli import main
from pipeline.training.zero.engine import Engine
real = Engine.accumulate
Engine.accumulate = lambda self, loss_of: real(self, lambda model: 2.0 * loss_of(model))
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_with_wrong_gradients_ends_before_its_first_step(digits_url: str, run_dir: Path) -> None:
    options = ("--engine.check-gradients", "on", "--engine.precision", "fp32", "--micro-batch", "16")
    ended = program(COMMAND, *pretrain_words(digits_url, run_dir, *options))
    assert ended.code == 78, ended.errors
    assert re.search(r"\w+: 1 against plain PyTorch in fp32, allowed 1e-05$", ended.errors, re.MULTILINE)
    assert "Traceback" not in ended.errors
    assert not (run_dir / "metrics.jsonl").exists()
    assert not list(run_dir.glob("checkpoints/step-*"))

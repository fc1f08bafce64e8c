"""Random patch sizes: which size a step draws, what a step computes, operations, memory, and a run after a kill."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs import exit_codes
from jobs.recipes.pretrain import digits_smoke
from jobs.recipes.shorter import shortened, smoke
from pipeline.data.batches import Batch
from pipeline.models import ModelConfig, build_model, compile_blocks
from pipeline.models.loss import classification_loss
from pipeline.planning.step_time import flops_at, flops_of_steps
from pipeline.training.fitting.memory import Topology, memory_of
from pipeline.training.gradients import Gradients, compiling_steps, drawn_patch
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.tokens import TokensConfig
from pipeline.training.zero.batch_plan import plan_batch
from tests.rigs.processes import one_world
from tests.rigs.training import STEPS, losses, pretrain_words, run

VIT = ModelConfig(name="vit", image_size=32, patch=8, depth=2, width=16, mlp_width=24, num_heads=2, num_classes=10)
SIZES = (4, 8, 16)
BASE = digits_smoke()
JOB = replace(
    BASE,
    model=VIT,
    steps=40,
    schedule=replace(BASE.schedule, warmup_steps=0),
    tokens=TokensConfig(patch_sizes=SIZES),
    engine=replace(BASE.engine, precision="fp32", activation_checkpointing="off"),
)


def of_one_size(patch: int, job: TrainingJob = JOB) -> TrainingJob:
    """The job of a model with this patch size, without random ones."""
    return replace(job, model=replace(job.model, patch=patch), tokens=replace(job.tokens, patch_sizes=()))


def test_each_size_is_drawn_as_often_by_the_seed_and_the_step() -> None:
    drawn = [drawn_patch(step, seed=3, patch_sizes=SIZES) for step in range(3000)]
    counts = Counter(drawn)
    assert counts.keys() == set(SIZES)
    assert list(counts.values()) == pytest.approx([1000] * 3, abs=4 * (3000 * 2 / 9) ** 0.5)
    assert drawn[:12] == [4, 8, 4, 8, 8, 4, 8, 4, 16, 8, 4, 16], "what runs have drawn so far"
    assert drawn != [drawn_patch(step, seed=4, patch_sizes=SIZES) for step in range(3000)]
    assert drawn_patch(0, seed=3, patch_sizes=()) is None


class OneEngine:
    """What passes need of an engine: a model, whose gradients they add up."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = model

    def accumulate(self, loss_of) -> torch.Tensor:  # type: ignore[no-untyped-def]
        loss: torch.Tensor = loss_of(self.module)
        torch.autograd.backward(loss)
        return loss.detach()


def passes_of(job: TrainingJob, engine: OneEngine | None = None) -> Gradients:
    plan = plan_batch(job.global_batch, micro_batch=0, num_ranks=1, lanes=job.data.lanes)
    return Gradients(job, plan, engine, one_world())  # type: ignore[arg-type]


def test_a_step_is_that_of_its_size() -> None:
    job = replace(JOB, global_batch=16, data=replace(JOB.data, lanes=8))
    images = torch.randint(0, 256, (16, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    labels = torch.arange(16)[:, None] % 10
    drawn = [drawn_patch(step, seed=job.seed, patch_sizes=SIZES) for step in range(40)]
    model, found = build_model(VIT, seed=1), set()
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(2))
    passes = passes_of(job, OneEngine(model))
    for step, patch in ((drawn.index(patch), patch) for patch in SIZES):
        expected = classification_loss(model(images, patch=patch), labels, name="softmax", smoothing=0.0)
        numbers = torch.arange(16)
        batch = Batch(step=step, images=images, labels=labels, sample_ids=numbers, datasets=numbers)
        assert torch.equal(passes.accumulate(batch), expected)
        found.add(expected.item())
    assert len(found) == len(SIZES)


def test_patches_that_stay_are_of_the_grid_of_the_step() -> None:
    job = replace(JOB, tokens=replace(JOB.tokens, patch_dropout=0.5, whole_steps=20))
    passes = passes_of(job)
    for step in range(20):
        patch, stay = passes.patch(step), passes.staying(step, slice(0, 3))
        assert stay is not None
        assert patch is not None
        num_patches = (32 // patch) ** 2
        assert stay.shape == (3, num_patches // 2)
        assert int(stay.max()) < num_patches
    assert passes.staying(20, slice(0, 3)) is None


def test_steps_that_compile_are_the_first_of_each_size_in_each_phase() -> None:
    def first(begin: int, end: int) -> set[int]:
        drawn = {step: drawn_patch(step, seed=JOB.seed, patch_sizes=SIZES) for step in range(begin, end)}
        return {step + 1 for step in drawn if drawn[step] not in [drawn[before] for before in range(begin, step)]}

    assert compiling_steps(JOB, begin=0) == first(0, 40)
    assert compiling_steps(JOB, begin=7) == first(7, 40)
    both = replace(JOB, tokens=replace(JOB.tokens, image_sizes=(16,), size_steps=(12,)))
    assert compiling_steps(both, begin=2) == first(2, 12) | first(12, 40)
    assert compiling_steps(both, begin=14) == first(14, 40) | {13}, "a step of the past does no harm"
    assert compiling_steps(of_one_size(8, both), begin=0) == {13}


def test_each_size_compiles_each_block_once() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled, plain = build_model(VIT, seed=1), build_model(VIT, seed=1)
    compile_blocks(compiled, backend="aot_eager")
    images = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    num_graphs = []
    for patch in (4, 16, 4, None, 8, 16):
        found, expected = (model(images, patch=patch) for model in (compiled, plain))
        torch.testing.assert_close(found, expected)
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert num_graphs == [1, 2, 2, 3, 3, 3]


def test_operations_are_the_mean_over_the_sizes() -> None:
    each = [flops_at(of_one_size(patch), 0) for patch in SIZES]
    assert each == sorted(each, reverse=True)
    assert flops_at(JOB, 5) == pytest.approx(sum(each) / 3, abs=0.5)
    assert flops_of_steps(JOB, 40) == 40 * flops_at(JOB, 0)
    less = replace(JOB, tokens=replace(JOB.tokens, image_sizes=(16,), size_steps=(12,), patch_dropout=0.5))
    for step in (0, 20):
        each = [flops_at(of_one_size(patch, less), step) for patch in SIZES]
        assert flops_at(less, step) == pytest.approx(sum(each) / 3, abs=0.5)
    assert flops_of_steps(less, 40) == 12 * flops_at(less, 0) + 28 * flops_at(less, 20)


def test_memory_must_suffice_for_the_smallest_size() -> None:
    topology = Topology(num_ranks=1, is_on_gpu=False)
    own, smallest, without = (memory_of(job, topology, micro_batch=8) for job in (JOB, of_one_size(4), of_one_size(8)))
    assert own.activations == smallest.activations > without.activations
    assert replace(own, activations=0, gradients=0) == replace(without, activations=0, gradients=0)


def test_shorter_runs_draw_the_same_sizes_and_tiny_models_none() -> None:
    assert shortened(JOB, steps=5).tokens == JOB.tokens
    assert smoke(JOB).tokens == TokensConfig()


@pytest.mark.parametrize(
    "others",
    [
        pytest.param((), id="one rank"),
        pytest.param(
            (("--micro-batch", "4", "--engine.zero-stage", "3"), ()), id="and two ranks", marks=pytest.mark.long
        ),
    ],
)
def test_a_run_is_the_same_on_any_topology_and_after_a_kill(
    digits_url: str, tmp_path: Path, others: tuple[tuple[str, ...], ...]
) -> None:
    """Micro-batches, ranks and a ZeRO stage change results to rounding. A continuation changes no bit."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    options = ("--engine.precision", "fp32", "--tokens.patch-sizes", "4", "8", "16")
    assert run(pretrain_words(digits_url, whole, *options), num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    for number, more in enumerate(others):
        words = pretrain_words(digits_url, tmp_path / str(number), *options, *more)
        assert run(words, num_ranks=2, log_dir=tmp_path) == exit_codes.DONE
        found = list(losses(tmp_path / str(number)).values())
        assert found == pytest.approx(list(losses(whole).values()), rel=1e-4)

    shutil.copytree(whole, again)
    (again / "DONE").unlink()
    shutil.rmtree(again / "weights")
    shutil.rmtree(again / "checkpoints" / f"step-{STEPS:08d}")
    assert run(pretrain_words(digits_url, again, *options), num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    weights = [(folder / "weights" / "model.safetensors").read_bytes() for folder in (whole, again)]
    assert weights[0] == weights[1]
    assert losses(again) == losses(whole)

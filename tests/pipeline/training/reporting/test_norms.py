"""Norms by group are those of plain PyTorch, and pictures show the fp32 masters, under every stage."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.checkpoint import Fragment
from pipeline.inspection.weight_pictures import levels, similarities
from pipeline.models.build import shapes_of, unfilled_model
from pipeline.models.config import ModelConfig
from pipeline.models.loss import classification_loss
from pipeline.ranks.streams import HostStreams
from pipeline.ranks.world import World
from pipeline.training.reporting.metrics import read_metrics
from pipeline.training.reporting.norms import Norms, PositionView, _squares
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero import gradient_check as check
from pipeline.training.zero.batch_plan import BatchPlan, plan_batch
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.optimizer import group_of, is_trained
from tests.pipeline.training.test_run import continue_from
from tests.rigs.processes import run_ranks
from tests.rigs.training import FinishedRuns, losses, pretrain_words, resumed_steps, run

VIT = ModelConfig(name="vit", image_size=16, num_classes=5, patch=8, depth=2, width=16, mlp_width=32, num_heads=2)
CLIP_NORM = 1e-3  # below every norm here: what is measured after clipping is not what was there before
GROUPS = ("embed.position", "embed.patch", "blocks.0", "blocks.1", "norm", "head")
OPTIONS = ("--norms-every-steps", "3", "--similarity-every-steps", "5")
SMALL_VIT = ModelConfig(name="vit", image_size=24, num_classes=3, patch=8, depth=1, width=10, mlp_width=8, num_heads=2)
STAGES: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An engine. `discard`: its first update is dropped."""

    stage: Literal[1, 2, 3]
    accumulation: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    frozen: bool = False
    discard: bool = False
    bucket: int = 50_000_000

    @property
    def job(self) -> TrainingJob:
        """With two groups of parameters for each rate, and a representation layer if most is frozen."""
        smoke = digits_smoke()
        return replace(
            smoke,
            model=replace(VIT, representation=self.frozen),
            engine=replace(smoke.engine, zero_stage=self.stage, precision=self.precision, reduce_bucket=self.bucket),
            optimizer=replace(smoke.optimizer, freeze_backbone=self.frozen, layer_decay=0.5),
        )


CASES = (
    *(Case(stage=stage, accumulation=number) for stage in (1, 2, 3) for number in (1, 2)),
    Case(stage=1, accumulation=2, precision="bf16"),  # summed whole, in fp32
    Case(stage=2, precision="bf16", bucket=600),
    *(Case(stage=stage, accumulation=2, frozen=True) for stage in (1, 2, 3)),
    *(Case(stage=stage, discard=True) for stage in (1, 2, 3)),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of an update: the norms by group, those of plain PyTorch, and what the engine reports."""

    norms: dict[str, float]
    expected: dict[str, float]
    grad_norm: float
    was_skipped: bool


def measured(world: World) -> list[list[Found]]:
    """Two updates of each case."""
    return [list(_updates(case, world)) for case in CASES]


def _updates(case: Case, world: World) -> Iterator[Found]:
    job = case.job
    plan = BatchPlan(
        global_batch=2 * case.accumulation * world.num_ranks,
        micro_batch=2,
        accumulation=case.accumulation,
        num_ranks=world.num_ranks,
    )
    values = check._random_weights(job.model)
    engine = Engine(
        unfilled_model(job.model), config=job.engine, plan=plan, optimizer=job.optimizer, clip_norm=CLIP_NORM
    )
    norms = Norms(engine, every=1, device=world.device)

    def fill(fragment: Fragment, slot: str) -> None:
        fragment.slots[slot].copy_(values[fragment.name].flatten()[fragment.start : fragment.start + fragment.length])

    for update in range(2):
        engine.load(fill, moments=[], num_updates=0)  # both updates start from the same weights
        first = (world.rank * 2 + update) * case.accumulation
        batches = [check._batch(job, first + micro, world.device) for micro in range(case.accumulation)]
        for images, labels in batches:

            def loss_of(model: nn.Module, x: torch.Tensor = images, y: torch.Tensor = labels) -> torch.Tensor:
                return classification_loss(model(x), y, name=job.loss)

            engine.accumulate(loss_of)
        squares = norms.squares()
        dist.all_reduce(squares)
        result = engine.update(learning_rate=1e-3, discard=case.discard and update == 0)
        dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
        plain = check._Reference(name="plain passes", dtype=dtype, limit=0.0)
        gradients = check._expected(job, values, batches, plain, world)
        yield Found(
            norms=norms.values(dict(zip(norms.names, squares.tolist(), strict=True))),
            expected=_by_group("grad_norm", gradients) | _by_group("param_norm", values),
            grad_norm=float(result.grad_norm),
            was_skipped=result.was_skipped,
        )
    engine.destroy()


def _by_group(kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, tensor in tensors.items():
        key = f"{kind}/{group_of(name)}"
        squares[key] = squares.get(key, 0.0) + float(tensor.double().square().sum())
    return {key: math.sqrt(square) for key, square in squares.items()}


@pytest.fixture(scope="module", params=[1, 2], ids=lambda number: f"{number} ranks")
def found(request: pytest.FixtureRequest) -> list[list[list[Found]]]:
    """Of every rank and case."""
    return run_ranks(measured, num_ranks=request.param)


def _said(case: Case) -> str:
    options = [name for name in ("frozen", "discard") if getattr(case, name)]
    return "-".join([f"{case.stage}-{case.precision}-x{case.accumulation}", *options])


@pytest.mark.parametrize("place", range(len(CASES)), ids=[_said(case) for case in CASES])
def test_norms_are_those_of_plain_pytorch(found: list[list[list[Found]]], place: int) -> None:
    case, own = CASES[place], [rank[place] for rank in found]
    assert [rank == own[0] for rank in own] == [True] * len(own), own
    for update in own[0]:
        assert update.norms.keys() == update.expected.keys(), "frozen groups have no gradient"
        limit = 1e-5 if case.precision == "fp32" else 1e-2
        assert update.norms == pytest.approx(update.expected, rel=limit)
        whole = math.hypot(*(norm for name, norm in update.norms.items() if name.startswith("grad_norm/")))
        assert update.grad_norm == pytest.approx(whole, rel=1e-5)
        assert update.grad_norm > CLIP_NORM
    assert [update.was_skipped for update in own[0]] == [case.discard, False], "later updates are made again"
    frozen_groups = {"grad_norm/representation", "grad_norm/head"}
    shown = {name for name in own[0][0].norms if name.startswith("grad_norm/")}
    assert shown == (frozen_groups if case.frozen else {f"grad_norm/{group}" for group in GROUPS})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_b16", (*("embed.position", "embed.patch"), *(f"blocks.{n}" for n in range(12)), "norm", "head")),
        (
            "r50_vit_b16",
            (
                *("embed.position", "embed.resnet", "embed.resnet.stages.0", "embed.resnet.stages.1", "embed.patch"),
                *(f"blocks.{n}" for n in range(12)),
                *("norm", "head"),
            ),
        ),
        ("bit_r50x1", ("conv_root", "stages.0", "stages.1", "norm", "head")),
    ],
)
def test_groups_of_models(name: str, expected: tuple[str, ...]) -> None:
    model = ModelConfig(name=name, image_size=224, num_classes=3, resnet_units=None if name == "vit_b16" else (1, 2))
    assert tuple(dict.fromkeys(map(group_of, shapes_of(model)))) == expected


def test_all_that_is_trained_with_a_frozen_backbone_is_in_two_groups() -> None:
    job = Case(stage=1, frozen=True).job
    groups = {group_of(name) for name in shapes_of(job.model) if is_trained(name, job.optimizer)}
    assert groups == {"representation", "head"}


def test_large_tensors_keep_their_digits() -> None:
    """The fp32 sum of a CPU over all of them at once would be off by 3e-4."""
    large = torch.full((1 << 24,), 0.001)
    (square,) = _squares({"head.weight": large}, ("head",), device=large.device).tolist()
    assert math.sqrt(square) == pytest.approx(0.001 * 4096, rel=1e-6)


def test_a_value_that_is_not_finite_stays_in_its_group() -> None:
    held = {"norm.weight": torch.tensor([math.nan]), "head.bias": torch.tensor([3.0]), "head.weight": torch.ones(0)}
    nothing, norm, head = _squares(held, ("blocks.0", "norm", "head"), device=torch.device("cpu")).tolist()
    assert (nothing, head) == (0.0, 9.0)
    assert math.isnan(norm)


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_steps_that_are_due(every: int, due: list[int]) -> None:
    norms = Norms.__new__(Norms)
    norms.every = every
    assert [step for step in range(1, 7) if norms.is_due(step)] == due


def norm_lines(run_dir: Path) -> dict[int, dict[str, float]]:
    """The values by group in metrics.jsonl, and the whole gradient's norm, by step."""
    lines: list[dict[str, Any]] = read_metrics(run_dir)
    own = {line["step"]: {name: line[name] for name in line if "_norm" in name} for line in lines}
    return {step: values for step, values in own.items() if len(values) > 1}


def pictures(run_dir: Path) -> list[tuple[int, bytes]]:
    """Those of the positions in TensorBoard, by step."""
    board = EventAccumulator(str(run_dir), size_guidance={"images": 0}).Reload()
    return [(image.step, image.encoded_image_string) for image in board.Images("weights/position_similarity")]


@pytest.mark.slow
def test_a_run_shows_them_and_trains_the_same_bits(finished_runs: FinishedRuns) -> None:
    plain, looked = finished_runs.get(2), finished_runs.get(2, *OPTIONS)
    assert losses(looked) == losses(plain)
    expected, found = (load_file(run_dir / "weights" / "model.safetensors") for run_dir in (plain, looked))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert norm_lines(plain) == {}, "the default is every 100 steps"
    shown = norm_lines(looked)
    assert list(shown) == [3, 6, 9, 12, 15]
    for values in shown.values():
        whole = math.hypot(*(norm for name, norm in values.items() if name.startswith("grad_norm/")))
        assert values["grad_norm"] == pytest.approx(whole, rel=1e-5)
    assert [step for step, _ in pictures(plain)] == [16], "the last step"
    assert [step for step, _ in pictures(looked)] == [5, 10, 15, 16]
    assert pictures(looked)[-1] == pictures(plain)[-1]


@pytest.mark.slow
def test_a_continued_run_shows_the_same_once(digits_url: str, finished_runs: FinishedRuns, tmp_path: Path) -> None:
    """Even if only every fourth step has a line."""
    unbroken, continued = finished_runs.get(2, *OPTIONS), tmp_path / "continued"
    continue_from(unbroken, continued, step=8)
    words = pretrain_words(digits_url, continued, *OPTIONS, "--log-every-steps", "4")
    assert run(words, num_ranks=2, log_dir=tmp_path) == 0
    assert resumed_steps(continued) == [0, 8]
    assert norm_lines(continued) == norm_lines(unbroken)
    assert pictures(continued) == pictures(unbroken)
    assert [line["step"] for line in read_metrics(continued)] == [*range(1, 9), 9, 12, 15, 16]


def job_of(model: ModelConfig = SMALL_VIT, *, every: int = 4, steps: int = 10) -> TrainingJob:
    smoke = digits_smoke()
    schedule = replace(smoke.schedule, warmup_steps=0)
    return replace(smoke, model=model, similarity_every_steps=every, steps=steps, schedule=schedule)


def position() -> torch.Tensor:
    """float32[1, 10, 10], which bf16 cannot hold."""
    return torch.randn(1, 10, 10, generator=torch.Generator().manual_seed(0)) + 1


def shown(world: World) -> list[torch.Tensor | None]:
    """What this rank gets under each stage."""
    plan, found = plan_batch(6, micro_batch=0, num_ranks=world.num_ranks, lanes=1), []

    def fill(fragment: Fragment, slot: str) -> None:
        values = position() if fragment.name == "embed.position" else torch.zeros(10_000)
        fragment.slots[slot].copy_(values.flatten()[fragment.start : fragment.start + fragment.length])

    for stage in STAGES:
        job = job_of()
        config = replace(job.engine, zero_stage=stage, precision="bf16")
        engine = Engine(unfilled_model(SMALL_VIT), config=config, plan=plan, optimizer=job.optimizer, clip_norm=0.0)
        engine.load(fill, moments=[], num_updates=0)
        launched = PositionView(job, engine, world, HostStreams()).launched()
        found.append(launched.arrived() if launched else None)
        engine.destroy()
    return found


def test_rank_0_gets_the_masters_under_every_stage() -> None:
    first, second = run_ranks(shown, num_ranks=2)
    assert second == [None] * len(STAGES)
    expected = levels(similarities(position()[0], grid=(3, 3)))
    for found in first:
        assert torch.equal(found, expected)


class _Engine:
    """A model of these shapes."""

    def __init__(self, model: ModelConfig) -> None:
        self.shapes = shapes_of(model)


@pytest.mark.parametrize(
    ("job", "due"),
    [
        (job_of(), [4, 8, 10]),  # and the last one
        (job_of(every=1, steps=2), [1, 2]),
        (job_of(every=0), []),
        (job_of(replace(SMALL_VIT, position="learned_2d")), []),
        (job_of(replace(SMALL_VIT, position="none")), []),
        (job_of(ModelConfig(name="bit_r50x1", image_size=32, num_classes=3, resnet_units=(1,))), []),
    ],
    ids=["every-4", "every-1", "never", "2-D", "no positions", "BiT"],
)
def test_steps_whose_picture_is_due(job: TrainingJob, due: list[int]) -> None:
    engine = _Engine(job.model)
    view = PositionView(job, engine, None, HostStreams())  # type: ignore[arg-type]
    assert [step for step in range(1, job.steps + 1) if view.is_due(step)] == due

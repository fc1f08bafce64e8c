"""SAM's updates are those of its sources' formula for the global batch, on any number of ranks and micro-batches; the
second pass of a step has the draws of the first, and nothing of it stays behind."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from jobs import exit_codes
from pipeline.checkpoints.manifest import MASTER
from pipeline.data.config import MixupConfig
from pipeline.models import ModelConfig, build_model
from pipeline.models.loss import classification_loss
from pipeline.ranks.world import World
from pipeline.training.settings.job import EngineConfig, OptimizerConfig, TeacherConfig
from pipeline.training.settings.tokens import TokensConfig
from pipeline.training.teacher import Teacher
from pipeline.training.zero.batch_plan import plan_batch
from pipeline.training.zero.engine import Engine, UpdateResult
from pipeline.training.zero.optimizer import decay_of, is_trained
from tests.pipeline.training.test_step import JOB, SHARE, batch_of, gradients, model
from tests.rigs.given_gradients import filled, largest_difference
from tests.rigs.processes import one_world, run_ranks
from tests.rigs.training import STEPS, FinishedRuns, losses, pretrain_words, run, weights_in_model

MODEL = ModelConfig(name="vit", image_size=16, patch=8, depth=2, width=24, mlp_width=40, num_heads=2, num_classes=3)
# So tame that two halves of a batch differ from the whole by 2e-7 after all steps, with the formula alone.
CONFIG = OptimizerConfig(name="adamw", weight_decay=0.05, epsilon=1e-2, sam_rho=0.05)
NUM_STEPS, NUM_IMAGES, RATE, CLIP = 20, 8, 0.01, 3.0


def initial_weights() -> dict[str, torch.Tensor]:
    """Those of a run, with a head that is not zero."""
    found = {name: weight.detach() for name, weight in build_model(MODEL, seed=1).named_parameters()}
    head = torch.randn(found["head.weight"].shape, generator=torch.Generator().manual_seed(1))
    return found | {"head.weight": 0.1 * head}


def images_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    draws = torch.Generator().manual_seed(step)
    shape = (NUM_IMAGES, MODEL.image_size, MODEL.image_size, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=draws), torch.randint(
        0, 3, (NUM_IMAGES, 1), generator=draws
    )


def after_the_formula() -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights, and the losses of the first passes, by get_sam_gradient of google-research/sam with
    --sync_perturbations, written down in plain PyTorch."""
    plain = build_model(MODEL)
    plain.load_state_dict(initial_weights())
    weights = dict(plain.named_parameters())
    groups = [{"params": [weight], "weight_decay": decay_of(name, CONFIG)} for name, weight in weights.items()]
    adamw = torch.optim.AdamW(groups, lr=RATE, eps=CONFIG.epsilon)
    found, norms = list[float](), list[float]()

    def gradient_of_the_batch(step: int) -> tuple[float, list[torch.Tensor]]:
        images, labels = images_of(step)
        loss = classification_loss(plain(images), labels, name="softmax")
        return loss.item(), list(torch.autograd.grad(loss, list(weights.values())))

    for step in range(NUM_STEPS):
        kept = {name: weight.detach().clone() for name, weight in weights.items()}
        loss, first = gradient_of_the_batch(step)
        norm = torch.cat([one.double().flatten() for one in first]).norm().float()
        with torch.no_grad():
            for weight, one in zip(weights.values(), first, strict=True):
                weight.add_(CONFIG.sam_rho * (one / norm))
        _, second = gradient_of_the_batch(step)
        with torch.no_grad():
            for (name, weight), one in zip(weights.items(), second, strict=True):
                weight.copy_(kept[name])
                weight.grad = one
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), CLIP)))
        adamw.step()
        found.append(loss)
    assert min(norms) < CLIP < max(norms), norms
    return {name: weight.detach().flatten() for name, weight in weights.items()}, found


def engine_of(
    world: World,
    *,
    accumulation: int,
    precision: Literal["fp32", "bf16"] = "fp32",
    ema_decay: float = 0.0,
    optimizer: OptimizerConfig = CONFIG,
) -> Engine:
    micro_batch = NUM_IMAGES // world.num_ranks // accumulation
    engine = Engine(
        build_model(MODEL),
        config=EngineConfig(zero_stage=1, precision=precision),
        plan=plan_batch(NUM_IMAGES, micro_batch=micro_batch, num_ranks=world.num_ranks, lanes=1),
        optimizer=optimizer,
        clip_norm=CLIP,
        ema_decay=ema_decay,
    )
    filled(engine, {(name, MASTER): value for name, value in initial_weights().items()}, num_updates=0)
    return engine


def pass_over(engine: Engine, world: World, step: int, *, accumulation: int, spoilt: float = 0.0) -> torch.Tensor:
    """This rank's passes over its share of a batch; `spoilt` is added to the loss of the last rank."""
    images, labels = images_of(step)
    share = NUM_IMAGES // world.num_ranks
    size, own, found = share // accumulation, slice(world.rank * share, (world.rank + 1) * share), []
    is_last = world.rank == world.num_ranks - 1

    def loss_of(module: torch.nn.Module, part: slice) -> torch.Tensor:
        loss = classification_loss(module(images[own][part]), labels[own][part], name="softmax")
        return loss + spoilt if is_last else loss

    for micro in range(accumulation):
        part = slice(micro * size, (micro + 1) * size)
        found.append(engine.accumulate(partial(loss_of, part=part)))
    return torch.stack(found).mean()


def after_our_updates(
    world: World, accumulation: int, config: OptimizerConfig = CONFIG, num_steps: int = NUM_STEPS
) -> tuple[dict[str, tuple[int, torch.Tensor]], list[float]]:
    """This rank's fragments of the weights, and its part of the losses."""
    engine, found = engine_of(world, accumulation=accumulation, optimizer=config), []
    for step in range(num_steps):
        found.append(float(pass_over(engine, world, step, accumulation=accumulation)))
        engine.climb()
        pass_over(engine, world, step, accumulation=accumulation)
        engine.update(learning_rate=RATE)
    return {each.name: (each.start, each.slots[MASTER].clone()) for each in engine.fragments()}, found


@pytest.mark.parametrize(
    ("num_ranks", "accumulation"), [(1, 2), (2, 2), *(pytest.param(n, 1, marks=pytest.mark.long) for n in (1, 2))]
)
def test_updates_are_the_formulas(num_ranks: int, accumulation: int) -> None:
    expected, expected_losses = after_the_formula()
    found, of_ranks = zip(*run_ranks(after_our_updates, accumulation, num_ranks=num_ranks), strict=True)
    largest = max(float(weights.abs().max()) for weights in expected.values())
    difference, name = largest_difference(list(found), expected)
    assert difference / largest < 1e-6, name
    means = [sum(each) / num_ranks for each in zip(*of_ranks, strict=True)]
    assert means == pytest.approx(expected_losses, rel=1e-6)


FEW = 3  # steps of each of the other optimisers, on which an update with a given gradient is tested elsewhere


def with_given_gradients(world: World, config: OptimizerConfig) -> dict[str, torch.Tensor]:
    """The weights after an engine without SAM was given the formula's gradients, from plain PyTorch."""
    engine = engine_of(world, accumulation=1, optimizer=replace(config, sam_rho=0.0))
    for step in range(FEW):
        plain = build_model(MODEL)
        weights = {name: weight for name, weight in plain.named_parameters() if is_trained(name, config)}
        masters = {each.name: each.slots[MASTER] for each in engine.fragments()}
        with torch.no_grad():
            for name, weight in plain.named_parameters():
                weight.copy_(masters[name].view_as(weight))
        images, labels = images_of(step)
        found = list[dict[str, torch.Tensor]]()
        for _ in range(2):
            loss = classification_loss(plain(images), labels, name="softmax")
            of_pass = torch.autograd.grad(loss, list(weights.values()))
            found.append(dict(zip(weights, of_pass, strict=True)))
            norm = torch.cat([one.double().flatten() for one in of_pass]).norm().float()
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.add_(config.sam_rho * (found[0][name] / norm))
        pass_over(engine, world, step, accumulation=1)
        for name, view in engine.gradients().items():
            view.copy_(found[1][name].flatten())
        engine.update(learning_rate=RATE)
    return {each.name: each.slots[MASTER].clone() for each in engine.fragments()}


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"name": "sgd", "momentum": 0.9}, id="sgd"),
        pytest.param({"name": "muon"}, id="muon, whose matrices are iterated"),
        pytest.param({"name": "lamb"}, id="lamb, whose trust ratio is of the weights, not of those that passes use"),
        pytest.param({"name": "adafactor"}, id="adafactor"),
        pytest.param({"freeze_backbone": True}, id="frozen: the norm is that of the head's gradient"),
    ],
)
def test_every_optimiser_gets_the_second_gradient(settings: dict[str, Any], num_ranks: int) -> None:
    config = replace(CONFIG, **settings)
    (expected,) = run_ranks(with_given_gradients, config, num_ranks=1)
    found = [fragments for fragments, _ in run_ranks(after_our_updates, 2, config, FEW, num_ranks=num_ranks)]
    largest = max(float(weights.abs().max()) for weights in expected.values())
    if config.name == "adafactor":
        # A bias of keys changes no softmax, so its gradient is rounding, which Adafactor makes as large as any other.
        found = [{name: own for name, own in of_rank.items() if "qkv.bias" not in name} for of_rank in found]
    difference, name = largest_difference(found, expected)
    assert difference / largest < 1e-5, name
    start = initial_weights()
    assert all(torch.equal(start[name].flatten(), expected[name]) != is_trained(name, config) for name in expected)


State = dict[tuple[str, str], torch.Tensor]


def state_of(engine: Engine) -> State:
    """Masters, moments, average, and the model's own weights."""
    own = {(each.name, slot): view.clone() for each in engine.fragments() for slot, view in each.slots.items()}
    return own | {(name, "weight"): weight.clone() for name, weight in weights_in_model(engine)}


def changed(before: State, after: State) -> set[str]:
    """The kinds of tensors that differ."""
    assert before.keys() == after.keys()
    return {kind for (name, kind), value in before.items() if not torch.equal(after[name, kind], value)}


def traces_of_a_second_pass(world: World) -> dict[str, set[str]]:
    """What each part of a step in bf16 has changed, on this rank."""
    engine = engine_of(world, accumulation=2, precision="bf16", ema_decay=0.9)

    def step(number: int, first: float = 0.0, second: float = 0.0, **options: bool) -> UpdateResult:
        pass_over(engine, world, number, accumulation=2, spoilt=first)
        engine.climb()
        pass_over(engine, world, number, accumulation=2, spoilt=second)
        return engine.update(learning_rate=RATE, **options)

    step(0)
    before, found = state_of(engine), {}
    pass_over(engine, world, 1, accumulation=2)
    engine.climb()
    climbed = state_of(engine)
    found["climbed"] = changed(before, climbed)
    distance = sum(
        (climbed[name, "weight"].double() - before[name, "weight"].double()).square().sum()
        for name, kind in before
        if kind == "weight"
    )
    assert 0.5 * CONFIG.sam_rho < distance**0.5 < 4 * CONFIG.sam_rho, "rounding adds to it"
    pass_over(engine, world, 1, accumulation=2)
    assert not engine.update(learning_rate=RATE).was_skipped
    after = state_of(engine)
    found["updated"] = changed(before, after)
    masters = {each.name: each.slots[MASTER] for each in engine.fragments()}
    if world.num_ranks == 1:
        assert all(torch.equal(masters[n].bfloat16(), after[n, "weight"].flatten()) for n in masters)

    assert step(2, discard=True).was_skipped
    found["discarded"] = changed(after, state_of(engine))
    assert step(2, first=torch.inf).was_skipped
    found["first pass not finite"] = changed(after, state_of(engine))
    assert step(2, second=torch.nan).was_skipped
    found["second pass not finite"] = changed(after, state_of(engine))
    return found


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_only_the_update_leaves_a_trace(num_ranks: int) -> None:
    """In bits. The loss of one rank suffices to skip an update."""
    for found in run_ranks(traces_of_a_second_pass, num_ranks=num_ranks):
        assert found == {
            "climbed": {"weight"},
            "updated": {"master", "exp_avg", "exp_avg_sq", "average", "weight"},
            "discarded": set(),
            "first pass not finite": set(),
            "second pass not finite": set(),
        }


class _Engine:
    """A plain model with dropout, whose weights stay where they are."""

    def __init__(self) -> None:
        self.model, self.log = model(), list[float | str]()
        self.model.train()

    def accumulate(self, loss_of: Callable[[torch.nn.Module], torch.Tensor]) -> torch.Tensor:
        self.log.append(loss_of(self.model).item())
        return torch.tensor(self.log[-1])

    def climb(self) -> None:
        self.log.append("climb")


def test_the_second_pass_has_the_draws_of_the_first() -> None:
    """Mixup, dropped branches and dropout; the loss that is reported is that of the first."""
    drawn = replace(JOB.model, dropout=0.3, stochastic_depth=0.5)
    job = replace(
        JOB,
        model=drawn,
        data=replace(JOB.data, mixup=MixupConfig(alpha=0.4)),
        optimizer=replace(JOB.optimizer, sam_rho=0.1),
    )
    engine: Any = _Engine()
    engine.model = build_model(drawn, seed=1).train()
    torch.nn.init.normal_(engine.model.head.weight)
    loss = gradients(job, engine, one_world(), micro_batch=SHARE // 2).accumulate(batch_of())
    first, second, climb, *again = engine.log
    assert (climb, again) == ("climb", [first, second])
    assert first != second
    assert loss.item() == pytest.approx((first + second) / 2)


def test_a_teacher_computes_each_micro_batch_once() -> None:
    """Its images, dropout and weights are the same in both passes, and so is the patch size that a step draws."""
    tokens = TokensConfig(patch_sizes=(4, 8))
    job = replace(JOB, tokens=tokens, optimizer=replace(JOB.optimizer, sam_rho=0.1), teacher=TeacherConfig(weights="w"))
    taught_by, seen = build_model(JOB.model, seed=2).eval().requires_grad_(False), list[torch.Tensor]()
    torch.nn.init.normal_(taught_by.head.weight)
    taught_by.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    engine: Any = _Engine()
    passes = gradients(job, engine, one_world(), micro_batch=SHARE // 2)
    passes.teacher = Teacher(model=taught_by, config=JOB.model, columns=torch.arange(10), sha256="")
    batch = batch_of()
    passes.accumulate(batch)
    assert [len(each) for each in seen] == [SHARE // 2] * 2
    assert torch.equal(torch.cat(seen), batch.images)
    first, second, climb, *again = engine.log
    assert (climb, again) == ("climb", [first, second])
    assert first != second
    passes.accumulate(batch_of(step=6))
    assert len(seen) == 4, "the next step has other images"


def test_runs_are_the_same_on_any_topology_and_after_a_resume(
    digits_url: str, finished_runs: FinishedRuns, tmp_path: Path
) -> None:
    """Ranks and micro-batches change losses to rounding, a continuation in the middle no bit. Each step draws a patch
    size and learns from a teacher, too."""
    more = (
        *("--teacher.weights", str(finished_runs.get(1) / "weights"), "--teacher.share", "0.5"),
        *("--tokens.patch-sizes", "4", "8", "16"),
        *("--optimizer.sam-rho", "0.1", "--ema-decay", "0.9", "--engine.precision", "fp32"),
        *("--data.mixup.alpha", "0.2", "--model.stochastic-depth", "0.2"),
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run_dir, num_ranks, own in ((whole, 1, ()), (parts, 2, ("--micro-batch", "8"))):
        words = pretrain_words(digits_url, run_dir, *more, *own)
        assert run(words, num_ranks=num_ranks, log_dir=tmp_path) == exit_codes.DONE
    expected = losses(whole)
    assert list(losses(parts).values()) == pytest.approx(list(expected.values()), rel=1e-4)
    weights = (whole / "weights" / "model.safetensors").read_bytes()
    for step in range(STEPS // 2 + 1, STEPS + 1):
        shutil.rmtree(whole / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    shutil.rmtree(whole / "weights")
    (whole / "DONE").unlink()
    assert run(pretrain_words(digits_url, whole, *more), num_ranks=1, log_dir=tmp_path) == exit_codes.DONE
    assert losses(whole) == expected
    assert (whole / "weights" / "model.safetensors").read_bytes() == weights

"""A step's gradient is that of its whole share, and all ranks come out of it with the same result."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jobs.recipes.pretrain import digits_smoke
from pipeline.data.batches import COUNT_NAMES, Batch
from pipeline.data.config import MixupConfig
from pipeline.models import build_model
from pipeline.models.loss import classification_loss
from pipeline.training.batch_plan import plan_batch
from pipeline.training.config import TrainingJob
from pipeline.training.engine import UpdateResult
from pipeline.training.ledger import Ledger
from pipeline.training.schedule import learning_rate
from pipeline.training.signals import Signals, StopRequest
from pipeline.training.stopping import Stopping
from pipeline.training.train_step import Gradients, StepResult, TrainStep
from pipeline.training.watch import Watch
from pipeline.world import World
from tests.rigs.processes import one_world, run_ranks

SHARE = 8
BASE = digits_smoke()
JOB = replace(BASE, model=replace(BASE.model, num_classes=10, image_size=16), global_batch=SHARE)


class _Engine:
    """A plain model that gathers gradients, and makes no updates."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.rates = model, list[float]()

    def accumulate(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
        loss = loss_of(self.model)
        torch.autograd.backward(loss)
        return loss.detach()

    def update(self, *, learning_rate: float) -> UpdateResult:
        self.rates.append(learning_rate)
        return UpdateResult(grad_norm=2.0, skipped=False)


class _Stream:
    """Hands out one batch for ever, and has read 3 of everything."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __next__(self) -> Batch:
        return self.batch

    def counts(self) -> dict[str, float]:
        return dict.fromkeys(COUNT_NAMES, 3.0)


def batch_of(step: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return Batch(
        step=step,
        images=torch.randint(0, 256, (SHARE, 16, 16, 3), dtype=torch.uint8, generator=generator),
        labels=torch.randint(0, 10, (SHARE, 1), generator=generator),
        sample_ids=np.arange(SHARE),
        datasets=np.zeros(SHARE, dtype=np.int64),
    )


def model() -> nn.Module:
    """With a head that is not zero: a zero one has no gradient behind it."""
    found = build_model(JOB.model, seed=1)
    with torch.no_grad():
        found.head.weight.normal_(generator=torch.Generator().manual_seed(2))
    return found


def gradients(job: TrainingJob, engine: _Engine, world: World, *, micro_batch: int = 0) -> Gradients:
    plan = plan_batch(
        SHARE * world.num_ranks, micro_batch=micro_batch, num_ranks=world.num_ranks, lanes=SHARE, pairs=True
    )
    return Gradients(job, plan, engine, world)  # type: ignore[arg-type]


@pytest.mark.parametrize("micro_batch", [0, 4, 2])
def test_micro_batches_add_up_to_the_share(micro_batch: int) -> None:
    whole, batch = model(), batch_of()
    expected = classification_loss(whole(batch.images), batch.labels, name="softmax")
    torch.autograd.backward(expected)
    engine = _Engine(model())

    found = gradients(JOB, engine, one_world(), micro_batch=micro_batch).accumulate(batch)

    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    parts = SHARE // (micro_batch or SHARE)
    for name, parameter in engine.model.named_parameters():
        own = whole.get_parameter(name).grad
        assert own is not None
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad / parts, own, atol=1e-5), name


def test_mixup_is_the_same_in_any_micro_batches() -> None:
    job = replace(JOB, data=replace(JOB.data, mixup=MixupConfig(alpha=0.4)))
    batch, found = batch_of(), gradients(job, _Engine(model()), one_world())
    images, targets = found.inputs(batch, slice(0, SHARE))
    halves = [found.inputs(batch, slice(first, first + 4)) for first in (0, 4)]
    assert torch.equal(images, torch.cat([half[0] for half in halves]))
    assert torch.equal(targets, torch.cat([half[1] for half in halves]))
    assert targets.shape == (SHARE, 10)
    assert not torch.equal(images, batch.images)
    plain_images, plain_labels = gradients(JOB, _Engine(model()), one_world()).inputs(batch, slice(0, SHARE))
    assert torch.equal(plain_images, batch.images)
    assert torch.equal(plain_labels, batch.labels)


def one_step(world: World, folder: Path, markers: dict[int, str]) -> tuple[StepResult, float]:
    """A step of this rank, and its own loss; `markers`: the file that asks each rank for something."""
    own = folder / str(world.rank)
    own.mkdir()
    if world.rank in markers:
        (own / markers[world.rank]).touch()
    watch = Watch(signals=Signals(own, watch_markers=True), stopping=Stopping(), ledger=Ledger(own))
    engine, batch = _Engine(model()), batch_of(5 + world.rank)
    stream: Any = _Stream(replace(batch, step=5))
    step = TrainStep(gradients(JOB, engine, world), stream, watch)
    result = step.update(step.next_batch())
    assert engine.rates == [result.rate] == [learning_rate(5, config=JOB.schedule, num_steps=JOB.steps)]
    assert min(watch.ledger.seconds["data_wait"], watch.ledger.seconds["compute"]) > 0
    return result, classification_loss(model()(batch.images), batch.labels, name="softmax").item()


@pytest.mark.parametrize(
    ("markers", "expected"),
    [
        ({}, StopRequest.NOTHING),
        ({1: "SAVE"}, StopRequest.SAVE),
        ({0: "SAVE", 1: "STOP"}, StopRequest.SAVE_AND_EXIT),
    ],
)
def test_ranks_agree_on_the_loss_the_highest_request_and_what_was_read(
    tmp_path: Path, markers: dict[int, str], expected: StopRequest
) -> None:
    (first, one), (second, two) = run_ranks(one_step, tmp_path, markers, num_ranks=2)
    assert first == second
    assert one != two
    assert first.loss == pytest.approx((one + two) / 2, rel=1e-5)
    assert first.request == expected
    assert first.counts == dict.fromkeys(COUNT_NAMES, 6.0)
    assert (first.grad_norm, first.was_skipped) == (2.0, False)

"""A step's gradient is that of its whole share, and all ranks come out of it with the same result."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from jobs.recipes.pretrain import digits_smoke
from pipeline.data.batches import COUNT_NAMES, Batch
from pipeline.data.config import MixupConfig
from pipeline.models import build_model, unfilled_model
from pipeline.models.loss import classification_loss
from pipeline.ranks.rendezvous import join_alone
from pipeline.ranks.streams import HostStreams
from pipeline.ranks.world import World, leave
from pipeline.training.controls import Controls
from pipeline.training.gradients import Gradients
from pipeline.training.reporting.ledger import Ledger
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.schedule import learning_rate
from pipeline.training.step import StepResult, TrainStep
from pipeline.training.watchdog.stopping import Signals, Stopping, StopRequest
from pipeline.training.zero.batch_plan import plan_batch
from pipeline.training.zero.device_batches import DeviceBatches
from pipeline.training.zero.engine import UpdateResult
from tests.rigs.lazy_streams import COPIES, LazyStreams
from tests.rigs.processes import one_world, run_ranks

SHARE = 8
BASE = digits_smoke()
JOB = replace(BASE, model=replace(BASE.model, num_classes=10, image_size=16), global_batch=SHARE)


class _Engine:
    """A plain model that gathers gradients, and makes no updates; `discarded`: which were to be dropped."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.rates, self.discarded = model, list[float](), list[bool]()
        self.decays = list[float]()

    def accumulate(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
        loss = loss_of(self.model)
        torch.autograd.backward(loss)
        return loss.detach()

    def update(self, *, learning_rate: float, ema_decay: float, discard: bool = False) -> UpdateResult:
        self.rates.append(learning_rate)
        self.decays.append(ema_decay)
        self.discarded.append(discard)
        return UpdateResult(grad_norm=2.0, was_discarded=discard)


class _Stream:
    """Hands out one batch for ever, and has read 3 of everything."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.typed_position = batch, SimpleNamespace(next_step=batch.step)
        self.streams, self.num_launched = HostStreams(), 0

    def __next__(self) -> Batch:
        return self.batch

    def counts(self) -> dict[str, float]:
        return dict.fromkeys(COUNT_NAMES, 3.0)

    def launched(self) -> None:
        self.num_launched += 1


def batch_of(step: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return Batch(
        step=step,
        images=torch.randint(0, 256, (SHARE, 16, 16, 3), dtype=torch.uint8, generator=generator),
        labels=torch.randint(0, 10, (SHARE, 1), generator=generator),
        sample_ids=torch.arange(SHARE),
        datasets=torch.zeros(SHARE, dtype=torch.int64),
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


@pytest.mark.parametrize(
    "mixup",
    [
        pytest.param(MixupConfig(alpha=0.4), id="mixup"),
        pytest.param(MixupConfig(cutmix_alpha=1.0), id="CutMix"),
        pytest.param(MixupConfig(alpha=0.8, cutmix_alpha=1.0, binary_targets=True), id="DeiT III's"),
    ],
)
def test_mixup_is_the_same_in_any_micro_batches(mixup: MixupConfig) -> None:
    job = replace(JOB, loss="sigmoid", data=replace(JOB.data, mixup=mixup))
    batch, found = batch_of(), gradients(job, _Engine(model()), one_world())
    images, targets = found.inputs(batch, slice(0, SHARE))
    halves = [found.inputs(batch, slice(first, first + 4)) for first in (0, 4)]
    assert torch.equal(images, torch.cat([half[0] for half in halves]))
    assert torch.equal(targets, torch.cat([half[1] for half in halves]))
    assert targets.shape == (SHARE, 10)
    assert not torch.equal(images, batch.images)
    assert set(targets.flatten().tolist()) == {0.0, 1.0} or not mixup.binary_targets
    plain_images, plain_labels = gradients(JOB, _Engine(model()), one_world()).inputs(batch, slice(0, SHARE))
    assert torch.equal(plain_images, batch.images)
    assert torch.equal(plain_labels, batch.labels)


def factors(passes: Gradients, step: int, chosen: slice) -> torch.Tensor:
    """Of the branches of some images."""
    found, _ = passes.branches(step, chosen)
    assert found is not None
    return found


def test_branches_left_out_are_the_same_on_any_ranks_and_micro_batches() -> None:
    job = replace(JOB, model=replace(JOB.model, stochastic_depth=0.5))
    whole = factors(gradients(job, _Engine(model()), one_world()), 5, slice(0, SHARE))
    assert whole.shape == (job.model.size.depth, SHARE, 2)
    axial = replace(job, model=replace(job.model, attention="axial", pooling="average"))
    twice = factors(gradients(axial, _Engine(model()), one_world()), 5, slice(0, SHARE))
    assert twice.shape == (2 * job.model.size.depth, SHARE, 2)
    two = replace(one_world(), num_ranks=2, rank=1)
    second = gradients(job, _Engine(model()), two)
    whole_of_two = factors(gradients(job, _Engine(model()), one_world()), 5, slice(SHARE, 2 * SHARE))
    parts = [factors(second, 5, slice(first, first + 4)) for first in (0, 4)]
    assert torch.equal(torch.cat(parts, dim=1), whole_of_two)
    assert not torch.equal(whole, whole_of_two)
    assert gradients(JOB, _Engine(model()), one_world()).branches(5, slice(0, SHARE)) == (None, ())


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_weights_of_labels_reach_the_loss(alpha: float) -> None:
    """Mixed like other targets, and the same in any micro-batches."""
    job = replace(JOB, loss="sigmoid", data=replace(JOB.data, mixup=MixupConfig(alpha=alpha), label_weights=True))
    batch = replace(batch_of(), labels=torch.tensor([[1, 3]] * SHARE), weights=torch.tensor([[0.5, 0.25]] * SHARE))
    found = gradients(job, _Engine(model()), one_world())
    images, targets = found.inputs(batch, slice(0, SHARE))
    own = torch.zeros(10).index_put((torch.tensor([1, 3]),), torch.tensor([0.5, 0.25]))
    assert torch.equal(targets, own.expand(SHARE, 10)), "partners have the same targets"
    halves = [found.inputs(batch, slice(first, first + 4)) for first in (0, 4)]
    assert torch.equal(targets, torch.cat([half[1] for half in halves]))
    expected = classification_loss(model()(images), targets, name="sigmoid").item()
    assert found.accumulate(batch).item() == pytest.approx(expected, rel=1e-6)


def one_step(world: World, folder: Path, markers: dict[int, str]) -> tuple[StepResult, float]:
    """A step of this rank, and its own loss; `markers`: the file that asks each rank for something."""
    own = folder / str(world.rank)
    own.mkdir()
    if world.rank in markers:
        (own / markers[world.rank]).touch()
    controls = Controls(signals=Signals(own, watch_markers=True), stopping=Stopping(), ledger=Ledger(own))
    engine, batch = _Engine(model()), batch_of(5 + world.rank)
    stream: Any = _Stream(replace(batch, step=5))
    job = replace(JOB, ema_decay=0.9, ema_warmup=True)
    step = TrainStep(gradients(job, engine, world), stream, controls)
    result = step.read(step.launch(step.next_batch()))
    assert stream.num_launched == 1
    assert engine.rates == [result.rate] == [learning_rate(5, config=JOB.schedule, num_steps=JOB.steps)]
    assert engine.decays == [0.4375], "7 / 16: the sixth update of an average that warms up"
    assert min(controls.ledger.seconds["data_wait"], controls.ledger.seconds["compute"]) > 0
    return result, classification_loss(model()(batch.images), batch.labels, name="softmax").item()


def judged_step(world: World, folder: Path, most: float) -> tuple[list[float], list[bool], StepResult]:
    """What this rank's step asks about before its update, and what it makes of the answer."""
    own = folder / str(world.rank)
    own.mkdir()
    controls = Controls(signals=Signals(own, watch_markers=True), stopping=Stopping(), ledger=Ledger(own))
    engine, asked = _Engine(model()), list[float]()
    stream: Any = _Stream(replace(batch_of(5 + world.rank), step=5))

    def is_bad(loss: float) -> bool:
        asked.append(loss)
        return loss > most

    step = TrainStep(gradients(JOB, engine, world), stream, controls, discard=is_bad)
    result = step.read(step.launch(step.next_batch()))
    return asked, engine.discarded, result


@pytest.mark.parametrize(("most", "expected"), [(0.0, True), (100.0, False)])
def test_ranks_judge_the_mean_loss_before_the_update(tmp_path: Path, most: float, expected: bool) -> None:
    first, second = run_ranks(judged_step, tmp_path, most, num_ranks=2)
    assert first == second
    asked, discarded, result = first
    assert (asked, discarded) == ([result.loss], [expected])
    assert result.was_skipped is expected


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


META = torch.device("meta")


class _MetaStreams(LazyStreams):
    """Of a device without values: whatever would read one raises."""

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=META)


class _Endless(_Stream):
    """One batch after another, all of them ready."""

    is_ready = True

    def __next__(self) -> Batch:
        batch, self.batch = self.batch, replace(self.batch, step=self.batch.step + 1)
        return batch


def launched_on_meta(job: TrainingJob, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LazyStreams, list[str]]:
    """Four steps, launched one after the other without reading any; what the ranks exchanged."""
    folder.mkdir()
    exchanged: list[str] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: exchanged.append(str(sums.device)))
    controls = Controls(signals=Signals(folder, watch_markers=True), stopping=Stopping(), ledger=Ledger(folder))
    world, streams = replace(one_world(), device=META), _MetaStreams()
    with META:
        engine = _Engine(unfilled_model(job.model))
    endless: Any = _Endless(batch_of(5))
    step = TrainStep(gradients(job, engine, world, micro_batch=4), DeviceBatches(endless, streams), controls)
    for _ in range(4):
        step.launch(step.next_batch())
    return streams, exchanged


MIXED = replace(JOB.data, mixup=MixupConfig(alpha=0.4))
CUT = replace(JOB.data, mixup=MixupConfig(alpha=0.4, cutmix_alpha=1.0))
PIXELS = replace(JOB.model, masked_patches=True, masked_target="pixels", num_classes=3 * JOB.model.stride**2)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(replace(JOB, model=replace(JOB.model, dropout=0.1), label_smoothing=0.1), id="dropout, smoothing"),
        pytest.param(replace(JOB, data=MIXED), id="mixup"),
        pytest.param(replace(JOB, data=CUT), id="mixup and CutMix"),
        pytest.param(replace(JOB, model=PIXELS), id="pixels of masked patches"),
        pytest.param(replace(JOB, loss="sigmoid"), id="sigmoid"),
        pytest.param(replace(JOB, loss="sigmoid", data=MIXED), id="sigmoid and mixup"),
    ],
)
def test_between_two_launches_the_host_reads_nothing_from_the_device(
    tmp_path: Path, job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches a step. The only events that the host waits for are those of copies two requests ago."""
    streams, exchanged = launched_on_meta(job, tmp_path / "run", monkeypatch)
    assert exchanged == ["meta"] * 4
    waits = [int(said.split()[-1]) for said in streams.log if said.startswith("the host waits")]
    copies = [int(said.split()[-1]) for said in streams.log if said.startswith("copies records")]
    assert len(copies) == 5, "the batch after the last step is on its way"
    assert waits == copies[:3]


def test_an_outcome_is_read_while_the_next_steps_batch_is_already_there(tmp_path: Path) -> None:
    """Copy k + 1 is launched before step k's update, and so before its outcome is read, one step later."""
    streams = LazyStreams(eager=COPIES)
    controls = Controls(signals=Signals(tmp_path, watch_markers=True), stopping=Stopping(), ledger=Ledger(tmp_path))
    engine, endless = _Engine(model()), cast(Any, _Endless(batch_of(5)))
    join_alone()
    try:
        step = TrainStep(gradients(JOB, engine, one_world()), DeviceBatches(endless, streams), controls)
        first = step.launch(step.next_batch())
        num_copies = streams.log.count("copies copies")
        second = step.launch(step.next_batch())
        streams.log.clear()
        assert (step.read(first).step, step.read(second).step) == (6, 7)
    finally:
        leave()
    assert num_copies == 4, "images and labels of two batches: one is used, one has been copied ahead"
    assert [said.split()[0] for said in streams.log] == ["the", "the"], "reading launches nothing"

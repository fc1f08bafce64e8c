"""One training step: the next batch, forward and backward, what the ranks add up, the update.

A step is launched first and read later: the host does not wait for a loss before it launches the next step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pipeline.data.batches import COUNT_NAMES, Batch
from pipeline.data.mixup import mix_images, mix_targets, mix_weights
from pipeline.models.loss import classification_loss, targets_of, weighted_targets
from pipeline.models.masked import NOT_PREDICTED, masked_loss, mean_colours
from pipeline.ranks.world import World
from pipeline.training.controls import Watch
from pipeline.training.reporting.norms import Norms, PositionView
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.schedule import learning_rate
from pipeline.training.step_draws import branch_factors, patch_sources
from pipeline.training.step_sums import GRAD_NORM, LOSS, StepSums, SumSource
from pipeline.training.watchdog.signals import StopRequest
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.device_batches import Batches
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.gpu_streams import ReadBack
from pipeline.training.zero.step_times import StepTimes
from shards.hashing import DROPOUT


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A step that all ranks have launched, `step` (from 1 on), with this learning rate; `sums` are on their way to
    the host, and so is rank 0's `similarity`, if it is due. An update is skipped if its gradient is not finite."""

    step: int
    rate: float
    was_skipped: bool
    sums: ReadBack
    similarity: ReadBack | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The outcome of a step, the same on every rank.

    `loss` is the mean over the global batch, `grad_norm` the gradient's norm before clipping, `rate` the learning rate,
    `request` the highest stop request of any rank. `counts`: what all ranks have read, by name of COUNT_NAMES. `sums`:
    all sums over ranks, by name. `norms`: of gradients and parameters, by group, if they are due. `similarity`: rank
    0's levels of the position embeddings' similarities after the update, if they are due.
    """

    step: int
    loss: float
    grad_norm: float
    was_skipped: bool
    rate: float
    request: StopRequest
    counts: dict[str, float]
    sums: dict[str, float]
    norms: dict[str, float] = field(default_factory=dict)
    similarity: torch.Tensor | None = None


class Gradients:
    """Forward and backward passes over a rank's share of a batch. `times`: those of the step that they belong to."""

    def __init__(
        self, job: TrainingJob, plan: BatchPlan, engine: Engine, world: World, *, times: StepTimes | None = None
    ) -> None:
        self.job, self.plan, self.engine, self.world = job, plan, engine, world
        self.times = times or StepTimes()

    def accumulate(self, batch: Batch) -> torch.Tensor:
        """The gradient of all micro-batches, left in the engine; their mean loss, still on the device."""
        losses = []
        for micro in range(self.plan.accumulation):
            chosen = slice(micro * self.plan.micro_batch, (micro + 1) * self.plan.micro_batch)
            with self.times.part("to_device"):
                images, targets = self.inputs(batch, chosen)
                more: tuple[torch.Tensor | None, ...] = self.branches(batch.step, chosen)
                if self.job.model.masked_patches:
                    sources, targets = self.masked(batch.step, chosen, images)
                    more = (*(more or (None,)), sources)
            torch.manual_seed(DROPOUT.key(self.job.seed, batch.step, micro, self.world.rank) >> 1)

            def loss_of(
                model: nn.Module,
                x: tuple[torch.Tensor | None, ...] = (images, *more),
                y: torch.Tensor = targets,
            ) -> torch.Tensor:
                if self.job.model.masked_patches:
                    return masked_loss(model(*x), y)
                return classification_loss(model(*x), y, name=self.job.loss, smoothing=self.job.label_smoothing)

            with self.times.part("forward_backward"):
                losses.append(self.engine.accumulate(loss_of))
        return torch.stack(losses).mean()

    def inputs(self, batch: Batch, chosen: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """A micro-batch on the device: uint8 images with their labels, or targets of weighted labels; or what mixup
        makes of both."""
        device, alpha = self.world.device, self.job.data.mixup.alpha
        images = batch.images[chosen].to(device, non_blocking=True)
        labels = batch.labels[chosen].to(device, non_blocking=True)
        shares = None if batch.weights is None else batch.weights[chosen].to(device, non_blocking=True)
        num_classes, loss = self.job.model.num_classes, self.job.loss
        if not alpha:
            return images, labels if shares is None else weighted_targets(labels, shares, num_classes, name=loss)
        weights = self._on_device(mix_weights(batch.step, self._places(chosen), seed=self.job.seed, alpha=alpha))
        if shares is None:
            targets = targets_of(labels, num_classes, name=loss)
        else:
            targets = weighted_targets(labels, shares, num_classes, name=loss)
        return mix_images(images, weights), mix_targets(targets, weights)

    def branches(self, step: int, chosen: slice) -> tuple[torch.Tensor, ...]:
        """The model's second input with stochastic depth: the factors of its branches; empty without."""
        model = self.job.model
        if not model.stochastic_depth:
            return ()
        rate, depth = model.stochastic_depth, model.size.depth
        factors = branch_factors(step, self._places(chosen), seed=self.job.seed, rate=rate, depth=depth)
        return (self._on_device(factors),)

    def masked(self, step: int, chosen: slice, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The place from which the model takes each patch, and the mean colours that it is to predict: int64[n, N]
        each."""
        model = self.job.model
        num_patches = model.grid[0] * model.grid[1]
        sources, chosen_patches = patch_sources(step, self._places(chosen), seed=self.job.seed, num_patches=num_patches)
        colours = mean_colours(images, side=model.stride)
        targets = torch.where(self._on_device(chosen_patches), colours, NOT_PREDICTED)
        return self._on_device(sources), targets

    def _places(self, chosen: slice) -> NDArray[np.int64]:
        """Places in the global batch."""
        return np.arange(chosen.start, chosen.stop, dtype=np.int64) + self.world.rank * self.plan.rank_batch

    def _on_device(self, drawn: NDArray[np.generic]) -> torch.Tensor:
        """What the host has drawn; the host does not wait for its copy."""
        values, device = torch.from_numpy(drawn), self.world.device
        return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


class TrainStep:
    """Takes batches from a stream and updates the engine with them. `sources`: what else the ranks add up. `discard`:
    whether the update of a loss is not to be made; if it is given, the host waits for every loss before its update.
    `norms`, `view`: what is looked at in some steps only."""

    def __init__(
        self,
        gradients: Gradients,
        stream: Batches,
        watch: Watch,
        *,
        sources: Sequence[SumSource] = (),
        discard: Callable[[float], bool] | None = None,
        norms: Norms | None = None,
        view: PositionView | None = None,
    ) -> None:
        self.gradients, self.stream, self.watch, self.discard = gradients, stream, watch, discard
        self.norms, self.view = norms, view
        own = (
            SumSource(names=tuple(map(_name_of, StopRequest)), read=self._request),
            SumSource(names=COUNT_NAMES, read=stream.counts),
        )
        self.step_sums = StepSums((*own, *sources), device=gradients.world.device, streams=stream.streams)

    def next_batch(self) -> Batch:
        """The batch of the next step. WaitGivenUpError if this rank, alone, is asked to stop while it waits."""
        self.watch.step_begins(self.stream.typed_position.next_step + 1)
        with self.watch.waiting("data_wait", "waiting for data"):
            return next(self.stream)

    def first_images(self, batch: Batch, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Up to `most` images of a batch as the model gets them, augmented and mixed, and their labels."""
        chosen = slice(0, min(most, self.gradients.plan.micro_batch))
        return self.gradients.inputs(batch, chosen)[0], batch.labels[chosen]

    def launch(self, batch: Batch) -> Launched:
        """Launches one optimiser step on all ranks. Collective."""
        gradients, job = self.gradients, self.gradients.job
        rate = learning_rate(batch.step, config=job.schedule, num_steps=job.steps)
        with self.watch.ledger.time("compute"):
            loss = gradients.accumulate(batch)
            norms = self._due_norms(batch.step + 1)
            sums = self.step_sums.reduced(loss, more=norms.squares() if norms else None)
            is_bad = self.discard is not None and self.discard(float(sums[0]) / gradients.world.num_ranks)
            self.stream.launched()  # before the update, for which DeepSpeed makes the host wait
            with self.watch.times.part("optimizer"):
                update = gradients.engine.update(learning_rate=rate, discard=is_bad)
            own = self.step_sums.read_back(sums, grad_norm=update.grad_norm)
            similarity = self.view.launched() if self.view and self.view.is_due(batch.step + 1) else None
        return Launched(step=batch.step + 1, rate=rate, was_skipped=update.skipped, sums=own, similarity=similarity)

    def read(self, launched: Launched) -> StepResult:
        """The outcome of a launched step, which the host waits for."""
        with self.watch.ledger.time("compute"):
            norms = self._due_norms(launched.step)
            sums = self.step_sums.by_name(launched.sums, more=norms.names if norms else ())
        return StepResult(
            step=launched.step,
            loss=self._loss(sums),
            grad_norm=sums[GRAD_NORM],
            was_skipped=launched.was_skipped,
            rate=launched.rate,
            request=max(request for request in StopRequest if sums[_name_of(request)] > 0),
            counts={name: sums[name] for name in COUNT_NAMES},
            sums=sums,
            norms=norms.values(sums) if norms else {},
            similarity=launched.similarity.arrived() if launched.similarity else None,
        )

    def _due_norms(self, step: int) -> Norms | None:
        return self.norms if self.norms and self.norms.is_due(step) else None

    def _loss(self, sums: Mapping[str, float]) -> float:
        return sums[LOSS] / self.gradients.world.num_ranks

    def _request(self) -> dict[str, float]:
        own = self.watch.request()
        return {_name_of(request): float(own == request) for request in StopRequest}


def _name_of(request: StopRequest) -> str:
    return f"request/{request.name.lower()}"

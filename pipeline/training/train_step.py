"""One training step: the next batch, forward and backward, what the ranks agree on, the update."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pipeline.data.batches import COUNT_NAMES, Batch
from pipeline.data.mixup import mix_images, mix_targets, mix_weights
from pipeline.data.stream import BatchStream
from pipeline.models.loss import classification_loss, targets_of
from pipeline.training.batch_plan import BatchPlan
from pipeline.training.config import TrainingJob
from pipeline.training.engine import Engine
from pipeline.training.schedule import learning_rate
from pipeline.training.signals import StopRequest
from pipeline.training.watch import Watch
from pipeline.world import World
from shards.key_purposes import DROPOUT


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The outcome of a step, the same on every rank.

    `loss` is the mean over the global batch, `grad_norm` the gradient's norm before clipping, `rate` the learning rate,
    `request` the highest stop request of any rank. `counts`: what all ranks have read, by name of COUNT_NAMES. An
    update is skipped if its gradient is not finite.
    """

    loss: float
    grad_norm: float
    was_skipped: bool
    rate: float
    request: StopRequest
    counts: dict[str, float]


class Gradients:
    """Forward and backward passes over a rank's share of a batch."""

    def __init__(self, job: TrainingJob, plan: BatchPlan, engine: Engine, world: World) -> None:
        self.job, self.plan, self.engine, self.world = job, plan, engine, world

    def accumulate(self, batch: Batch) -> torch.Tensor:
        """The gradient of all micro-batches, left in the engine; their mean loss, still on the device."""
        losses = []
        for micro in range(self.plan.accumulation):
            chosen = slice(micro * self.plan.micro_batch, (micro + 1) * self.plan.micro_batch)
            images, targets = self.inputs(batch, chosen)
            torch.manual_seed(DROPOUT.key(self.job.seed, batch.step, micro, self.world.rank) >> 1)

            def loss_of(model: nn.Module, x: torch.Tensor = images, y: torch.Tensor = targets) -> torch.Tensor:
                return classification_loss(model(x), y, name=self.job.loss, smoothing=self.job.label_smoothing)

            losses.append(self.engine.accumulate(loss_of))
        return torch.stack(losses).mean()

    def inputs(self, batch: Batch, chosen: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """A micro-batch on the device: uint8 images with their labels, or what mixup makes of both."""
        device, alpha = self.world.device, self.job.data.mixup.alpha
        images = batch.images[chosen].to(device, non_blocking=True)
        labels = batch.labels[chosen].to(device, non_blocking=True)
        if not alpha:
            return images, labels
        places = np.arange(chosen.start, chosen.stop, dtype=np.int64) + self.world.rank * self.plan.rank_batch
        weights = torch.from_numpy(mix_weights(batch.step, places, seed=self.job.seed, alpha=alpha))
        weights = weights.to(device, non_blocking=True)
        targets = targets_of(labels, self.job.model.num_classes, name=self.job.loss)
        return mix_images(images, weights), mix_targets(targets, weights)


class TrainStep:
    """Takes batches from a stream and updates the engine with them."""

    def __init__(self, gradients: Gradients, stream: BatchStream, watch: Watch) -> None:
        self.gradients, self.stream, self.watch = gradients, stream, watch

    def next_batch(self) -> Batch:
        """The batch of the next step. WaitGivenUpError if this rank, alone, is asked to stop while it waits."""
        self.watch.stopping.step_begins()
        with self.watch.waiting("data_wait", "waiting for data"):
            return next(self.stream)

    def first_images(self, batch: Batch, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Up to `most` images of a batch as the model gets them, augmented and mixed, and their labels."""
        chosen = slice(0, min(most, self.gradients.plan.micro_batch))
        return self.gradients.inputs(batch, chosen)[0], batch.labels[chosen]

    def update(self, batch: Batch) -> StepResult:
        """One optimiser step on all ranks. Collective."""
        gradients, job = self.gradients, self.gradients.job
        rate = learning_rate(batch.step, config=job.schedule, num_steps=job.steps)
        with self.watch.ledger.time("compute"):
            summary = self._reduced(gradients.accumulate(batch))
            result = gradients.engine.update(learning_rate=rate)
            loss_sum, *sums = summary.tolist()
        return StepResult(
            loss=loss_sum / gradients.world.num_ranks,
            grad_norm=result.grad_norm,
            was_skipped=result.skipped,
            rate=rate,
            request=max(request for request in StopRequest if sums[request] > 0),
            counts=dict(zip(COUNT_NAMES, sums[len(StopRequest) :], strict=True)),
        )

    def _reduced(self, loss: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks, float64 on the device: losses, ranks with each request, counts of what was read.

        One reduction carries everything, and nothing waits for it before the update has started.
        """
        own, counts = self.watch.request(), self.stream.counts()
        requests = [float(own == request) for request in StopRequest]
        values = [0.0, *requests, *(counts[name] for name in COUNT_NAMES)]
        summary = torch.tensor(values, dtype=torch.float64).to(self.gradients.world.device, non_blocking=True)
        summary[0] = loss
        dist.all_reduce(summary)
        return summary

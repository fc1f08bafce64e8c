"""The training loop: read, forward and backward, agree, update, write down, save."""

import hashlib
import json
import logging
import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pipeline.collectives import all_agree
from pipeline.data.batches import COUNT_NAMES, Batch, TrainBatches
from pipeline.data.mixup import mix_images, mix_targets, mix_weights
from pipeline.evaluation.scores import Scores, evaluate
from pipeline.models.loss import classification_loss, targets_of
from pipeline.training.batch_plan import BatchPlan
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.config import TrainingJob
from pipeline.training.engine import Engine, UpdateResult
from pipeline.training.fragments import Position
from pipeline.training.ledger import Ledger
from pipeline.training.manifest import Manifest
from pipeline.training.reporter import NUM_IMAGES, Reporter
from pipeline.training.schedule import learning_rate
from pipeline.training.signals import Signals, StopRequest
from pipeline.training.stopping import Stopping, WaitGivenUpError
from pipeline.world import World
from shards.dataset import Dataset
from shards.errors import WillNotSucceedError
from shards.key_purposes import DROPOUT

log = logging.getLogger(__name__)
_WHERE = ("run_dir", "device", "threads")
_MOST_FAILED_SAVES = 3


class LoopEnd(Enum):
    """Why the loop ended."""

    ALL_STEPS = "all steps done"
    ASKED = "asked to save and exit"
    NOTHING_SAVED = "asked to exit before there was anything to save"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loop works with. `reporter` is None on all ranks but the first."""

    job: TrainingJob
    world: World
    plan: BatchPlan
    engine: Engine
    batches: TrainBatches
    checkpoints: Checkpoints
    signals: Signals
    stopping: Stopping
    ledger: Ledger
    reporter: Reporter | None
    held_out: Dataset | None
    labels: tuple[str, ...]
    data_state: dict[str, Any]
    record: dict[str, Any]


class Loop:
    """Runs the steps that a run still has to do. `num_updates` are those the optimiser really made (non-finite ones are
    skipped), `saved` is the newest committed checkpoint."""

    def __init__(self, parts: Parts, *, resumed_from: Manifest | None) -> None:
        self.parts, self.saved = parts, resumed_from
        self.step = self._start = resumed_from.id.step if resumed_from else 0
        self.num_updates = resumed_from.num_updates if resumed_from else 0
        self._skipped_in_a_row = self._failed_saves = 0
        self._is_unscored = False  # an evaluation that was due was given up
        self._traffic: dict[str, float] = {}
        if self.saved:
            parts.stopping.saved(self.saved.id.step)

    def run(self) -> LoopEnd:
        """All steps up to the job's last, or until the ranks agree to stop. A checkpoint is committed at either end."""
        parts, job = self.parts, self.parts.job
        stream = parts.batches(self.step)
        with parts.reporter or nullcontext() as reporter:
            while self.step < job.steps:
                parts.stopping.step_begins()
                try:
                    with parts.ledger.time("data_wait"), parts.stopping.giving_up("waiting for data"):
                        batch = next(stream)
                except WaitGivenUpError:
                    return self._stop_here()
                if reporter and self.step == self._start:
                    reporter.shows(*self._shown(batch))
                with parts.ledger.time("compute"):
                    loss, request, result = self._update(batch)
                self.step += 1
                self._guard(loss, result)
                scores = self._held_out_scores()
                request = StopRequest.SAVE_AND_EXIT if self._is_unscored else request
                if reporter:
                    reporter.step(
                        self.step,
                        loss=loss,
                        grad_norm=result.grad_norm,
                        rate=self._rate(self.step - 1),
                        traffic=self._traffic,
                        scores=scores,
                    )
                is_due = request > StopRequest.NOTHING or self.step % job.checkpoint.every_steps == 0
                if is_due and self._skipped_in_a_row == 0:  # a model that may be lost must not replace a good one
                    self.save()
                # Exit code 75 promises a committed checkpoint: where there is none, the next step tries again.
                if (
                    request == StopRequest.SAVE_AND_EXIT
                    and self._is_saved()
                    and (self.step < job.steps or self._is_unscored)
                ):
                    return LoopEnd.ASKED
        if self._start == job.steps and not self._score_the_last():
            return LoopEnd.ASKED
        parts.stopping.finishing()
        if self._skipped_in_a_row:
            raise WillNotSucceedError(self._hopeless())
        while not self._is_saved():
            self.save()
        return LoopEnd.ALL_STEPS

    def _stop_here(self) -> LoopEnd:
        """The end of a rank that is alone and waits for data which does not come: what is done so far is saved."""
        is_new = self.step > (self.saved.id.step if self.saved else 0)
        if is_new and self._skipped_in_a_row == 0:
            self.save()
        return LoopEnd.ASKED if self._is_saved() else LoopEnd.NOTHING_SAVED

    def _is_saved(self) -> bool:
        return self.saved is not None and self.saved.id.step == self.step

    def save(self) -> None:
        """A checkpoint of this moment; three failures in a row end the run, one does not."""
        parts = self.parts
        position = Position(
            step=self.step, num_updates=self.num_updates, num_samples=self.step * parts.job.global_batch
        )
        with parts.ledger.time("checkpoint"), parts.stopping.writing():
            manifest = parts.checkpoints.save(
                parts.engine.fragments(),
                position=position,
                shapes=parts.engine.shapes,
                data_state=parts.data_state,
                record=parts.record | {"seconds": parts.ledger.record()},
            )
            if manifest:
                parts.checkpoints.retire(parts.job.checkpoint)
        self._failed_saves = 0 if manifest else self._failed_saves + 1
        if self._failed_saves >= _MOST_FAILED_SAVES:
            raise RuntimeError(f"{self._failed_saves} checkpoints in a row could not be written; see the log above")
        if manifest:
            self.saved = manifest
            parts.stopping.saved(manifest.id.step)
            parts.signals.saved()
            if parts.world.is_first:
                parts.ledger.append(parts.checkpoints.run_dir, step=self.step, attempt=parts.checkpoints.attempt.token)
            if parts.reporter:
                parts.reporter.saved(self.step)

    def _update(self, batch: Batch) -> tuple[float, StopRequest, UpdateResult]:
        """One optimiser step: (mean loss over the global batch, the ranks' highest request, what the engine did)."""
        parts, plan = self.parts, self.parts.plan
        losses = []
        for micro in range(plan.accumulation):
            chosen = slice(micro * plan.micro_batch, (micro + 1) * plan.micro_batch)
            images, targets = self._inputs(batch, chosen)
            torch.manual_seed(DROPOUT.key(parts.job.seed, self.step, micro, parts.world.rank) >> 1)

            def loss_of(model: nn.Module, x: torch.Tensor = images, y: torch.Tensor = targets) -> torch.Tensor:
                return classification_loss(model(x), y, name=parts.job.loss, smoothing=parts.job.label_smoothing)

            losses.append(parts.engine.accumulate(loss_of))
        # One reduction carries the loss, the ranks' requests and what they read; the update's own synchronisation waits
        # for it.
        requests = [float(parts.signals.request() == request) for request in StopRequest]
        counts = parts.batches.counts()
        own = [0.0, *requests, *(counts[name] for name in COUNT_NAMES)]
        summary = torch.tensor(own, dtype=torch.float64).to(parts.world.device, non_blocking=True)
        summary[0] = torch.stack(losses).mean()
        dist.all_reduce(summary)
        result = parts.engine.update(learning_rate=self._rate(self.step))
        loss_sum, *sums = summary.tolist()
        request = max(request for request in StopRequest if sums[request] > 0)
        self._traffic = dict(zip(COUNT_NAMES, sums[len(StopRequest) :], strict=True))
        return loss_sum / parts.world.num_ranks, request, result

    def _inputs(self, batch: Batch, chosen: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """A micro-batch on the device: uint8 images with their labels, or what mixup makes of both."""
        parts, alpha = self.parts, self.parts.job.data.mixup.alpha
        images = batch.images[chosen].to(parts.world.device, non_blocking=True)
        labels = batch.labels[chosen].to(parts.world.device, non_blocking=True)
        if not alpha:
            return images, labels
        places = np.arange(chosen.start, chosen.stop, dtype=np.int64) + parts.world.rank * parts.plan.rank_batch
        weights = torch.from_numpy(mix_weights(batch.step, places, seed=parts.job.seed, alpha=alpha))
        weights = weights.to(parts.world.device, non_blocking=True)
        targets = targets_of(labels, parts.job.model.num_classes, name=parts.job.loss)
        return mix_images(images, weights), mix_targets(targets, weights)

    def _rate(self, step: int) -> float:
        return learning_rate(step, config=self.parts.job.schedule, num_steps=self.parts.job.steps)

    def _guard(self, loss: float, result: UpdateResult) -> None:
        """Counts updates that were skipped, or made from a loss that is not finite; too many in a row is the end."""
        self.num_updates += not result.skipped
        if not result.skipped and math.isfinite(loss):
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        if self.parts.world.is_first:
            what = "skipped, its gradient is not finite" if result.skipped else "made from a loss that is not finite"
            log.warning("step %d: the update was %s (loss %s)", self.step, what, loss)
        if self._skipped_in_a_row > self.parts.job.max_skipped_updates:
            raise WillNotSucceedError(self._hopeless())

    def _hopeless(self) -> str:
        saved = self.saved
        last_good = f"the last good checkpoint is of step {saved.id.step}" if saved else "no checkpoint is there"
        return (
            f"{self._skipped_in_a_row} updates in a row, up to step {self.step}, had a non-finite gradient or loss; "
            f"{last_good}; lower --schedule.learning-rate or set --clip-norm, and run the command again"
        )

    def _shown(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
        """The first images of a batch as the model gets them, augmented and mixed, their labels and all names."""
        chosen = slice(0, min(NUM_IMAGES, self.parts.plan.micro_batch))
        return self._inputs(batch, chosen)[0], batch.labels[chosen], self.parts.labels

    def _held_out_scores(self) -> Scores | None:
        """Accuracy and loss on the held-out split where they are due at this step."""
        parts, every = self.parts, self.parts.job.evaluation.every_steps
        due = self.step == parts.job.steps or (every > 0 and self.step % every == 0)
        if parts.held_out is None or not due:
            return None
        try:
            with parts.ledger.time("evaluation"), parts.stopping.giving_up("evaluating"):
                parts.engine.train(False)
                scores = evaluate(
                    parts.engine.module,
                    parts.held_out,
                    parts.job.evaluation,
                    labels=parts.labels,
                    loss=parts.job.loss,
                    world=parts.world,
                    before_batch=self._give_up_if_asked,
                )
        except WaitGivenUpError:
            self._is_unscored = True
            return None
        finally:
            parts.engine.train(True)
        return scores

    def _give_up_if_asked(self) -> None:
        """Raises WaitGivenUpError on all ranks where one is asked to exit. Collective."""
        is_asked = self.parts.signals.request() == StopRequest.SAVE_AND_EXIT
        if not all_agree(not is_asked, device=self.parts.world.device):
            raise WaitGivenUpError("evaluating")

    def _score_the_last(self) -> bool:
        """The scores of a run whose last step is saved, but whose last evaluation was given up. False: again."""
        scores = self._held_out_scores()
        if scores and self.parts.reporter:
            self.parts.reporter.scored_late(self.step, scores)
        return not self._is_unscored


def describe(job: TrainingJob, world: World, *, is_compiled: bool) -> dict[str, Any]:
    """What a checkpoint records: what must stay, the topology and the engine (bitwise equality needs the same), the
    job's hash. `is_compiled`: what engine.compile "auto" came to."""
    topology = {"num_ranks": world.num_ranks, "num_threads": world.num_threads, "device": world.device.type}
    engine = {"zero_stage": job.engine.zero_stage, "precision": job.engine.precision, "micro_batch": job.micro_batch}
    engine |= {"is_compiled": is_compiled, "activation_checkpointing": job.engine.activation_checkpointing}
    kept: dict[str, Any] = {"model": asdict(job.model), "loss": job.loss, "optimizer": job.optimizer.name}
    kept |= {"ema_decay": job.ema_decay, "job": asdict(job)}
    return kept | {"topology": topology, "engine": engine, "job_sha256": fingerprint(job)}


def fingerprint(job: TrainingJob) -> str:
    """sha256 of everything that the job says but where it runs."""
    fields = {name: value for name, value in asdict(job).items() if name not in _WHERE}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

"""Saves a run while it trains, and reports it; repeated failures end the run. Also says what is saved of a job."""

import hashlib
import json
import logging
import time
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from pipeline.checkpoints.commit import draft_manifest
from pipeline.checkpoints.manifest import AVERAGE, MASTER, CheckpointId, CheckpointManifest, SavedJob
from pipeline.checkpoints.saves import NAMES, Saved, Saves, lay_out
from pipeline.data.position import StreamPosition
from pipeline.models.attention import kernel_in_use
from pipeline.models.weights.safetensors_head import head_of
from pipeline.ranks.world import World
from pipeline.training.controls import Controls
from pipeline.training.reporting.reporter import Reporter
from pipeline.training.settings.job import TrainingJob, reduced_in, with_buckets_of
from pipeline.training.step import StepResult, SumSource
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.layers import is_trained
from pipeline.training.zero.optimizer import moments_of
from shards.errors import TransientError


def saved_job(job: TrainingJob) -> SavedJob:
    """What is saved of a job whose precision is decided."""
    fields = json.loads(json.dumps(asdict(job)))
    return SavedJob(
        model=fields["model"],
        loss=job.loss,
        optimizer=job.optimizer.name,
        ema_decay=job.ema_decay,
        precision=job.engine.precision,
        job=fields,
    )


log = logging.getLogger(__name__)
_WHERE = ("run_dir", "device", "threads")
_LIBRARIES = ("patchline", "torch", "deepspeed", "numpy", "simplejpeg", "opencv-python-headless")


class Saving:
    """Everything about saves that the rest of training sees.

    `saved` is the newest committed checkpoint, at first the one that the run resumed from. `record` is that of every
    checkpoint. `reporter` is None on all ranks but the first. A save ends at a later step, unless it is waited for:
    `sources` belong into the sums of every step, and `advance` takes them.
    """

    def __init__(
        self,
        job: TrainingJob,
        engine: Engine,
        saves: Saves,
        *,
        saved: CheckpointManifest | None,
        record: dict[str, Any],
        controls: Controls,
        reporter: Reporter | None,
    ) -> None:
        self.job, self.engine, self.saves, self.record = job, engine, saves, record
        self.checkpoints, self.controls, self.reporter = saves.checkpoints, controls, reporter
        self.saved = saved.id if saved else None
        self.sources = (SumSource(names=NAMES, read=saves.flags),)
        self.stall_seconds = self.commit_seconds = 0.0  # of the newest commit: training waited; until all knew
        self._waited_seconds = 0.0  # of the newest save, so far
        self.num_failed = 0
        self._num_in_a_row = self._skipped_for = 0
        engine.before_update = saves.writer.order_update
        if saved:
            controls.stopping.saved(saved.id.step)

    @property
    def saved_step(self) -> int | None:
        """The step of the newest committed checkpoint."""
        return self.saved.step if self.saved else None

    def save(
        self,
        position: StreamPosition,
        *,
        num_updates: int,
        losses: tuple[float, ...] = (),
        may_be_skipped: bool = True,
    ) -> None:
        """Begins a checkpoint of this moment, after these losses. All ranks call it at the same step, when all outcomes
        are read.

        A save that is still running is waited for, or this one is skipped (`checkpoint.when_busy`, if it may be). One
        failure is logged; `checkpoint.max_failed` in a row end the run.
        """
        step, saves = position.next_step, self.saves
        if may_be_skipped and saves.is_under_way and self.job.checkpoint.when_busy == "skip":
            self._skip(step)
            return
        began = time.monotonic()
        with self.controls.writing():
            self._ended(saves.wait())
            draft = draft_manifest(
                CheckpointId(step=step, attempt=self.checkpoints.attempt.token),
                shapes=self.engine.shapes,
                position=position,
                num_updates=num_updates,
                job=saved_job(self.job),
                losses=losses,
                record=self.record | {"seconds": self.controls.ledger.record()},
            )
            self.controls.signals.saving()
            saves.begin(lay_out(self.engine.fragments()), draft)
            self._waited_seconds = time.monotonic() - began
        if saves.writer.is_waited_for:
            self.wait()

    def advance(self, result: StepResult) -> None:
        """Takes the sums of a step: a save may have ended."""
        self._ended(self.saves.advance(result.sums))

    def wait(self) -> None:
        """Returns once no save is running. Collective if one is."""
        if self.saves.is_under_way:
            began = time.monotonic()
            with self.controls.writing():
                ended = self.saves.wait()
            self._waited_seconds += time.monotonic() - began
            self._ended(ended)

    def last_step(self) -> int | None:
        """The step of the newest checkpoint, once no save is running. Collective if one is."""
        self.wait()
        return self.saved_step

    def settle(self) -> None:
        """Waits, before the process ends, until nothing is left to write or to delete."""
        self.wait()
        with self.controls.writing():
            self.saves.settle()

    def manifest(self) -> CheckpointManifest:
        """The manifest of the newest committed checkpoint, as it is in the store."""
        if self.saved is None:
            raise AssertionError("a checkpoint is committed")
        return self.checkpoints.manifest(self.saved)

    def _skip(self, step: int) -> None:
        """Says so, once for each save that is waited for: a request to save is repeated at every step."""
        if self.reporter and self._skipped_for != self.saves.step:
            log.warning("checkpoint of step %d skipped: that of step %d is still being written", step, self.saves.step)
        self._skipped_for = self.saves.step

    def _ended(self, ended: Saved | None) -> None:
        if ended is None:
            return
        step = ended.id.step
        if ended.fault:
            self._failed(step, ended.fault)
            return
        self.saved, self._num_in_a_row = ended.id, 0
        self.stall_seconds, self.commit_seconds = self._waited_seconds, ended.seconds
        self.controls.saved(step)
        if self.reporter:
            self.controls.ledger.append(self.checkpoints.run_dir, step=step, attempt=ended.id.attempt)
            seconds = {"stall_seconds": self.stall_seconds, "commit_seconds": self.commit_seconds}
            self.reporter.saved(step, {f"checkpoint/{name}": value for name, value in seconds.items()})

    def _failed(self, step: int, fault: str) -> None:
        if self.checkpoints.world.is_first:  # all ranks know why
            log.error("checkpoint of step %d was not committed: %s", step, fault)
        self.controls.signals.not_saved()
        self.num_failed += 1
        self._num_in_a_row += 1
        if self.reporter:
            self.reporter.not_saved(self.num_failed)
        if self._num_in_a_row >= self.job.checkpoint.max_failed:
            where, count = self.checkpoints.store.url, self._num_in_a_row
            raise TransientError(f"{count} checkpoints in a row could not be written to {where}: {fault}")


def state_bytes(job: TrainingJob, engine: Engine) -> int:
    """Bytes of this rank's file once the optimiser has made its moments, which it does at the first step."""
    average = (AVERAGE,) if job.ema_decay else ()
    shapes: dict[str, tuple[int, ...]] = {}
    for each in engine.fragments():
        moments = (*moments_of(each.name, job.optimizer), *average) if is_trained(each.name, job.optimizer) else ()
        shapes |= {f"{slot}:{each.name}": (each.length,) for slot in (MASTER, *moments)}
    return head_of(shapes).num_bytes


def describe(job: TrainingJob, world: World, *, plan: BatchPlan, is_compiled: bool) -> dict[str, Any]:
    """A checkpoint's record: the topology and the engine (bitwise equality needs the same), the job's hash, versions.
    `is_compiled`: whether the model's blocks are compiled."""
    engine = with_buckets_of(job.engine, on_cpu=world.device.type == "cpu")
    return {
        "topology": {"num_ranks": world.num_ranks, "num_threads": world.num_threads, "device": world.device.type},
        "engine": {
            "zero_stage": engine.zero_stage,
            "precision": engine.precision,
            "reduce_precision": reduced_in(engine),
            "reduce_bucket": engine.reduce_bucket,
            "micro_batch": plan.micro_batch,
            "is_compiled": is_compiled,
            "activation_checkpointing": engine.activation_checkpointing,
            **({"attention": kernel} if (kernel := kernel_in_use()) else {}),
            "float8": engine.float8,
        },
        "job_sha256": fingerprint(job),
        "versions": {name: version(name) for name in _LIBRARIES},
    }


def fingerprint(job: TrainingJob) -> str:
    """sha256 of everything in the job except for where it runs."""
    fields = {name: value for name, value in asdict(job).items() if name not in _WHERE}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

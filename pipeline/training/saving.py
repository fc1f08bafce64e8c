"""Saves a run while it trains, and reports it; repeated failures end the run."""

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from pipeline.data.position import StreamPosition
from pipeline.training.checkpoint import Checkpoints
from pipeline.training.config import TrainingJob
from pipeline.training.engine import Engine
from pipeline.training.manifest import Manifest
from pipeline.training.reporter import Reporter
from pipeline.training.saved_job import saved_job
from pipeline.training.watch import Watch
from pipeline.world import World
from shards.errors import TransientError

_WHERE = ("run_dir", "device", "threads")
_LIBRARIES = ("patchline", "torch", "deepspeed", "numpy", "simplejpeg", "opencv-python-headless")
_MOST_FAILED_SAVES = 3


class Saving:
    """`saved` is the newest committed checkpoint, at first the one that the run resumed from. `record` is that of every
    checkpoint. `reporter` is None on all ranks but the first."""

    def __init__(
        self,
        job: TrainingJob,
        engine: Engine,
        checkpoints: Checkpoints,
        *,
        saved: Manifest | None,
        record: dict[str, Any],
        watch: Watch,
        reporter: Reporter | None,
    ) -> None:
        self.job, self.engine, self.checkpoints, self.saved, self.record = job, engine, checkpoints, saved, record
        self.watch, self.reporter = watch, reporter
        self._num_failed = 0
        if saved:
            watch.stopping.saved(saved.id.step)

    @property
    def saved_step(self) -> int | None:
        """Of the newest committed checkpoint."""
        return self.saved.id.step if self.saved else None

    def save(self, position: StreamPosition, *, num_updates: int) -> None:
        """A checkpoint of this moment. Collective. One failure is logged; three in a row end the run."""
        with self.watch.writing():
            manifest = self.checkpoints.save(
                self.engine.fragments(),
                shapes=self.engine.shapes,
                position=position,
                num_updates=num_updates,
                job=saved_job(self.job),
                record=self.record | {"seconds": self.watch.ledger.record()},
            )
            if manifest:
                self.checkpoints.retire(self.job.checkpoint)
        self._num_failed = 0 if manifest else self._num_failed + 1
        if self._num_failed >= _MOST_FAILED_SAVES:
            where, fault = self.checkpoints.store.url, self.checkpoints.fault
            raise TransientError(f"{self._num_failed} checkpoints in a row could not be written to {where}: {fault}")
        if manifest:
            self._committed(manifest)

    def _committed(self, manifest: Manifest) -> None:
        self.saved, step = manifest, manifest.id.step
        self.watch.saved(step)
        if self.reporter:
            self.watch.ledger.append(self.checkpoints.run_dir, step=step, attempt=self.checkpoints.attempt.token)
            self.reporter.saved(step)


def describe(job: TrainingJob, world: World, *, is_compiled: bool) -> dict[str, Any]:
    """A checkpoint's record: the topology and the engine (bitwise equality needs the same), the job's hash, versions.
    `is_compiled`: whether the model's blocks are compiled."""
    return {
        "topology": {"num_ranks": world.num_ranks, "num_threads": world.num_threads, "device": world.device.type},
        "engine": {
            "zero_stage": job.engine.zero_stage,
            "precision": job.engine.precision,
            "micro_batch": job.micro_batch,
            "is_compiled": is_compiled,
            "activation_checkpointing": job.engine.activation_checkpointing,
        },
        "job_sha256": fingerprint(job),
        "versions": {name: version(name) for name in _LIBRARIES},
    }


def fingerprint(job: TrainingJob) -> str:
    """sha256 of everything in the job except for where it runs."""
    fields = {name: value for name, value in asdict(job).items() if name not in _WHERE}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

"""Saves a run while it trains, and decides what a checkpoint records: the job, the versions, and what its bits depend
on.

A run that resumes on another machine reads the same samples and computes the same steps, but may add numbers in another
order. The record says where a checkpoint was computed and with which kernels, and the log says what has changed since.
If `checkpoint.max_failed` saves in a row fail, the run ends.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints.commit import draft_manifest
from pipeline.checkpoints.manifest import AVERAGE, MASTER, CheckpointId, CheckpointManifest, SavedJob
from pipeline.checkpoints.saves import NAMES, Saved, Saves, lay_out
from pipeline.data.position import StreamPosition
from pipeline.models.attention import kernel_in_use
from pipeline.models.weights.safetensors_head import head_of
from pipeline.ranks.world import World
from pipeline.training.controls import Controls
from pipeline.training.gradients import Gradients
from pipeline.training.reporting.reporter import Reporter
from pipeline.training.settings.job import EngineConfig, TrainingJob, reduced_in, with_buckets_of
from pipeline.training.step import StepResult, SumSource
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.optimizer import is_trained, moments_of
from shards.errors import TransientError

log = logging.getLogger(__name__)
_WHERE = ("run_dir", "device", "threads")
_LIBRARIES = ("patchline", "torch", "deepspeed", "numpy", "simplejpeg", "opencv-python-headless")
BITS = "bits"  # key in a checkpoint's record
Bits = dict[str, Any]
_CPUINFO, _NVIDIA = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/version")
_WORDS = {
    "device": "device",
    "driver": "driver",
    "torch": "PyTorch",
    "num_ranks": "ranks",
    "ranks_per_node": "ranks per node",
    "num_threads": "threads per rank",
    "deterministic": "engine.deterministic",
    "deepspeed": "DeepSpeed",
    "zero_stage": "engine.zero_stage",
    "precision": "engine.precision",
    "reduce_precision": "engine.reduce_precision",
    "reduce_bucket": "engine.reduce_bucket",
    "micro_batch": "images per pass",
    "is_compiled": "compiled blocks",
    "is_tuned": "tuned blocks",
    "is_selective": "selective recomputation in compiled blocks",
    "attention": "engine.attention",
    "float8": "engine.float8",
    "fused_mlp": "engine.fused_mlp",
}
_GPU_ONLY = {"ranks_per_node", "deterministic", "is_tuned"}  # they change no bits on a CPU


def saved_job(job: TrainingJob) -> SavedJob:
    """Returns the job as a checkpoint records it. The job's precision must be decided."""
    fields = json.loads(json.dumps(asdict(job)))
    return SavedJob(
        model=fields["model"],
        loss=job.loss,
        optimizer=job.optimizer.name,
        ema_decay=job.ema_decay,
        precision=job.engine.precision,
        job=fields,
    )


class Saving:
    """The saves of a run, as the rest of training sees them.

    `saved`: the newest committed checkpoint, at first the one that the run resumed from. `record`: the record in every
    checkpoint. `reporter`: None on all ranks but the first. A save usually ends at a later step. The ranks learn of its
    end from the sums of that step: `sources` must be part of every step's sums, and `advance` takes the result.
    """

    def __init__(
        self,
        gradients: Gradients,
        saves: Saves,
        controls: Controls,
        *,
        saved: CheckpointManifest | None,
        record: dict[str, Any],
        reporter: Reporter | None,
    ) -> None:
        self.job, self.engine, self.saves, self.record = gradients.job, gradients.engine, saves, record
        self.checkpoints, self.controls, self.reporter = saves.checkpoints, controls, reporter
        self.saved = saved.id if saved else None
        self.sources = (SumSource(names=NAMES, read=saves.flags),)
        self.stall_seconds = self.commit_seconds = 0.0  # as measured for the newest commit
        self._waited_seconds = 0.0  # how long training has waited for the newest save
        self.num_failed = 0
        self._num_in_a_row = self._skipped_for = 0
        self.engine.before_update = saves.writer.order_update
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
        """Begins a checkpoint of the present state. All ranks call it at the same step, after all outcomes are read.
        `losses`: the latest losses, for the guard.

        If another save is still running, it is waited for, or this one is skipped if `may_be_skipped` and
        `checkpoint.when_busy` say so. A failure is logged; `checkpoint.max_failed` failures in a row end the run.
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
        """Learns from the sums of a step whether a save has ended."""
        self._ended(self.saves.advance(result.sums))

    def wait(self) -> None:
        """Waits until no save is running. Collective if a save is running."""
        if self.saves.is_under_way:
            began = time.monotonic()
            with self.controls.writing():
                ended = self.saves.wait()
            self._waited_seconds += time.monotonic() - began
            self._ended(ended)

    def last_step(self) -> int | None:
        """Waits until no save is running, and returns the step of the newest checkpoint. Collective if a save is
        running."""
        self.wait()
        return self.saved_step

    def settle(self) -> None:
        """Waits until nothing is left to write or to delete. Called before the process ends."""
        self.wait()
        with self.controls.writing():
            self.saves.settle()

    def manifest(self) -> CheckpointManifest:
        """Reads the manifest of the newest committed checkpoint from the store."""
        if self.saved is None:
            raise AssertionError("a checkpoint is committed")
        return self.checkpoints.manifest(self.saved)

    def _skip(self, step: int) -> None:
        """Logs that a save is skipped. Logs it only once per running save, because a request to save is repeated at
        every step."""
        if self.reporter and self._skipped_for != self.saves.step:
            log.warning("checkpoint of step %d skipped: that of step %d is still being written", step, self.saves.step)
        self._skipped_for = self.saves.step

    def _ended(self, ended: Saved | None) -> None:
        if ended is None:
            return
        step = ended.id.step
        if ended.fault:
            self._failed(step, ended.fault)
            if ended.is_deleted:
                self.controls.signals.save_again()
            return
        self.saved, self._num_in_a_row = ended.id, 0
        self.stall_seconds, self.commit_seconds = self._waited_seconds, ended.seconds
        self.controls.saved(step)
        if self.reporter:
            self.controls.ledger.append(
                self.checkpoints.run_dir,
                step=step,
                attempt=ended.id.attempt,
                commit_seconds=round(ended.seconds, 3),
            )
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
    """Returns the size in bytes of this rank's file in checkpoints after the first step, in which the optimiser creates
    its moments."""
    average = (AVERAGE,) if job.ema_decay else ()
    shapes: dict[str, tuple[int, ...]] = {}
    for each in engine.fragments():
        moments = (*moments_of(each.name, job.optimizer), *average) if is_trained(each.name, job.optimizer) else ()
        shapes |= {f"{slot}:{each.name}": (each.length,) for slot in (MASTER, *moments)}
    return head_of(shapes).num_bytes


def record_of(gradients: Gradients, *, is_compiled: bool, resumed: CheckpointManifest | None) -> dict[str, Any]:
    """Returns the record in this run's checkpoints. Rank 0 logs what it says about bits. `resumed`: the checkpoint from
    which the run resumes, if there is one."""
    job, world = gradients.job, gradients.world
    record = describe(job, world, plan=gradients.plan, is_compiled=is_compiled)
    return record | {BITS: say_bits(world, job.engine, record, resumed=resumed.record if resumed else {})}


def describe(job: TrainingJob, world: World, *, plan: BatchPlan, is_compiled: bool) -> dict[str, Any]:
    """Returns a checkpoint's record: the topology and the engine, which must be the same for equal bits, the job's
    hash, and the versions of libraries. `is_compiled`: whether the model's blocks are compiled."""
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
            "is_tuned": engine.compile == "tuned",
            "activation_checkpointing": engine.activation_checkpointing,
            "is_selective": is_compiled and engine.activation_checkpointing == "selective",
            **({"attention": kernel} if (kernel := kernel_in_use()) else {}),
            "float8": engine.float8,
            "fused_mlp": engine.fused_mlp,
        },
        "job_sha256": fingerprint(job),
        "versions": {name: version(name) for name in _LIBRARIES},
    }


def fingerprint(job: TrainingJob) -> str:
    """Returns the sha256 of everything in the job except for where it runs."""
    fields = {name: value for name, value in asdict(job).items() if name not in _WHERE}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def say_bits(world: World, config: EngineConfig, record: Mapping[str, Any], *, resumed: Mapping[str, Any]) -> Bits:
    """Returns what a checkpoint records about bits. Rank 0 logs whether a resumed run will have equal bits, and, if
    this run resumes from a checkpoint that was computed differently, that it will not have the bits of an unbroken run.
    `record`: the rest of the record in this run's checkpoints. `resumed`: the record of the checkpoint from which it
    resumes; empty if there is none."""
    bits = bits_of(world, deterministic=config.deterministic)
    now = {**record, BITS: bits}
    lines = words_of_choice(world, deterministic=config.deterministic), differences_in_bits(resumed, now)
    for line in filter(None, lines if world.is_first else ()):
        log.info("%s", line)
    return bits


def bits_of(world: World, *, deterministic: bool) -> Bits:
    """Returns what the bits of a run depend on, as seen by this rank."""
    is_gpu = world.device.type == "cuda"
    return {
        "device_type": world.device.type,
        "device": torch.cuda.get_device_name(world.device) if is_gpu else _cpu_model(_text(_CPUINFO)),
        "driver": _text(_NVIDIA).partition("\n")[0].strip() if is_gpu else "",
        "torch": torch.__version__,
        "num_ranks": world.num_ranks,
        "ranks_per_node": world.num_local_ranks,
        "num_threads": world.num_threads,
        "deterministic": deterministic,
    }


def words_of_choice(world: World, *, deterministic: bool) -> str:
    """Returns a line on whether a resumed run will have equal bits on this device; empty on a CPU, whose kernels are
    deterministic."""
    if world.device.type != "cuda":
        return ""
    if deterministic:
        return "deterministic kernels: PyTorch promises the bits of an unbroken run on this GPU model and node layout"
    return "a resumed run will equal an unbroken one to rounding; --engine.deterministic asks PyTorch for equal bits"


def differences_in_bits(record: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns a line that says why this run's bits will differ from those of an unbroken run; empty if no reason is
    known. `record`: the record of the checkpoint from which it resumes. `now`: the record of its next checkpoints."""
    before, after = _facts(record), _facts(now)
    is_gpu = after.get("device_type") == "cuda"
    changed = [
        f"{words} {before[name]}, now {after[name]}"
        for name, words in _WORDS.items()
        if name in before and name in after and before[name] != after[name] and (is_gpu or name not in _GPU_ONLY)
    ]
    return f"this run will equal an unbroken one to rounding at best: {'; '.join(changed)}" if changed else ""


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns everything in a record that bits depend on."""
    bits, engine, versions = (_mapping(record.get(name)) for name in (BITS, "engine", "versions"))
    return engine | bits | {name: versions[name] for name in ("deepspeed",) if name in versions}


def _mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _cpu_model(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""

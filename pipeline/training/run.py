"""One training run from its start to its DONE marker. From `train` a reader goes down, once."""

import hashlib
import json
import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.data.batches import Share, TrainBatches, check_memory, data_state, sample_order
from pipeline.data.quarantine import Quarantine
from pipeline.models.vit import ViT
from pipeline.models.weights import save_weights
from pipeline.training.batch_plan import BatchPlan, plan_batch
from pipeline.training.checkpoint import Checkpoints, list_committed, read_tensor
from pipeline.training.config import TrainingJob
from pipeline.training.engine import Engine
from pipeline.training.ledger import Ledger
from pipeline.training.loop import Loop, LoopEnd, Parts, describe
from pipeline.training.manifest import Manifest
from pipeline.training.metrics import Metrics
from pipeline.training.signals import Signals
from pipeline.training.start import fill_from_checkpoint, fill_from_weights, refuse_changes, starting_weights
from pipeline.world import World, enter, leave
from shards.dataset import Dataset, open_dataset
from shards.errors import UserError
from shards.store import Store, open_store

log = logging.getLogger(__name__)
_LIBRARIES = ("patchline", "torch", "deepspeed", "numpy", "simplejpeg", "opencv-python-headless")


class Ending(Enum):
    """How a run ended: DONE, or stopped with a committed checkpoint, to be continued."""

    DONE = "done"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A job whose every value is known to fit: classes filled in, datasets opened, batch planned."""

    job: TrainingJob
    run_dir: Path
    dataset: Dataset
    held_out: Dataset | None
    plan: BatchPlan
    data_state: dict[str, Any]


def prepare(job: TrainingJob, world: World) -> Prepared:
    """Checks a job against its data and its ranks before anything is started. Raises UserError."""
    for flag, value in (("--run-dir", job.run_dir), ("--data.url", job.data.url)):
        if not value:
            raise UserError(f"{flag} is missing: give the {'run directory' if 'run' in flag else 'dataset'} as {flag}")
    plan = plan_batch(job.global_batch, micro_batch=job.micro_batch, num_ranks=world.num_ranks, lanes=job.data.lanes)
    dataset = open_dataset(job.data.url)
    held_out = open_dataset(job.evaluation.url) if job.evaluation.url else None
    job = replace(job, model=replace(job.model, num_classes=_num_classes(job, dataset, held_out)))
    sample_order(dataset, job.data, seed=job.seed)
    check_memory(
        dataset,
        job.data,
        global_batch=job.global_batch,
        num_ranks=world.num_ranks,
        num_local_ranks=world.num_local_ranks,
    )
    if job.initial.weights and not list_committed(_checkpoint_store(job)):
        starting_weights(job)
    state = data_state(dataset, job.data, seed=job.seed, global_batch=job.global_batch)
    return Prepared(job=job, run_dir=Path(job.run_dir), dataset=dataset, held_out=held_out, plan=plan, data_state=state)


def train(prepared: Prepared, world: World) -> Ending:
    """Runs a prepared job, from its newest checkpoint where it has one, to its end or until it is asked to stop."""
    done = prepared.run_dir / "DONE"
    if is_done(prepared.run_dir, steps=prepared.job.steps):
        if world.is_first:
            log.info("%s is done: %s", prepared.run_dir, done.read_text().strip())
        return Ending.DONE
    enter(world)
    with ExitStack() as stack:
        stack.callback(leave)
        signals = stack.enter_context(Signals(prepared.run_dir, watch_markers=world.is_first))
        return _train(prepared, world, signals, stack)


def is_done(run_dir: Path, *, steps: int) -> bool:
    """True where a DONE marker is there for these steps and the weights it vouches for are the ones that lie there."""
    try:
        marker = json.loads((run_dir / "DONE").read_text())
        weights = (run_dir / "weights" / "model.safetensors").read_bytes()
    except (OSError, ValueError):
        return False
    return bool(marker["step"] >= steps and marker["weights_sha256"] == hashlib.sha256(weights).hexdigest())


def _train(prepared: Prepared, world: World, signals: Signals, stack: ExitStack) -> Ending:
    job, run_dir, ledger = prepared.job, prepared.run_dir, Ledger()
    with ledger.time("startup"):
        checkpoints, manifest = Checkpoints.start(_checkpoint_store(job), world, run_dir=run_dir)
        engine = _start_engine(prepared, world, checkpoints, manifest)
        step = manifest.id.step if manifest else 0
        metrics = Metrics(run_dir, step=step) if world.is_first else None
        if metrics:
            stack.callback(metrics.close)
        batches = TrainBatches(
            prepared.dataset,
            replace(job.data, num_threads=job.data.num_threads or world.num_threads),
            seed=job.seed,
            image_size=job.model.image_size,
            share=Share(global_batch=job.global_batch, rank=world.rank, num_ranks=world.num_ranks),
            quarantine=Quarantine(run_dir / "quarantine.jsonl", max_share=job.data.max_quarantined),
        )
        stack.callback(batches.close)
    parts = Parts(
        job=job,
        world=world,
        plan=prepared.plan,
        engine=engine,
        checkpoints=checkpoints,
        signals=signals,
        ledger=ledger,
        metrics=metrics,
        held_out=prepared.held_out,
        data_state=prepared.data_state,
        record=describe(job, world) | {"versions": {name: version(name) for name in _LIBRARIES}},
    )
    loop = Loop(parts, step=step, num_updates=manifest.num_updates if manifest else 0)
    try:
        end = loop.run(batches(step))
    except UserError as error:  # what started well is no mistake any more: storage that fails in mid-run is retried
        raise ConnectionError(f"after {loop.step} steps: {error}") from error
    if end is LoopEnd.ASKED:
        if world.is_first:
            log.info("stopped at step %d with a committed checkpoint; the same command continues it", loop.step)
        dist.barrier()
        return Ending.STOPPED
    if world.is_first:
        _finish(prepared, checkpoints)
    dist.barrier()
    return Ending.DONE


def _start_engine(prepared: Prepared, world: World, checkpoints: Checkpoints, manifest: Manifest | None) -> Engine:
    """The starts, in this order: 1. the run's own newest checkpoint, 2. initial weights, 3. scratch."""
    job = prepared.job
    weights = None
    if manifest:
        refuse_changes(manifest, data_state=prepared.data_state, model=job.model, run_dir=job.run_dir)
    else:
        weights = starting_weights(job)
    engine = Engine(
        ViT(job.model),
        config=job.engine,
        plan=prepared.plan,
        optimizer=job.optimizer,
        clip_norm=job.clip_norm,
    )
    if manifest:
        fill_from_checkpoint(engine, checkpoints, manifest)
    elif weights:
        fill_from_weights(engine, weights)
    if world.is_first:
        origin = f"checkpoint {manifest.id.folder}" if manifest else job.initial.weights or f"scratch, seed {job.seed}"
        plan = prepared.plan
        log.info(
            "%s from %s: %d ranks x %d threads on %s, ZeRO-%d, %s, batch %d = %d x %d x %d ranks",
            job.run_dir,
            origin,
            world.num_ranks,
            world.num_threads,
            world.device.type,
            job.engine.zero_stage,
            job.engine.precision,
            plan.global_batch,
            plan.micro_batch,
            plan.accumulation,
            plan.num_ranks,
        )
    return engine


def _finish(prepared: Prepared, checkpoints: Checkpoints) -> None:
    """Weights out of the final checkpoint (any ZeRO stage), then the DONE marker."""
    manifest = checkpoints.newest()
    folder = prepared.run_dir / "weights"
    save_weights(
        folder,
        config=prepared.job.model,
        labels=prepared.dataset.label_names,
        tensor=lambda name: read_tensor(checkpoints.store, manifest, name),
    )
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    marker = {"step": manifest.id.step, "checkpoint": manifest.id.folder, "weights_sha256": digest}
    waiting = prepared.run_dir / "DONE.part"
    waiting.write_text(json.dumps(marker) + "\n")
    waiting.replace(prepared.run_dir / "DONE")
    log.info("done: %d steps, weights in %s", manifest.id.step, folder)


def _checkpoint_store(job: TrainingJob) -> Store:
    return open_store(job.checkpoint.url or str(Path(job.run_dir) / "checkpoints"))


def _num_classes(job: TrainingJob, dataset: Dataset, held_out: Dataset | None) -> int:
    """The model's classes: as many as the dataset has where the job leaves it open; never fewer."""
    wanted = job.model.num_classes or dataset.num_classes
    for data in (dataset, held_out):
        if data is not None and data.num_classes > wanted:
            raise UserError(
                f"{data.url} has {data.num_classes} classes, the model has {wanted}; "
                f"set --model.num-classes {data.num_classes}, or 0 to take the dataset's"
            )
    return wanted

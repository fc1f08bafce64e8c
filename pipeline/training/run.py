"""One training run from its start to its DONE marker. From `train` a reader goes down, once."""

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.collectives import broadcast_json
from pipeline.data.batches import TrainBatches
from pipeline.data.config import Share
from pipeline.data.evaluation import label_map
from pipeline.data.quarantine import Quarantine
from pipeline.data.training_data import TrainingData, check_memory, data_state, open_training_data
from pipeline.models.weights import TensorByName, save_weights
from pipeline.training.batch_plan import BatchPlan, plan_batch
from pipeline.training.checkpoint import Checkpoints, list_committed, read_tensor
from pipeline.training.config import TrainingJob, scaled_by_rate
from pipeline.training.engine import Engine
from pipeline.training.ledger import Ledger
from pipeline.training.loop import Loop, LoopEnd, Parts, describe
from pipeline.training.manifest import Manifest
from pipeline.training.reporter import open_reporter
from pipeline.training.signals import Signals
from pipeline.training.start import (
    SavedJob,
    all_will_compile,
    fill_from_checkpoint,
    fill_from_weights,
    refuse_changes,
    saved_job,
    starting_model,
    starting_weights,
    will_compile,
)
from pipeline.training.summary import Opening, closing_words, num_parameters
from pipeline.training.zero_state import AVERAGE, MASTER
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
    data: TrainingData
    held_out: Dataset | None
    plan: BatchPlan
    data_state: dict[str, Any]
    most_read_ahead_bytes: int  # by all ranks of this host
    is_compiled: bool


def prepare(job: TrainingJob, world: World) -> Prepared:
    """Checks a job against its data and its ranks before anything is started. Raises UserError."""
    if not job.run_dir:
        raise UserError("--run-dir is missing: give the run directory as --run-dir")
    if not (job.data.url or job.data.mix):
        raise UserError(
            "--data.url is missing: give the dataset as --data.url, or several as --data.mix URL WEIGHT URL WEIGHT ..."
        )
    plan = plan_batch(
        job.global_batch,
        micro_batch=job.micro_batch,
        num_ranks=world.num_ranks,
        lanes=job.data.lanes,
        pairs=job.data.mixup.alpha > 0,
    )
    data = open_training_data(job.data)
    held_out = open_dataset(job.evaluation.url) if job.evaluation.url else None
    job = replace(job, model=replace(job.model, num_classes=_num_classes(job, data, held_out)))
    orders = data.orders(job.data, seed=job.seed)
    most_read_ahead_bytes = check_memory(
        data,
        job.data,
        orders,
        global_batch=job.global_batch,
        num_ranks=world.num_ranks,
        num_local_ranks=world.num_local_ranks,
    )
    stop = Path(job.run_dir) / "STOP"
    if stop.exists():
        raise UserError(f"{stop} is there: someone wants the run to rest; delete it to continue")
    if job.initial.weights and not list_committed(_checkpoint_store(job)):
        starting_weights(job)
    state = data_state(data, job.data, seed=job.seed, global_batch=job.global_batch)
    return Prepared(
        job=job,
        run_dir=Path(job.run_dir),
        data=data,
        held_out=held_out,
        plan=plan,
        data_state=state,
        most_read_ahead_bytes=most_read_ahead_bytes,
        is_compiled=will_compile(job.engine, world.device),
    )


def train(prepared: Prepared, world: World, *, on_start: Callable[[], None]) -> Ending:
    """Runs a prepared job, from its newest checkpoint where it has one, to its end or until it is asked to stop.

    `on_start` is called on rank 0 once nothing speaks against the start any more (the job's record is written there).
    """
    enter(world)
    with ExitStack() as stack:
        stack.callback(leave)
        signals = stack.enter_context(Signals(prepared.run_dir, watch_markers=world.is_first))
        marker = broadcast_json(read_done(prepared.run_dir) if world.is_first else None, device=world.device)
        if marker:
            _refuse_changes(prepared, SavedJob(**marker["job"]))
            if marker["job"]["step"] == prepared.job.steps:
                if world.is_first:
                    log.info("%s is done already: %d steps", prepared.run_dir, prepared.job.steps)
                return Ending.DONE
        prepared = replace(prepared, is_compiled=all_will_compile(prepared.is_compiled, world))
        ending = _train(prepared, world, signals, stack, on_start=on_start)
        dist.barrier()
        signals.over()
        return ending


def read_done(run_dir: Path) -> dict[str, Any] | None:
    """The DONE marker, where the weights that it vouches for are the ones that lie there; else None."""
    try:
        marker: dict[str, Any] = json.loads((run_dir / "DONE").read_text())
        digest = _sha256(run_dir / "weights" / "model.safetensors")
        SavedJob(**marker["job"])
        return marker if marker["weights_sha256"] == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _train(
    prepared: Prepared, world: World, signals: Signals, stack: ExitStack, *, on_start: Callable[[], None]
) -> Ending:
    job, run_dir, ledger = prepared.job, prepared.run_dir, Ledger(prepared.run_dir)

    def accept(found: Manifest | None) -> None:
        if found:
            _refuse_changes(prepared, saved_job(found))
        if world.is_first:
            on_start()

    with ledger.time("startup"):
        checkpoints, manifest = Checkpoints.start(
            _checkpoint_store(job),
            world,
            run_dir=run_dir,
            accept=accept,
        )
        weights = None if manifest else starting_weights(job)
        engine = _start_engine(prepared, world, checkpoints, manifest, weights)
        step = manifest.id.step if manifest else 0
        reporter = open_reporter(job, ledger, prepared.data, step=step) if world.is_first else None
        if reporter:
            stack.callback(reporter.metrics.close)
        batches = TrainBatches(
            prepared.data,
            replace(job.data, num_threads=job.data.num_threads or world.num_threads),
            seed=job.seed,
            image_size=job.model.image_size,
            share=Share(global_batch=job.global_batch, rank=world.rank, num_ranks=world.num_ranks),
            quarantine=Quarantine(run_dir / "quarantine.jsonl", max_share=job.data.max_quarantined),
            pin_memory=world.device.type == "cuda",
        )
        stack.callback(batches.close)
    parts = Parts(
        job=job,
        world=world,
        plan=prepared.plan,
        engine=engine,
        batches=batches,
        checkpoints=checkpoints,
        signals=signals,
        ledger=ledger,
        reporter=reporter,
        held_out=prepared.held_out,
        labels=prepared.data.label_names,
        data_state=prepared.data_state,
        record=describe(job, world, is_compiled=prepared.is_compiled)
        | {"versions": {name: version(name) for name in _LIBRARIES}},
    )
    loop = Loop(parts, resumed_from=manifest)
    try:
        end = loop.run()
        if end is LoopEnd.ALL_STEPS:
            checkpoints.refuse_if_overtaken()
            if world.is_first and loop.saved:
                _finish(prepared, checkpoints.store, loop.saved, ledger)
    except UserError as error:  # what started well is no mistake any more: storage that fails in mid-run is retried
        raise ConnectionError(f"after {loop.step} steps: {error}") from error
    if end is LoopEnd.ASKED and world.is_first:
        how = f"delete {run_dir / 'STOP'}, then the" if (run_dir / "STOP").exists() else "the"
        log.info("stopped at step %d with a committed checkpoint; %s same command continues it", loop.step, how)
    return Ending.DONE if end is LoopEnd.ALL_STEPS else Ending.STOPPED


def _refuse_changes(prepared: Prepared, saved: SavedJob) -> None:
    refuse_changes(saved, data_state=prepared.data_state, job=prepared.job)


def _start_engine(
    prepared: Prepared, world: World, checkpoints: Checkpoints, manifest: Manifest | None, weights: TensorByName | None
) -> Engine:
    """The starts, in this order: 1. the run's own newest checkpoint, 2. initial weights, 3. scratch."""
    job, plan = prepared.job, prepared.plan
    engine = Engine(
        starting_model(job, is_compiled=prepared.is_compiled),
        config=job.engine,
        plan=plan,
        optimizer=scaled_by_rate(job.optimizer, peak_rate=job.schedule.learning_rate),
        clip_norm=job.clip_norm,
        average_factor=job.average_factor,
    )
    if manifest:
        fill_from_checkpoint(engine, checkpoints, manifest)
    elif weights:
        fill_from_weights(engine, weights)
    if world.is_first:
        opening = Opening(
            job=job,
            world=world,
            plan=plan,
            resumed_step=manifest.id.step if manifest else 0,
            num_parameters=num_parameters(engine.shapes.values()),
            num_images=sum(dataset.num_samples for dataset in prepared.data.datasets),
            most_read_ahead_bytes=prepared.most_read_ahead_bytes,
        )
        log.info("%s", opening.words())
        if prepared.is_compiled:
            log.info("compiling the model's blocks: the first step takes longer, and so does the first evaluation")
    return engine


def _finish(prepared: Prepared, store: Store, manifest: Manifest, ledger: Ledger) -> None:
    """Weights out of the final checkpoint (any ZeRO stage), averaged ones where the job asks, then the DONE marker."""
    folder = prepared.run_dir / "weights"
    slot = AVERAGE if prepared.job.average_factor else MASTER
    save_weights(
        folder,
        config=prepared.job.model,
        labels=prepared.data.label_names,
        tensor=lambda name: read_tensor(store, manifest, name, slot=slot),
    )
    digest = _sha256(folder / "model.safetensors")
    job = asdict(saved_job(manifest))
    marker = {"step": manifest.id.step, "checkpoint": manifest.id.folder, "weights_sha256": digest, "job": job}
    waiting = prepared.run_dir / "DONE.part"
    waiting.write_text(json.dumps(marker) + "\n")
    waiting.replace(prepared.run_dir / "DONE")
    log.info("%s", closing_words(prepared.job, steps=manifest.id.step, seconds=ledger.record(), weights=folder))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checkpoint_store(job: TrainingJob) -> Store:
    return open_store(job.checkpoint.url or str(Path(job.run_dir) / "checkpoints"))


def _num_classes(job: TrainingJob, data: TrainingData, held_out: Dataset | None) -> int:
    """The model's classes: as many as the data has where the job leaves it open; never fewer."""
    wanted = job.model.num_classes or data.num_classes
    if data.num_classes > wanted:
        raise UserError(
            f"{data.url} has {data.num_classes} classes, the model has {wanted}; "
            f"set --model.num-classes {data.num_classes}, or 0 to take the dataset's"
        )
    if held_out:
        label_map(held_out, data.label_names)
    return wanted

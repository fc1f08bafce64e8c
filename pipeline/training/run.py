"""One training run from its start to its DONE marker. From `train` a reader goes down, once."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.collectives import broadcast_json
from pipeline.data.batches import TrainBatches
from pipeline.data.config import Share
from pipeline.data.quarantine import Quarantine
from pipeline.data.training_data import TrainingData, check_memory, data_state, open_training_data
from pipeline.models.weights import TensorByName
from pipeline.training.batch_plan import BatchPlan, plan_batch
from pipeline.training.checkpoint import Checkpoints, list_committed
from pipeline.training.classes import with_classes
from pipeline.training.config import TrainingJob, scaled_by_rate
from pipeline.training.done import finish, job_of, read_done
from pipeline.training.engine import Engine
from pipeline.training.ledger import Ledger
from pipeline.training.loop import Loop, LoopEnd, Parts, describe
from pipeline.training.manifest import Manifest
from pipeline.training.reporter import open_reporter
from pipeline.training.same_run import extension
from pipeline.training.signals import Signals
from pipeline.training.start import (
    SavedJob,
    all_will_compile,
    bf16_of_all,
    fill_from_checkpoint,
    fill_from_weights,
    refuse_changes,
    saved_job,
    starting_model,
    starting_weights,
    will_compile,
    with_precision,
)
from pipeline.training.stopping import CONTINUE, INTERRUPTED, NOTHING_SAVED, Stopping
from pipeline.training.summary import Opening, closing_words, num_parameters
from pipeline.world import World, enter, leave
from shards.dataset import Dataset, open_dataset
from shards.errors import TransientError, UserError, WillNotSucceedError
from shards.store import Store, open_store

log = logging.getLogger(__name__)
OnStart = Callable[[TrainingJob], None]
_LIBRARIES = ("patchline", "torch", "deepspeed", "numpy", "simplejpeg", "opencv-python-headless")


class Ending(Enum):
    """How a run ended: DONE, STOPPED with a committed checkpoint, to be continued, or, where nothing was saved, by
    Ctrl-C (INTERRUPTED) or another signal (UNSAVED)."""

    DONE = "done"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    UNSAVED = "unsaved"


_ENDINGS = {CONTINUE: Ending.STOPPED, INTERRUPTED: Ending.INTERRUPTED, NOTHING_SAVED: Ending.UNSAVED}


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
    extend: bool  # whether it may have more steps than the run that it continues


def prepare(job: TrainingJob, world: World, *, extend: bool = False) -> Prepared:
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
    job = with_classes(job, data, held_out, say=world.is_first)
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
        raise UserError(f"{stop} exists and keeps the run stopped; delete it to continue")
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
        extend=extend,
    )


def train(prepared: Prepared, world: World, *, on_start: OnStart) -> Ending:
    """Runs a prepared job, from its newest checkpoint where it has one, to its end or until it is asked to stop.

    `on_start` is called on rank 0 with the job as it is run, once nothing speaks against the start any more (its record
    is written there).
    """
    with ExitStack() as stack:
        stopping = stack.enter_context(Stopping(rank=world.rank, num_ranks=world.num_ranks))
        signals = stack.enter_context(Signals(prepared.run_dir, watch_markers=world.is_first))
        enter(world)
        stack.callback(leave)
        marker = broadcast_json(read_done(prepared.run_dir) if world.is_first else None, device=world.device)
        if marker:
            is_done = marker["job"]["step"] == prepared.job.steps
            _refuse_changes(prepared, job_of(marker), is_done=is_done)
            if is_done:
                if world.is_first:
                    log.info("%s is already done: %d steps", prepared.run_dir, prepared.job.steps)
                return Ending.DONE
        prepared = replace(prepared, is_compiled=all_will_compile(prepared.is_compiled, world))
        try:
            ending = _train(prepared, world, signals, stopping, stack, on_start=on_start)
            dist.barrier()
        except (UserError, WillNotSucceedError):
            raise
        except Exception as error:  # what was under way when the signal came need not end well: a peer was first
            if not stopping.is_asked:
                raise
            log.info("stopped (%s: %s); %s", type(error).__name__, str(error).partition("\n")[0], stopping.standing())
            ending = _ENDINGS[stopping.exit_code]
        signals.over()
        return ending


def _train(
    prepared: Prepared,
    world: World,
    signals: Signals,
    stopping: Stopping,
    stack: ExitStack,
    *,
    on_start: OnStart,
) -> Ending:
    job, run_dir, ledger, bf16 = prepared.job, prepared.run_dir, Ledger(prepared.run_dir), bf16_of_all(world)

    def accept(found: Manifest | None) -> None:
        if found:
            saved = saved_job(found)
            _refuse_changes(prepared, saved)
            more = extension(saved.job, job, step=saved.step)
            if more and world.is_first:
                log.info("%s", more)
        if world.is_first:
            on_start(with_precision(job, found, bf16=bf16))

    with ledger.time("startup"):
        checkpoints, manifest = Checkpoints.start(
            _checkpoint_store(job),
            world,
            run_dir=run_dir,
            accept=accept,
        )
        job = with_precision(job, manifest, bf16=bf16, say=world.is_first)
        prepared = replace(prepared, job=job)
        weights = None if manifest else starting_weights(job)
        engine = _start_engine(prepared, world, checkpoints, manifest, weights)
        step = manifest.id.step if manifest else 0
        reporter = open_reporter(job, ledger, prepared.data, step=step) if world.is_first else None
        if reporter:
            stack.callback(reporter.metrics.close)
        batches = _open_batches(prepared, world)
        stack.callback(batches.close)
    parts = Parts(
        job=job,
        world=world,
        plan=prepared.plan,
        engine=engine,
        batches=batches,
        checkpoints=checkpoints,
        signals=signals,
        stopping=stopping,
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
                finish(run_dir, job, loop.saved, store=checkpoints.store, labels=prepared.data.label_names)
                place, seconds = run_dir / "weights", ledger.record()
                log.info("%s", closing_words(job, steps=loop.saved.id.step, seconds=seconds, weights=place))
    except (UserError, TransientError) as error:  # what started well is no mistake any more
        raise TransientError(f"after {loop.step} steps: {error}") from error
    if end is LoopEnd.ASKED and world.is_first:
        how = f"delete {run_dir / 'STOP'}, then run" if (run_dir / "STOP").exists() else "run"
        log.info("saved at step %d; %s the same command to continue", loop.step, how)
    if end is LoopEnd.NOTHING_SAVED:
        log.info("stopped before the first step was done; %s", stopping.standing())
        return _ENDINGS[stopping.exit_code]
    return Ending.DONE if end is LoopEnd.ALL_STEPS else Ending.STOPPED


def _open_batches(prepared: Prepared, world: World) -> TrainBatches:
    """This rank's stream of training batches. Close it."""
    job = prepared.job
    return TrainBatches(
        prepared.data,
        replace(job.data, num_threads=job.data.num_threads or world.num_threads),
        seed=job.seed,
        image_size=job.model.image_size,
        share=Share(global_batch=job.global_batch, rank=world.rank, num_ranks=world.num_ranks),
        quarantine=Quarantine(prepared.run_dir / "quarantine.jsonl", max_share=job.data.max_quarantined),
        pin_memory=world.device.type == "cuda",
    )


def _refuse_changes(prepared: Prepared, saved: SavedJob, *, is_done: bool = False) -> None:
    refuse_changes(saved, data_state=prepared.data_state, job=prepared.job, is_done=is_done, extend=prepared.extend)


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
        ema_decay=job.ema_decay,
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


def _checkpoint_store(job: TrainingJob) -> Store:
    return open_store(job.checkpoint.url or str(Path(job.run_dir) / "checkpoints"))

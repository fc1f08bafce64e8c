"""One training run from its start to its DONE marker. `train` and `_start_to_end` read as these steps:

1. read the job                     done before: jobs/resolve.py, and the rank's place in pipeline/world.py
2. check it against its data        prepare.py
3. join the other ranks             signals are watched from here on
4. find the checkpoint              checkpoint.py; a job that is not the same run is refused
5. build                            the engine, filled (start.py), the stream of batches, the reporter
6. loop                             loop.py
7. finish                           done.py: weights, then the DONE marker
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path

import torch.distributed as dist

from pipeline.bf16 import Bf16
from pipeline.collectives import broadcast_json
from pipeline.data.stream import open_stream
from pipeline.training.checkpoint import Checkpoints, gone_message
from pipeline.training.config import TrainingJob
from pipeline.training.done import Done, done_from_json, done_to_json, finish, read_done
from pipeline.training.engine import Engine
from pipeline.training.guard import NonFiniteGuard
from pipeline.training.held_out import HeldOut
from pipeline.training.ledger import Ledger
from pipeline.training.loop import Loop, LoopEnd
from pipeline.training.manifest import Manifest
from pipeline.training.prepare import Prepared, prepare
from pipeline.training.reporter import open_reporter
from pipeline.training.same_run import extension, refuse_changes
from pipeline.training.saving import Saving, describe
from pipeline.training.signals import Signals
from pipeline.training.start import all_will_compile, bf16_of_all, start_engine, with_precision
from pipeline.training.stopping import CONTINUE, INTERRUPTED, NOTHING_SAVED, Stopping
from pipeline.training.summary import Opening, closing_words, num_parameters
from pipeline.training.train_step import Gradients, TrainStep
from pipeline.training.watch import Watch
from pipeline.world import World, joined
from shards.errors import InvalidDataError, TransientError, UserError, WillNotSucceedError

log = logging.getLogger(__name__)
WriteRecord = Callable[[TrainingJob], None]


class Ending(Enum):
    """How a run ended: DONE, STOPPED with a committed checkpoint, to be continued, or, if nothing was saved, by
    Ctrl-C (INTERRUPTED) or another signal (UNSAVED)."""

    DONE = "done"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    UNSAVED = "unsaved"


_ENDINGS = {CONTINUE: Ending.STOPPED, INTERRUPTED: Ending.INTERRUPTED, NOTHING_SAVED: Ending.UNSAVED}


def train(job: TrainingJob, world: World, *, write_record: WriteRecord, extend: bool = False) -> Ending:
    """Runs a job, from its newest checkpoint if it has one, to its end or until it is asked to stop.

    `write_record` writes RUN/job.yaml, whose format belongs to the room above: called on rank 0 with the job as it is
    run. `extend`: the job may have more steps than the run that it continues. Raises UserError.
    """
    # 2. Check the job against its data.
    prepared = prepare(job, world, extend=extend)
    # 3. Join the other ranks.
    with (
        Stopping(rank=world.rank, num_ranks=world.num_ranks) as stopping,
        Signals(prepared.run_dir, watch_markers=world.is_first) as signals,
        joined(world),
    ):
        if _is_done(prepared):
            return Ending.DONE
        try:
            ending = _start_to_end(prepared, signals, stopping, write_record=write_record)
            dist.barrier()
        except (UserError, WillNotSucceedError):
            raise
        except Exception as error:  # after a request to stop an error is no surprise: a peer may have ended first
            if not stopping.is_asked:
                raise
            log.info("stopped (%s: %s); %s", type(error).__name__, str(error).partition("\n")[0], stopping.standing())
            ending = _ENDINGS[stopping.exit_code]
        signals.over()
        return ending


def _start_to_end(prepared: Prepared, signals: Signals, stopping: Stopping, *, write_record: WriteRecord) -> Ending:
    """Steps 4 to 7."""
    world = prepared.world
    prepared = replace(prepared, is_compiled=all_will_compile(prepared.is_compiled, world))
    watch = Watch(signals=signals, stopping=stopping, ledger=Ledger(prepared.run_dir, says=world.is_first))
    bf16 = bf16_of_all(world)
    with _in_its_folder(prepared.run_dir), ExitStack() as stack:
        with watch.ledger.time("startup"):
            # 4. Find the checkpoint.
            checkpoints = Checkpoints(prepared.store, world, run_dir=prepared.run_dir)
            prepared, found = _find_checkpoint(prepared, checkpoints, bf16=bf16, write_record=write_record)
            # 5. Build.
            loop = _build(prepared, checkpoints, found, watch, stack)
        with _retried(loop):
            # 6. Loop.
            end = loop.run()
            # 7. Finish.
            if end is LoopEnd.ALL_STEPS:
                checkpoints.refuse_if_overtaken()
                if world.is_first and loop.saving.saved:
                    _finish(prepared, loop.saving.saved, watch.ledger)
        return _ending(end, prepared, stopping, step=loop.step)


def _is_done(prepared: Prepared) -> bool:
    """Whether the DONE marker is that of this very job. UserError if it is of another one. Collective."""
    world, run_dir = prepared.world, prepared.run_dir
    done = read_done(run_dir) if world.is_first else None
    text = broadcast_json(done_to_json(done) if done else "", device=world.device)
    if not text:
        return False
    done = done_from_json(text)
    is_done = done.step == prepared.job.steps
    _refuse_changes(prepared, done, is_done=is_done)
    if is_done and world.is_first:
        log.info("%s is already done: %d steps", run_dir, prepared.job.steps)
    return is_done


def _find_checkpoint(
    prepared: Prepared, checkpoints: Checkpoints, *, bf16: Bf16, write_record: WriteRecord
) -> tuple[Prepared, Manifest | None]:
    """The checkpoint that this run continues from, if any, and the job with its precision decided. Collective."""
    is_first = prepared.world.is_first
    while True:
        found = checkpoints.newest()
        if found:
            _refuse_changes(prepared, found)
            more = extension(found.job.job, prepared.job, step=found.id.step)
            if more and is_first:
                log.info("%s", more)
        job = with_precision(prepared.job, found, bf16=bf16, say=is_first)
        if is_first:
            write_record(job)
        if checkpoints.begin_attempt(found):
            return replace(prepared, job=job), found


def _refuse_changes(prepared: Prepared, saved: Manifest | Done, *, is_done: bool = False) -> None:
    start, extend = prepared.stream.start, prepared.extend
    refuse_changes(saved.job, saved.position, job=prepared.job, start=start, is_done=is_done, extend=extend)


def _build(
    prepared: Prepared, checkpoints: Checkpoints, found: Manifest | None, watch: Watch, stack: ExitStack
) -> Loop:
    """The loop with everything it uses: the engine, rank 0's reporter, the stream of batches. `stack` closes what needs
    it. Collective."""
    job, world, stream = prepared.job, prepared.world, prepared.stream
    engine = start_engine(job, prepared.plan, checkpoints, found, is_compiled=prepared.is_compiled)
    step, reporter = found.position.next_step if found else 0, None
    if world.is_first:
        _say_opening(prepared, engine, resumed_step=step)
        reporter = stack.enter_context(open_reporter(job, watch.ledger, stream.data, step=step))
    batches = stack.enter_context(
        open_stream(
            stream,
            next_step=step,
            quarantine=prepared.run_dir / "quarantine.jsonl",
            pin_memory=world.device.type == "cuda",
        )
    )
    labels, record = stream.data.label_names, describe(job, world, is_compiled=prepared.is_compiled)
    return Loop(
        job,
        TrainStep(Gradients(job, prepared.plan, engine, world), batches, watch),
        guard=NonFiniteGuard(job, num_updates=found.num_updates if found else 0, says=world.is_first),
        held_out=HeldOut(job, engine, world, dataset=prepared.held_out, labels=labels, watch=watch),
        saving=Saving(job, engine, checkpoints, saved=found, record=record, watch=watch, reporter=reporter),
        reporter=reporter,
    )


def _say_opening(prepared: Prepared, engine: Engine, *, resumed_step: int) -> None:
    opening = Opening(
        job=prepared.job,
        world=prepared.world,
        plan=prepared.plan,
        resumed_step=resumed_step,
        num_parameters=num_parameters(engine.shapes.values()),
        num_images=sum(dataset.num_samples for dataset in prepared.stream.data.datasets),
        most_read_ahead_bytes=prepared.stream.most_read_ahead_bytes,
    )
    log.info("%s", opening.words())
    if prepared.is_compiled:
        log.info("compiling the model's blocks: the first step takes longer, and so does the first evaluation")


@contextmanager
def _in_its_folder(run_dir: Path) -> Iterator[None]:
    """A file that is missing because the whole run directory is: TensorBoard's, for one."""
    try:
        yield
    except FileNotFoundError as error:
        if run_dir.is_dir():
            raise
        raise WillNotSucceedError(gone_message(run_dir)) from error


@contextmanager
def _retried(loop: Loop) -> Iterator[None]:
    """A run that started well made no mistake: storage that fails later is retried. Data that cannot be right stays as
    it is: that is a mistake before the first step, and the end of the run after it, also while its weights are written
    by a start that had no step left to do."""
    first_step = loop.step
    try:
        yield
    except InvalidDataError as error:
        if loop.step == first_step < loop.job.steps:
            raise
        raise WillNotSucceedError(f"after {loop.step} steps: {error}") from error
    except (UserError, TransientError) as error:
        raise TransientError(f"after {loop.step} steps: {error}") from error


def _finish(prepared: Prepared, saved: Manifest, ledger: Ledger) -> None:
    """The weights, the DONE marker and the last words; rank 0 alone."""
    job, run_dir = prepared.job, prepared.run_dir
    finish(run_dir, job, saved, store=prepared.store, labels=prepared.stream.data.label_names)
    words = closing_words(job, steps=saved.id.step, seconds=ledger.record(), weights=run_dir / "weights")
    log.info("%s", words)


def _ending(end: LoopEnd, prepared: Prepared, stopping: Stopping, *, step: int) -> Ending:
    """How the run ended, with a line in the log if it was asked to stop."""
    if end is LoopEnd.ALL_STEPS:
        return Ending.DONE
    if end is LoopEnd.NOTHING_SAVED:
        log.info("stopped before the first step was done; %s", stopping.standing())
        return _ENDINGS[stopping.exit_code]
    if prepared.world.is_first:
        stop = prepared.run_dir / "STOP"
        how = f"delete {stop}, then run" if stop.exists() else "run"
        log.info("saved at step %d; %s the same command to continue", step, how)
    return Ending.STOPPED

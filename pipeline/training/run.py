"""One training run from its start to its DONE marker. `train` and `_start_to_end` take these steps:

1. read the job                     done by the caller: jobs/resolve.py, and pipeline/ranks/world.py for the rank
2. check it against its data        prepare.py
3. join the other ranks             signals are watched from here on; ranks that differ are refused
                                    (prepare.py)
4. find the checkpoint              pipeline/checkpoints/checkpoint.py; a job that may not continue the run is refused
                                    (saving/may_continue.py)
5. build                            loop.py, with start.py: the micro-batch that fits (fitting/fit.py), the check of
                                    gradients, the engine, filled; the stream of batches, the reporter, the saves
6. loop                             loop.py; if the guard wants to go back, rewind.py, then 5 again with the same engine
7. finish                           saving/finish.py: weights, then the DONE marker
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch.distributed as dist

from pipeline.checkpoints.attempts import gone_message
from pipeline.checkpoints.checkpoint import Checkpoints
from pipeline.checkpoints.manifest import CheckpointManifest
from pipeline.checkpoints.writer.client import Writer
from pipeline.data.lost_shards import without_lost_shards
from pipeline.data.position import said_differences
from pipeline.ranks.collectives import broadcast_json
from pipeline.ranks.devices import refuse_missing_kernel
from pipeline.ranks.host import Bf16
from pipeline.ranks.world import World, bf16_of, fix_kernels, joined
from pipeline.runs.starts import Left, Origin, StartTimes, add_start, cause_of, last_start, left_behind
from pipeline.training.controls import Controls, SaveClock
from pipeline.training.decisions import decide_precision
from pipeline.training.fitting.first_pass import refuse_lack_of_memory
from pipeline.training.guard import RewindNeededError
from pipeline.training.loop import Loop, LoopEnd, open_loop
from pipeline.training.prepare import Prepared, prepare, refuse_other_runs
from pipeline.training.reporting.ledger import Ledger, last_line, last_saved
from pipeline.training.rewind import rewind
from pipeline.training.saving.finish import Done, done_from_json, done_to_json, finish, read_done
from pipeline.training.saving.may_continue import extension, refuse_changes
from pipeline.training.settings.job import TrainingJob
from pipeline.training.summary import closing_words
from pipeline.training.watchdog.heartbeat import Heartbeat, time_limits
from pipeline.training.watchdog.heartbeat_files import Phase
from pipeline.training.watchdog.stopping import CONTINUE, INTERRUPTED, NOTHING_SAVED, Signals, Stopping
from pipeline.training.zero.step_times import StepTimes, StepTrace, marks_of, say_untraced
from shards.errors import InvalidDataError, TransientError, UserError, WillNotSucceedError
from shards.files.looks import Look, is_there, look_once
from shards.ulimits import lack_of_memory, memory_todo

log = logging.getLogger(__name__)
WriteRecord = Callable[[TrainingJob], None]
NO_STEPS = range(0)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """How the caller records a run. `write`: a function that writes RUN/job.yaml in the caller's format; rank 0 calls
    it with the job as it runs. `origin`: where the job comes from."""

    write: WriteRecord
    origin: Origin


class RunEnding(Enum):
    """How a run ended. DONE: all steps are done. STOPPED: it can be continued from a committed checkpoint. INTERRUPTED:
    Ctrl-C stopped it before anything was saved. UNSAVED: another request to stop did."""

    DONE = "done"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    UNSAVED = "unsaved"


_ENDINGS = {CONTINUE: RunEnding.STOPPED, INTERRUPTED: RunEnding.INTERRUPTED, NOTHING_SAVED: RunEnding.UNSAVED}


def train(
    job: TrainingJob, world: World, *, record: RunRecord, extend: bool = False, profile: range = NO_STEPS
) -> RunEnding:
    """Runs a job to its end, or until it is asked to stop. A run that has a checkpoint continues from its newest one.

    `record`: how the run is recorded. `extend`: whether the job may have more steps than the run that it continues.
    `profile`: the steps that rank 0 traces. Raises UserError if the job cannot run as it is."""
    if job.engine.deterministic:
        fix_kernels(world)
    # 2. Check the job against its data.
    start_times = StartTimes()
    prepared = prepare(job, world, extend=extend)
    start_times.ends("data")
    # 3. Join the other ranks.
    with (
        Stopping(rank=world.rank, num_ranks=world.num_ranks) as stopping,
        Signals(prepared.run_dir, watch_markers=world.is_first) as signals,
        Heartbeat(prepared.run_dir, job.hang, stopping.progress, world=world),
        _writer(prepared) as writer,
        ExitStack() as stack,
    ):
        if writer:
            stopping.progress.stopped_writer = lambda: writer.stopped_pid
        try:
            stopping.progress.enters(Phase.JOINING)
            with joined(world, limits=time_limits(job.hang)):
                refuse_other_runs(prepared)
                stopping.progress.enters(Phase.STARTING)
                start_times.ends("rendezvous")
                if _is_done(prepared):
                    say_untraced(profile if world.is_first else NO_STEPS)
                    return RunEnding.DONE
                controls = _controls(prepared, signals, stopping, stack, profile=profile, start_times=start_times)
                ending = _start_to_end(prepared, writer, controls, record)
                stopping.progress.is_done = ending is RunEnding.DONE
                dist.barrier()
        except (UserError, WillNotSucceedError):
            raise
        except Exception as error:  # after a stop request, errors are expected: a peer may have ended first
            if not stopping.is_asked:
                raise
            log.info("stopped (%s: %s); %s", type(error).__name__, str(error).partition("\n")[0], stopping.standing())
            ending = _ENDINGS[stopping.exit_code]
        signals.over()
        return ending


@contextmanager
def _writer(prepared: Prepared) -> Iterator[Writer | None]:
    """Starts the process that writes this rank's checkpoints, and ends it with the run. Yields None if the job writes
    checkpoints without such a process."""
    if prepared.job.checkpoint.asynchronous == "off":
        yield None
        return
    with closing(Writer()) as writer:
        yield writer


def _controls(
    prepared: Prepared,
    signals: Signals,
    stopping: Stopping,
    stack: ExitStack,
    *,
    profile: range,
    start_times: StartTimes,
) -> Controls:
    """Makes the run's controls. `stack` closes the trace of profiled steps, if there is one."""
    world, run_dir = prepared.world, prepared.run_dir
    times, trace = StepTimes(marks_of(world.device), is_alone=world.num_ranks == 1), None
    if profile and world.is_first:
        trace = stack.enter_context(closing(StepTrace(run_dir, profile, times, device=world.device)))
    return Controls(
        signals=signals,
        stopping=stopping,
        ledger=Ledger(run_dir, says=world.is_first),
        clock=SaveClock(prepared.job.checkpoint, num_nodes=world.num_nodes, decides=world.is_first),
        times=times,
        trace=trace,
        start_times=start_times,
    )


def _start_to_end(prepared: Prepared, writer: Writer | None, controls: Controls, record: RunRecord) -> RunEnding:
    """Takes steps 4 to 7 of the run."""
    world, bf16 = prepared.world, bf16_of(prepared.world.device)
    with _in_its_folder(prepared.run_dir):
        with controls.ledger.time("startup"):
            # 4. Find the checkpoint.
            checkpoints = _checkpoints(prepared)
            left = left_behind(prepared.run_dir) if world.is_first else None
            prepared, found = _find_checkpoint(prepared, checkpoints, bf16=bf16, write_record=record.write)
            prepared = _without_lost_shards(prepared)
            if found and world.is_first:
                controls.ledger.complete(found.id, found.record.get("seconds"))
            resumed_from = found.id.step if found else None
            if left:
                _count_pauses(controls.ledger, left, resumed_from=resumed_from)
        if left:
            add_start(
                prepared.run_dir,
                attempt=checkpoints.attempt.token,
                resumed_from=resumed_from,
                seconds=controls.ledger.record(),
                topology=(world.num_ranks, prepared.job.engine.zero_stage, world.device.type),
                left=left,
                origin=record.origin,
            )
        controls.start_times.ends("checkpoint")
        loop = None
        while True:
            controls.stopping.progress.attempt = checkpoints.attempt.token
            # 5. Build.
            with open_loop(prepared, checkpoints, controls, writer, found, before=loop) as loop:
                try:
                    return _to_its_end(loop, prepared, checkpoints)
                except RewindNeededError as needed:
                    finding = needed.finding
            with _retried(loop):
                found = rewind(loop, checkpoints, finding)


def _count_pauses(ledger: Ledger, left: Left, *, resumed_from: int | None) -> None:
    """Counts the pauses since the ledger's last line. Called on rank 0, before it records this start. `left`: what the
    earlier start left."""
    before = last_start(ledger.run_dir)
    if before is None:
        return
    # The pause before an earlier start that saved nothing is in no line of the ledger.
    ledger.count_as_pause(before.paused_seconds - ledger.seconds["paused"])
    if cause_of(left, resumed_from=resumed_from, attempt_before=before.attempt).is_pause:
        ledger.count_as_pause()


def _to_its_end(loop: Loop, prepared: Prepared, checkpoints: Checkpoints) -> RunEnding:
    """Takes steps 6 and 7. Raises RewindNeededError if the run is to continue from an earlier checkpoint."""
    with _retried(loop):
        # 6. Loop.
        end = loop.run()
        loop.saving.settle()
        # 7. Finish.
        if end is LoopEnd.ALL_STEPS:
            checkpoints.refuse_if_overtaken()
            if prepared.world.is_first and loop.saving.saved:
                _finish(prepared, loop.saving.manifest(), loop.controls.ledger)
    return _ending(end, prepared, loop.controls.stopping, step=loop.step)


def _is_done(prepared: Prepared) -> bool:
    """Returns whether this job is done according to the DONE marker. Raises UserError if another job wrote the marker.
    Collective."""
    world, run_dir = prepared.world, prepared.run_dir
    done = read_done(run_dir) if world.is_first else None
    if world.is_first and done is None and is_there(run_dir / "DONE"):
        log.warning(
            "%s is damaged, of another version, or of other weights: the run is finished again", run_dir / "DONE"
        )
    text = broadcast_json(done_to_json(done) if done else "", device=world.device)
    if not text:
        return False
    done = done_from_json(text)
    is_done = done.step == prepared.job.steps
    _refuse_changes(prepared, done, is_done=is_done)
    if is_done and world.is_first:
        log.info("%s is already done: %d steps", run_dir, prepared.job.steps)
    return is_done


def _checkpoints(prepared: Prepared) -> Checkpoints:
    """Returns the run's checkpoints. They read the run's ledger to learn which one was saved last."""
    run_dir = prepared.run_dir
    saved, records = (lambda: last_saved(run_dir)), (lambda: bool(last_line(run_dir)))
    return Checkpoints(prepared.store, prepared.world, run_dir=run_dir, recorded=saved, has_records=records)


def _find_checkpoint(
    prepared: Prepared, checkpoints: Checkpoints, *, bf16: Bf16, write_record: WriteRecord
) -> tuple[Prepared, CheckpointManifest | None]:
    """Returns the prepared job with its precision decided, and the checkpoint that this run continues from, if any.
    Writes the job's record, and begins a new attempt. Collective."""
    is_first = prepared.world.is_first
    while True:
        found = checkpoints.newest()
        if found:
            _refuse_changes(prepared, found)
            if is_first:
                for change in said_differences(found.position.to_json(), prepared.stream.start):
                    log.warning("%s; the pixels are the same", change)
            more = extension(found.job.job, prepared.job, step=found.id.step)
            if more and is_first:
                log.info("%s", more)
        job, precision = decide_precision(prepared.job, found, bf16=bf16, say=is_first)
        if is_first:
            write_record(job)
        if checkpoints.begin_attempt(found):
            return replace(prepared, job=job, decisions=(*prepared.decisions, precision)), found


def _without_lost_shards(prepared: Prepared) -> Prepared:
    """Returns the prepared job without the shards that storage can no longer read. Collective."""
    stream, share = prepared.stream, prepared.job.data.max_quarantined
    data = without_lost_shards(stream.data, prepared.run_dir, world=prepared.world, max_share=share)
    return replace(prepared, stream=replace(stream, data=data))


def _refuse_changes(prepared: Prepared, saved: CheckpointManifest | Done, *, is_done: bool = False) -> None:
    job, start, extend = prepared.job, prepared.stream.start, prepared.extend
    refuse_changes(saved.job, saved.position, job=job, start=start, is_done=is_done, extend=extend)


@contextmanager
def _in_its_folder(run_dir: Path) -> Iterator[None]:
    """Turns the error of a missing file into a message if the whole run directory is missing."""
    try:
        yield
    except FileNotFoundError as error:
        if look_once(run_dir) is not Look.MISSING:
            raise
        raise WillNotSucceedError(gone_message(run_dir, is_run=True)) from error


@contextmanager
def _retried(loop: Loop) -> Iterator[None]:
    """Turns the errors of a run that has started into errors with the right exit code. A UserError becomes a
    TransientError, because the command was accepted and can be repeated. An InvalidDataError stays the user's mistake
    before the first step. Later it becomes a WillNotSucceedError, since damaged data stays damaged, even if no steps
    remain and only the weights are to be written."""
    first_step = loop.step
    try:
        yield
    except InvalidDataError as error:
        if loop.step == first_step < loop.job.steps:
            raise
        raise WillNotSucceedError(f"after {loop.step} steps: {error}") from error
    except (RuntimeError, MemoryError, OSError) as error:
        if loop.step > first_step and (found := lack_of_memory(error)):
            raise TransientError(f"after {loop.step} steps: {found}; {memory_todo()}") from error
        if not isinstance(error, RuntimeError):
            raise
        refuse_missing_kernel(error)
        gradients = loop.train_step.gradients
        num_steps = loop.step - first_step
        refuse_lack_of_memory(error, gradients.plan, rank=gradients.world.rank, num_steps=num_steps)
        raise
    except (UserError, TransientError) as error:
        raise TransientError(f"after {loop.step} steps: {error}") from error


def _finish(prepared: Prepared, saved: CheckpointManifest, ledger: Ledger) -> None:
    """Writes the weights and the DONE marker, and logs the closing lines. Called on rank 0."""
    job, run_dir = prepared.job, prepared.run_dir
    finish(run_dir, job, saved, store=prepared.store, labels=prepared.stream.data.label_names)
    log.info("%s", closing_words(job, steps=saved.id.step, seconds=ledger.record(), weights=run_dir / "weights"))


def _ending(end: LoopEnd, prepared: Prepared, stopping: Stopping, *, step: int) -> RunEnding:
    """Returns how the run ended. Logs a line if it was asked to stop."""
    if end is LoopEnd.ALL_STEPS:
        return RunEnding.DONE
    if end is LoopEnd.NOTHING_SAVED:
        log.info("stopped before the first step was done; %s", stopping.standing())
        return _ENDINGS[stopping.exit_code]
    if prepared.world.is_first:
        stop = prepared.run_dir / "STOP"
        how = f"delete {stop}, then run" if look_once(stop) is Look.THERE else "run"
        log.info("saved at step %d of %d; %s the same command to continue", step, prepared.job.steps, how)
    return RunEnding.STOPPED

"""The training loop (read a batch, compute gradients, agree, update, report, save), and the function that builds it.

A step's outcome is read after the next step has been launched, so that the device has work while the host reads it. The
device still waits if the host launches a step more slowly than the device computes it. Under ZeRO-3, or with
`guard.on_spike skip`, the host also waits for the device before each update. A stop request takes effect at most two
steps later, or in the same step on a rank that runs alone. Before an evaluation, a save or the end of the run, the
outcome is read at once.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from enum import Enum
from typing import NoReturn

from pipeline.checkpoints.checkpoint import Checkpoints
from pipeline.checkpoints.manifest import CheckpointManifest
from pipeline.checkpoints.saves import Saves
from pipeline.checkpoints.writer.client import Writer
from pipeline.checkpoints.writer.copies import choose_writer
from pipeline.data.batches import Batch
from pipeline.data.lost_shards import noting_lost_shards
from pipeline.data.quarantine import quarantine_path
from pipeline.data.stream import BatchStream, open_stream
from pipeline.evaluation.scores import Scores
from pipeline.ranks.streams import streams_of
from pipeline.training.controls import Controls
from pipeline.training.fitting.memory import Topology, memory_of
from pipeline.training.gradients import Gradients, compiling_steps
from pipeline.training.guard import Guard, add_alarm
from pipeline.training.kernels import KernelWatch, watches_kernel
from pipeline.training.prepare import Prepared
from pipeline.training.reporting.norms import Norms, PositionView
from pipeline.training.reporting.reporter import NUM_IMAGES, open_reporter
from pipeline.training.reporting.utilisation import SLOW_FACTOR, SLOW_SECONDS, RankTimes, SlowRanks, Utilisation
from pipeline.training.saving.save import Saving, record_of, state_bytes
from pipeline.training.saving.when_to_save import WhenToSave, decide_when_to_save
from pipeline.training.scoring import HeldOut
from pipeline.training.start import start_engine
from pipeline.training.step import Launched, StepResult, TrainStep
from pipeline.training.watchdog.heartbeat_files import rank_words
from pipeline.training.watchdog.stopping import StopRequest, WaitGivenUpError
from pipeline.training.zero.device_batches import batches_on
from pipeline.training.zero.engine import timed_exchanges
from shards.errors import TransientError, UserError
from shards.output.quantities import size
from shards.ulimits import file_size_todo, most_file_bytes

log = logging.getLogger(__name__)


class LoopEnd(Enum):
    """Why the loop ended."""

    ALL_STEPS = "all steps done"
    ASKED = "asked to save and exit"
    NOTHING_SAVED = "asked to exit before there was anything to save"


class Loop:
    """Runs the remaining steps of a run. `position`: where the next batch begins. `reporter`: None on all ranks but the
    first."""

    def __init__(
        self, train_step: TrainStep, *, guard: Guard, held_out: HeldOut, saving: Saving, when: WhenToSave
    ) -> None:
        self.train_step, self.guard, self.held_out, self.saving, self.when = train_step, guard, held_out, saving, when
        self.job, self.controls, self.reporter = train_step.gradients.job, train_step.controls, saving.reporter
        self.position = train_step.stream.typed_position
        self._start = self.step
        self._unread: Launched | None = None
        self._slow_ranks = SlowRanks()

    @property
    def step(self) -> int:
        """The number of steps launched so far."""
        return self.position.next_step

    def run(self) -> LoopEnd:
        """Runs all steps up to the job's last, or until the ranks agree to stop. A checkpoint is committed in both
        cases, unless a rank that runs alone is stopped before there is anything to save. Raises RewindNeededError if
        the run is to continue from an earlier checkpoint."""
        self.when.clock.started()
        self.controls.times.forget()
        with self.reporter or nullcontext():
            while self.step < self.job.steps:
                try:
                    batch = self.train_step.next_batch()
                except WaitGivenUpError:
                    self._read()
                    return self._stop_here()
                if self.step == self._start:
                    self._begins(batch)
                request = self._train_on(batch)
                is_due = request > StopRequest.NOTHING or self.when.is_due(self.step)
                if is_due:
                    request = max(request, self._read())
                    if self.guard.updates.is_sound:
                        self._save(may_be_skipped=request < StopRequest.SAVE_AND_EXIT)
                # Exit code 75 promises a committed checkpoint: if there is none, the next step tries again.
                is_over = self.step == self.job.steps and not self.held_out.was_given_up
                if request == StopRequest.SAVE_AND_EXIT and not is_over and self._is_saved():
                    return LoopEnd.ASKED
        if self._start == self.job.steps and not self._score_the_last():
            return LoopEnd.ASKED
        self.controls.stopping.finishing()
        self.guard.updates.refuse(self.step, last_saved=self.saving.last_step)
        while not self._is_saved():
            self._save()
        return LoopEnd.ALL_STEPS

    def _begins(self, batch: Batch) -> None:
        """Hands images of the first batch to the reporter, and records how long the start waited for that batch."""
        if self.reporter:
            self.reporter.shows(*self.train_step.first_images(batch, NUM_IMAGES))
        self.controls.start_times.ends("first_batch")

    def _train_on(self, batch: Batch) -> StopRequest:
        """Launches one step. Returns what the ranks are asked to do, according to the outcomes read meanwhile."""
        launched = self.train_step.launch(batch)
        self.position = self.position.at(batch.step + 1)
        if self.reporter:
            self.reporter.launched(launched.step)
            attempt = self.controls.stopping.progress.attempt
            self.controls.start_times.step_launched(self.controls.ledger.run_dir, attempt=attempt)
        request = self._read()
        self._unread = launched
        if self.controls.stopping.may_stop_alone:
            request = StopRequest.SAVE_AND_EXIT
        is_last = self.step == self.job.steps
        return max(request, self._read()) if is_last or self.held_out.is_due(self.step) else request

    def _read(self) -> StopRequest:
        """Reads and reports the outcome of the last launched step, unless it has been read already. Returns what the
        ranks were asked to do in that step."""
        if self._unread is None:
            return StopRequest.NOTHING
        result, self._unread = self.train_step.read(self._unread), None
        self.saving.advance(result)
        if result.num_without_data:
            self._end_without_data(result.step)
        self.guard.count(result, last_saved=self.saving.last_step)
        self.when.look()
        scores = self._scores(result.step)
        if self.reporter:
            self.reporter.step(
                result.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                rate=result.rate,
                traffic=result.counts,
                guard=self.guard.values(),
                scores=scores,
                of_others=self.held_out.of_others,
                norms=result.norms,
                ranks=result.ranks | self._slow(result),
            )
            if result.similarity is not None:
                self.reporter.shows_positions(result.step, result.similarity)
        return StopRequest.SAVE_AND_EXIT if self.held_out.was_given_up else result.request

    def _slow(self, result: StepResult) -> dict[str, float]:
        """Logs the ranks that `SlowRanks` has newly found. Returns the highest rank among them as a metric."""
        found = self._slow_ranks.newly_slow(result.own_seconds, at=time.monotonic()) if result.ranks else []
        for one in found:
            reason = (
                f"{rank_words(self.controls.ledger.run_dir, one.rank)} is slow: its own part of a step, without the "
                f"wait for the others, takes {one.own_seconds:.3g} s, {one.times:.1f} times the median of all ranks, "
                f"and has been above {SLOW_FACTOR:g} times for {SLOW_SECONDS / 60:g} minutes; all ranks wait for it"
            )
            log.warning("step %d: %s", result.step, reason)
            add_alarm(self.job.run_dir, step=result.step, kind="slow_rank", reason=reason, action="none")
        return {"ranks/slow": float(found[-1].rank)} if found else {}

    def _scores(self, step: int) -> Scores | None:
        """Returns the scores after `step` if they are due, and reports how many measurements have failed so far."""
        num_before = self.held_out.num_failed
        scores = self.held_out.scores(step)
        self.when.scored(step, scores)
        if self.reporter and self.held_out.num_failed > num_before:
            self.reporter.not_scored(self.held_out.num_failed)
        return scores

    def _stop_here(self) -> LoopEnd:
        """Saves the steps done so far, after a stop request ended the wait for data of a rank that runs alone. Returns
        why the loop ends."""
        if self.step > 0:
            self.controls.stopping.progress.step_begins(self.step)  # the run ends in this step, not in the next one
        if not self._is_saved() and self.step > 0 and self.guard.updates.is_sound:
            self._save()
        return LoopEnd.ASKED if self._is_saved() else LoopEnd.NOTHING_SAVED

    def _end_without_data(self, step: int) -> NoReturn:
        """Ends the run because a rank had no data for `step`, so that no rank made the update of this step. Saves the
        step before, and raises the error. Collective."""
        self.position = self.position.at(step - 1)
        try:
            if not self._is_saved() and self.guard.updates.is_sound:
                self._save()
                self.saving.wait()
        except TransientError as error:
            log.error("%s", error)
        self.train_step.end_without_data()

    def _save(self, *, may_be_skipped: bool = False) -> None:
        """Begins a save. `may_be_skipped`: whether the save may be left out if another one is running. The save of the
        best model so far is never left out."""
        may_be_skipped = may_be_skipped and not self.when.best.is_due(self.step)
        self.when.begins(self.step)
        num_updates, losses = self.guard.updates.num_updates, self.guard.losses
        self.saving.save(self.position, num_updates=num_updates, losses=losses, may_be_skipped=may_be_skipped)
        self.when.began()

    def _is_saved(self) -> bool:
        """Waits for the running save, if any, and returns whether this step is committed."""
        self.saving.wait()
        self.when.look()
        return self.saving.saved_step == self.step

    def _score_the_last(self) -> bool:
        """Scores a run that resumed after its last step, since a stop request may have interrupted the last evaluation.
        Returns False if a stop request interrupts this evaluation, too."""
        scores = self._scores(self.step)
        if (scores or self.held_out.of_others) and self.reporter:
            self.reporter.scored_late(self.step, scores, self.held_out.of_others)
        return not self.held_out.was_given_up


@contextmanager
def open_loop(
    prepared: Prepared,
    checkpoints: Checkpoints,
    controls: Controls,
    writer: Writer | None,
    found: CheckpointManifest | None,
    *,
    before: Loop | None,
) -> Iterator[Loop]:
    """Step 5 of a run: builds the loop that continues from the checkpoint `found`, or from the start if it is None.
    Everything that it opens is closed when the context ends. `writer`: the process that writes checkpoints, if there is
    one. `before`: after a rewind, the previous loop, whose engine is kept and already filled. Collective."""
    job, world = prepared.job, prepared.world
    step, skipped, reporter = found.position.next_step if found else 0, checkpoints.attempt.skipped, None
    with ExitStack() as stack:
        with controls.ledger.time("startup"):
            if before:
                gradients, saves = before.train_step.gradients, before.saving.saves
            else:
                gradients = start_engine(prepared, checkpoints, found, controls)
            stack.enter_context(timed_exchanges(controls.times))
            if world.is_first:
                measured = before.reporter.utilisation if before and before.reporter else None
                teacher = gradients.teacher.config if gradients.teacher else None
                utilisation = measured or Utilisation(job, world, controls.times, teacher=teacher)
                opened = open_reporter(
                    job, controls.ledger, prepared.stream.data, step=step, skipped=skipped, utilisation=utilisation
                )
                reporter = stack.enter_context(opened)
            stack.enter_context(noting_lost_shards(prepared.stream.data, prepared.run_dir, rank=world.rank))
            batches = stack.enter_context(
                open_stream(
                    prepared.stream,
                    next_step=step,
                    skipped=skipped,
                    quarantine=quarantine_path(prepared.run_dir, rank=world.rank),
                    pin_memory=world.device.type == "cuda",
                )
            )
            guard = Guard(job, found=found, position=batches.typed_position, says=world.is_first)
            if not before:
                saves = _saves(gradients, checkpoints, writer, is_filled=found is not None)
            record = record_of(gradients, is_compiled=prepared.is_compiled, resumed=found)
            saving = Saving(gradients, saves, controls, saved=found, record=record, reporter=reporter)
            train_step = _train_step(gradients, batches, saving, guard)
            if watches_kernel(job, world):
                gradients.watched = KernelWatch(record["engine"], job, world).model_pass
            held_out = HeldOut(prepared, gradients.engine, controls)
            when = decide_when_to_save(saving, dataset=held_out.dataset, resumed_from=found)
            controls.stopping.progress.compiling_steps = compiling_steps(job, begin=step)
            loop = Loop(train_step, guard=guard, held_out=held_out, saving=saving, when=when)
        yield loop


def _train_step(gradients: Gradients, batches: BatchStream, saving: Saving, guard: Guard) -> TrainStep:
    job, engine, world, controls = gradients.job, gradients.engine, gradients.world, saving.controls
    streams = streams_of(world.device)
    return TrainStep(
        gradients,
        batches_on(batches, streams, times=controls.times),
        controls,
        sources=saving.sources,
        discard=guard.discard,
        norms=Norms(engine, every=job.norms_every_steps, device=world.device),
        view=PositionView(job, engine, world, streams),
        rank_times=RankTimes(controls.times, world, every=job.log_every_steps),
    )


def _saves(gradients: Gradients, checkpoints: Checkpoints, writer: Writer | None, *, is_filled: bool) -> Saves:
    """Returns the saves of a run, which are written in the background if the host has enough memory. `is_filled`:
    whether the optimiser has its moments already. Collective."""
    job, world, num_bytes = gradients.job, gradients.world, state_bytes(gradients.job, gradients.engine)
    _refuse_long_file(checkpoints, num_bytes)
    chosen = choose_writer(
        job.checkpoint,
        writer,
        checkpoints.store,
        world,
        num_bytes=num_bytes,
        training_bytes=_bytes_to_come(gradients, is_filled=is_filled),
    )
    return Saves(checkpoints, chosen, job.checkpoint.retention(rewind_steps=job.guard.rewind_steps))


def _refuse_long_file(checkpoints: Checkpoints, num_bytes: int) -> None:
    """Raises UserError if `ulimit -f` allows no file as long as a rank's part of a checkpoint."""
    most = most_file_bytes()
    if most is not None and most < num_bytes and checkpoints.store.local_path("checkpoint") is not None:
        what = f"this rank's part of a checkpoint is a file of {size(num_bytes)} in {checkpoints.store.url}"
        raise UserError(what, todo=file_size_todo())


def _bytes_to_come(gradients: Gradients, *, is_filled: bool) -> int:
    """Returns the bytes of host memory that training on a CPU will still take: gradients, activations, and moments
    unless they are filled already. Returns 0 on a GPU."""
    world = gradients.world
    if world.device.type != "cpu":
        return 0
    topology = Topology(num_ranks=world.num_ranks, is_on_gpu=False)
    teacher = gradients.teacher.config if gradients.teacher else None
    memory = memory_of(gradients.job, topology, micro_batch=gradients.plan.micro_batch, teacher=teacher)
    held = memory.weights + memory.teacher + memory.masters + memory.average + (memory.moments if is_filled else 0)
    return max(0, memory.peak - held)

"""Step 5 of a run: its engine, its stream of batches, its reporter and its saves, put together in a loop."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from pipeline.checkpoints.checkpoint import Checkpoints
from pipeline.checkpoints.manifest import CheckpointManifest
from pipeline.checkpoints.saves import Saves
from pipeline.checkpoints.writer.client import Writer
from pipeline.checkpoints.writer.copies import choose_writer
from pipeline.checkpoints.writer_messages import Retention
from pipeline.data.stream import BatchStream, open_stream
from pipeline.ranks.world import World
from pipeline.training.controls import Watch
from pipeline.training.fitting.fit import agreed_fit
from pipeline.training.fitting.memory import Topology, memory_of
from pipeline.training.gradients import Gradients
from pipeline.training.guard import Guard
from pipeline.training.loop import Loop
from pipeline.training.prepare import Prepared
from pipeline.training.reporting.norms import Norms, PositionView
from pipeline.training.reporting.reporter import Reporter, open_reporter
from pipeline.training.reporting.utilisation import Utilisation
from pipeline.training.saving.reproducibility import BITS, say_bits
from pipeline.training.saving.save import Saving, describe, state_bytes
from pipeline.training.saving.when_to_save import decide_when_to_save
from pipeline.training.scoring import HeldOut
from pipeline.training.settings.job import TrainingJob
from pipeline.training.start import fill_engine, start_engine
from pipeline.training.step import SumSource, TrainStep
from pipeline.training.summary import Opening, num_parameters
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.device_batches import batches_on
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.gpu_streams import streams_of
from pipeline.training.zero.gradient_check import check_gradients, checks_gradients
from pipeline.training.zero.layers import is_trained

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a process has before it builds its loop, and keeps when the run is rewound. `writer`: the process that
    writes its checkpoints, if the job wants one."""

    prepared: Prepared
    checkpoints: Checkpoints
    watch: Watch
    writer: Writer | None


def build_loop(parts: Parts, found: CheckpointManifest | None, stack: ExitStack, *, before: Loop | None) -> Loop:
    """The loop that continues from a checkpoint, or from the start. `stack` closes what needs it. `before`: the loop
    that was rewound, whose engine is filled already. Collective."""
    prepared, checkpoints, watch = parts.prepared, parts.checkpoints, parts.watch
    job, world, stream = prepared.job, prepared.world, prepared.stream
    engine, plan = _kept(before) if before else _engine(parts, found)
    step, skipped, reporter = found.position.next_step if found else 0, checkpoints.attempt.skipped, None
    if world.is_first:
        utilisation = (
            before.reporter.utilisation if before and before.reporter else Utilisation(job, world, watch.times)
        )
        reporter = stack.enter_context(
            open_reporter(job, watch.ledger, stream.data, step=step, skipped=skipped, utilisation=utilisation)
        )
    batches = stack.enter_context(
        open_stream(
            stream,
            next_step=step,
            skipped=skipped,
            quarantine=prepared.run_dir / "quarantine.jsonl",
            pin_memory=world.device.type == "cuda",
        )
    )
    guard = Guard(job, found=found, position=batches.typed_position, says=world.is_first)
    saving = _saving(parts, engine, plan, found, reporter=reporter, before=before)
    gradients = Gradients(job, plan, engine, world, times=watch.times)
    return Loop(
        job,
        _train_step(gradients, batches, watch, sources=saving.sources, guard=guard),
        guard=guard,
        held_out=_held_out(prepared, engine, watch),
        saving=saving,
        when=decide_when_to_save(job, saving, dataset=prepared.held_out.get(""), resumed_from=found),
        reporter=reporter,
    )


def _held_out(prepared: Prepared, engine: Engine, watch: Watch) -> HeldOut:
    return HeldOut(
        prepared.job,
        engine,
        prepared.world,
        sets=prepared.held_out,
        labels=prepared.stream.data.label_names,
        watch=watch,
        fewshot=prepared.fewshot,
    )


def _train_step(
    gradients: Gradients, batches: BatchStream, watch: Watch, *, sources: Sequence[SumSource], guard: Guard
) -> TrainStep:
    job, engine, world = gradients.job, gradients.engine, gradients.world
    streams = streams_of(world.device)
    return TrainStep(
        gradients,
        batches_on(batches, streams, times=watch.times),
        watch,
        sources=sources,
        discard=guard.discard,
        norms=Norms(engine, every=job.norms_every_steps, device=world.device),
        view=PositionView(job, engine, world, streams),
    )


def _kept(before: Loop) -> tuple[Engine, BatchPlan]:
    """The engine and the plan of the loop that was rewound."""
    gradients = before.train_step.gradients
    return gradients.engine, gradients.plan


def _engine(parts: Parts, found: CheckpointManifest | None) -> tuple[Engine, BatchPlan]:
    """The engine of a run that starts, filled, and the plan that fits the devices. Rank 0 says what is to come.
    Collective."""
    prepared = parts.prepared
    job, world = prepared.job, prepared.world
    fit = agreed_fit(job, prepared.plan, prepared.budget, world, record=found.record if found else None)
    if checks_gradients(job.engine, fit.plan, world.device):
        check_gradients(job, fit.plan, world)
    engine, plan = start_engine(job, fit.plan, world, is_compiled=prepared.is_compiled)
    prepared.parts.ends("model")
    fill_engine(engine, job, parts.checkpoints, found)
    prepared.parts.ends("load")
    # A trial on a GPU may have cut the share into several passes, which DeepSpeed adds up in other code.
    is_other = min(plan.accumulation, 2) != min(fit.plan.accumulation, 2)
    if is_other and checks_gradients(job.engine, plan, world.device):
        check_gradients(job, plan, world)
    if world.is_first:
        _say_opening(replace(prepared, plan=plan), engine, resumed_step=found.id.step if found else 0)
    return engine, plan


def _saving(
    parts: Parts,
    engine: Engine,
    plan: BatchPlan,
    found: CheckpointManifest | None,
    *,
    reporter: Reporter | None,
    before: Loop | None,
) -> Saving:
    """The saves of a run, written as those before a rewind were. Collective."""
    prepared, checkpoints = parts.prepared, parts.checkpoints
    job, world = prepared.job, prepared.world
    num_begun = 0
    if before:
        writer, num_begun = before.saving.saves.writer, before.saving.saves.num_begun
    else:
        writer = choose_writer(
            job.checkpoint,
            parts.writer,
            checkpoints.store,
            world,
            num_bytes=state_bytes(job, engine),
            training_bytes=_bytes_to_come(job, plan, world, is_filled=found is not None),
        )
    record = describe(job, world, plan=plan, is_compiled=prepared.is_compiled)
    record |= {BITS: say_bits(world, job.engine, record, resumed=found.record if found else {})}
    retention = Retention(
        keep_newest=job.checkpoint.keep_newest,
        keep_every=job.checkpoint.keep_every,
        rewind_steps=job.guard.rewind_steps,
    )
    return Saving(
        job,
        engine,
        Saves(checkpoints, writer, retention, num_begun=num_begun),
        saved=found,
        record=record,
        watch=parts.watch,
        reporter=reporter,
    )


def _bytes_to_come(job: TrainingJob, plan: BatchPlan, world: World, *, is_filled: bool) -> int:
    """Host memory that training on a CPU will still take: moments, unless they are filled already, gradients and
    activations."""
    if world.device.type != "cpu":
        return 0
    topology = Topology(num_ranks=world.num_ranks, is_on_gpu=False)
    memory = memory_of(job, topology, micro_batch=plan.micro_batch)
    held = memory.weights + memory.masters + memory.average + (memory.moments if is_filled else 0)
    return max(0, memory.peak - held)


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
    if prepared.job.optimizer.freeze_backbone:
        trained = {name: shape for name, shape in engine.shapes.items() if is_trained(name, prepared.job.optimizer)}
        log.info(
            "the backbone is frozen: %s of %s parameters are trained",
            f"{num_parameters(trained.values()):,}",
            f"{opening.num_parameters:,}",
        )
    if prepared.is_compiled:
        log.info("compiling the model's blocks: the first step takes longer, and so does the first evaluation")

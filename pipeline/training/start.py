"""Builds the engine in step 5 of a run: fits it into memory, checks its gradients, and fills it from the first of these
sources that exists:

1. the newest of the run's own checkpoints that counts and can be verified
2. the weights that the job names (--initial.weights)
3. scratch: initial values that the job's seed determines
"""

import logging
from dataclasses import asdict, replace
from functools import partial

import torch

from pipeline.checkpoints.checkpoint import Checkpoints, Fragment
from pipeline.checkpoints.manifest import AVERAGE, MASTER, CheckpointManifest
from pipeline.models.build import Model, unfilled_model
from pipeline.models.loss import balanced_weights
from pipeline.models.weights.safetensors import TensorByName
from pipeline.ranks.world import World
from pipeline.training.controls import Controls
from pipeline.training.decisions import Decision, decide_engine
from pipeline.training.fitting.first_pass import engine_that_fits, one_pass
from pipeline.training.fitting.memory import Topology, memory_of
from pipeline.training.gradients import Gradients
from pipeline.training.kernels import (
    refuse_missing_float8,
    refuse_missing_fused_mlp,
    refuse_missing_graphs,
    set_up_blocks,
)
from pipeline.training.prepare import Prepared, starting_weights
from pipeline.training.settings.job import TrainingJob, scaled_by_rate
from pipeline.training.summary import Opening, num_parameters
from pipeline.training.teacher import Teacher
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.gradient_check import check_gradients, checks_gradients
from pipeline.training.zero.optimizer import freeze, is_trained, moments_of
from shards.errors import InvalidDataError

log = logging.getLogger(__name__)
_CPU = torch.device("cpu")


def start_engine(
    prepared: Prepared, checkpoints: Checkpoints, found: CheckpointManifest | None, controls: Controls
) -> Gradients:
    """Returns the passes over a filled engine, with the batch plan that fits the devices. The engine continues from the
    checkpoint `found`, if there is one. Rank 0 logs what the run is about to do. Collective."""
    job, world = prepared.job, prepared.world
    refuse_missing_float8(job, world, is_compiled=prepared.is_compiled)
    refuse_missing_fused_mlp(job, world)
    refuse_missing_graphs(job, world, is_compiled=prepared.is_compiled)
    job, planned, decisions = decide_engine(replace(prepared, record=found.record if found else None))
    teacher = prepared.teacher and prepared.teacher.on(world, job, is_compiled=prepared.is_compiled)
    engine, plan = _built(job, planned, world, teacher=teacher, is_compiled=prepared.is_compiled)
    if plan != planned:
        decisions.append(Decision(setting="micro_batch", value=plan.micro_batch, why="a GPU ran out of memory"))
    times = controls.start_times
    times.decided = [asdict(decision) for decision in (*prepared.decisions, *decisions)]
    times.ends("model")
    if found:
        fill_from_checkpoint(engine, checkpoints, found, job=job)
    else:
        _fill_from_weights(engine, starting_weights(job, say=world.is_first))
    times.ends("load")
    # If the first pass did not fit a GPU, a rank's share may now take several passes, whose gradients DeepSpeed adds up
    # with other code.
    is_other = min(plan.accumulation, 2) != min(planned.accumulation, 2)
    if is_other and checks_gradients(job.engine, plan, world.device):
        check_gradients(job, plan, world)
    if world.is_first:
        _say_opening(replace(prepared, plan=plan), engine, resumed_step=found.id.step if found else 0)
    class_weights = None
    if job.class_weights == "balanced":
        class_weights = balanced_weights(prepared.stream.data.class_shares, job.model.num_classes)
    # Memory is planned for what was decided, and the checkpoint's record has it.
    decided = replace(
        prepared.job,
        engine=replace(prepared.job.engine, activation_checkpointing=job.engine.activation_checkpointing),
    )
    return Gradients(decided, plan, engine, world, times=controls.times, class_weights=class_weights, teacher=teacher)


def _built(
    job: TrainingJob, plan: BatchPlan, world: World, *, teacher: Teacher | None, is_compiled: bool
) -> tuple[Engine, BatchPlan]:
    """Returns the engine, not yet filled, and its plan: `plan` or, if a GPU runs out of memory, one with a smaller
    micro-batch. `teacher`: the job's, on the device. Collective."""

    def build(plan: BatchPlan) -> Engine:
        return Engine(
            starting_model(job, is_compiled=is_compiled, device=world.device),
            config=job.engine,
            plan=plan,
            optimizer=scaled_by_rate(job.optimizer, peak_rate=job.schedule.learning_rate),
            clip_norm=job.clip_norm,
            ema_decay=job.ema_decay,
        )

    def first_pass(engine: Engine, plan: BatchPlan) -> None:
        stand_in = partial(stand_in_model, job, is_compiled=is_compiled, device=world.device)
        topology = Topology(num_ranks=world.num_ranks, is_on_gpu=True)
        memory = memory_of(job, topology, micro_batch=plan.micro_batch, teacher=teacher.config if teacher else None)
        held_bytes = memory.peak - memory.activations
        one_pass(job, engine, plan, stand_in=stand_in, held_bytes=held_bytes, teacher=teacher)

    if world.device.type == "cuda":
        engine, plan = engine_that_fits(
            plan,
            build=build,
            first_pass=first_pass,
            pairs=job.data.mixup.is_on,
            world=world,
            is_compiled=is_compiled,
        )
    else:
        engine = build(plan)
    return engine, plan


def starting_model(job: TrainingJob, *, is_compiled: bool, device: torch.device = _CPU) -> Model:
    """Returns the job's model on PyTorch's meta device, where it takes no memory. Its blocks are compiled, recomputed
    in the backward pass, and computed in float8 or with fused MLPs if the job says so. On a CPU, both are emulated,
    which no run uses."""
    with torch.device("meta"):
        model = unfilled_model(job.model)
    set_up_blocks(model, job.engine, is_compiled=is_compiled, device=device)
    return model


def stand_in_model(job: TrainingJob, *, is_compiled: bool, device: torch.device) -> Model:
    """Returns a model of the job's size and precision on a device, with all weights 0, to find out whether it fits into
    memory."""
    model = starting_model(job, is_compiled=is_compiled, device=device)
    if job.engine.precision == "bf16":
        model.to(torch.bfloat16)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    freeze(model, job.optimizer)
    return model


def _fill_from_weights(engine: Engine, tensor: TensorByName) -> None:
    """Fills the master weights with unrounded fp32 values. Until then they are rounded, since DeepSpeed made them from
    its copy of the weights in the run's precision."""

    def fill(fragment: Fragment, slot: str) -> None:
        flat = tensor(fragment.name).flatten()
        fragment.slots[slot].copy_(flat[fragment.start : fragment.start + fragment.length])

    engine.load(fill, moments=[], num_updates=0)


def fill_from_checkpoint(
    engine: Engine, checkpoints: Checkpoints, manifest: CheckpointManifest, *, job: TrainingJob
) -> None:
    """Fills master weights and moments from a checkpoint, which any number of ranks may have written under any ZeRO
    stage. Raises InvalidDataError if the checkpoint has other tensors or moments than the job."""

    if {name: tensor.shape for name, tensor in manifest.tensors.items()} != engine.shapes:
        where = f"{checkpoints.store.url}/{manifest.id.folder}"
        raise InvalidDataError(f"{where} has other tensors than the model that it names; start in another --run-dir")
    _refuse_other_moments(manifest, job, where=f"{checkpoints.store.url}/{manifest.id.folder}")

    wanted: list[tuple[Fragment, str]] = []  # loading everything at once takes fewer requests

    def fill(fragment: Fragment, slot: str) -> None:
        wanted.append((fragment, slot))

    def filled() -> None:
        checkpoints.load(manifest, wanted)

    engine.load(fill, moments=list(manifest.moments), num_updates=manifest.num_updates, filled=filled)
    checkpoints.loaded()


def _refuse_other_moments(manifest: CheckpointManifest, job: TrainingJob, *, where: str) -> None:
    """Raises InvalidDataError unless the checkpoint has moments for exactly the weights that the job trains."""
    for name, tensor in manifest.tensors.items():
        kept = (AVERAGE, *moments_of(name, job.optimizer)) if is_trained(name, job.optimizer) else ()
        expected = {MASTER, *(moment for moment in manifest.moments if moment in kept)}
        if set(tensor.slots) != expected:
            raise InvalidDataError(
                f"{where} has {', '.join(sorted(tensor.slots))} of {name}; allowed: {', '.join(sorted(expected))}; "
                "start in another --run-dir"
            )


def _say_opening(prepared: Prepared, engine: Engine, *, resumed_step: int) -> None:
    opening = Opening(
        job=prepared.job,
        world=prepared.world,
        plan=prepared.plan,
        resumed_step=resumed_step,
        num_parameters=num_parameters(engine.shapes.values()),
        num_images=sum(dataset.num_samples for dataset in prepared.stream.data.datasets),
        labels_per_image=prepared.stream.data.labels_per_image,
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

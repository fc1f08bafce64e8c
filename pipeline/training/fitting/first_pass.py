"""The first pass on a GPU is a trial. If a rank runs out of memory in it, all ranks halve their micro-batch.

A plan is a prediction, and only the GPU itself shows how much memory its kernels and its allocator need. If a rank ran
out of memory during a step, the others would wait for it in a collective. So each rank tries one pass by itself, on
random images, after the engine is built and before the first step, and then the ranks agree. The size of micro-batches
does not change the batches.
"""

import logging
from collections.abc import Callable

import torch

from pipeline.models.build import Model
from pipeline.models.masked import masked_loss, masked_targets
from pipeline.ranks.collectives import all_agree, barrier
from pipeline.ranks.world import World
from pipeline.training.fitting.fit import halved
from pipeline.training.settings.job import TrainingJob
from pipeline.training.teacher import Teacher, learned_loss
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.engine import Engine
from shards.errors import TransientError, UserError, WillNotSucceedError
from shards.output.quantities import plural

log = logging.getLogger(__name__)
Build = Callable[[BatchPlan], Engine]
FirstPass = Callable[[Engine, BatchPlan], None]
_FIRST_STEPS = 2  # the steps that allocate the memory that later steps reuse


def engine_that_fits(
    plan: BatchPlan, *, build: Build, first_pass: FirstPass, pairs: bool, world: World, is_compiled: bool
) -> tuple[Engine, BatchPlan]:
    """Returns the engine and the plan of the largest micro-batch whose first pass fits the memory of every rank. Each
    try halves the micro-batch. Raises UserError if the smallest does not fit. Collective, except for `first_pass`.

    `is_compiled`: whether the pass compiles kernels. If so, local rank 0 goes first, and the other ranks of its host
    find its kernels in torch's cache.
    """
    while True:
        engine = build(plan)
        if is_compiled and world.local_rank > 0:
            barrier(device=world.device)
        fits = _fits(engine, plan, first_pass)
        if is_compiled and world.local_rank == 0:
            barrier(device=world.device)
        if all_agree(fits, device=world.device):
            return engine, plan
        smaller = halved(plan, pairs=pairs)
        who = "another rank" if fits else f"rank {world.rank}"
        if smaller is None:
            raise UserError(
                f"the GPU of {who} ran out of memory with a micro-batch of {plural(plan.micro_batch, 'image')}, the "
                "smallest; give --engine.activation-checkpointing full, --engine.zero-stage 2 or 3, or start more ranks"
            )
        if world.is_first or not fits:
            log.warning(
                "the GPU of %s ran out of memory with a micro-batch of %d: all ranks take %d, %d times a step. Batches "
                "stay as they are; --micro-batch %d saves the next start this trial",
                who,
                plan.micro_batch,
                smaller.micro_batch,
                smaller.accumulation,
                smaller.micro_batch,
            )
        engine.free()  # before the next engine is built
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        plan = smaller


def one_pass(
    job: TrainingJob,
    engine: Engine,
    plan: BatchPlan,
    *,
    stand_in: Callable[[], Model],
    held_bytes: int,
    teacher: Teacher | None = None,
) -> None:
    """Computes the forward and backward passes of one micro-batch of random images, without other ranks, and the
    teacher's forward pass before them. It changes no gradient and no weight. `stand_in`: makes the model to use under
    stage 3, where the engine's weights are spread over the ranks. `held_bytes`: what training will hold on a GPU apart
    from activations; the part that is not yet allocated is allocated during the pass. `teacher`: the job's, on the
    device; None if it has none."""
    module = stand_in() if job.engine.zero_stage == 3 else engine.module
    module.train()
    device = next(module.parameters()).device
    on_gpu = device.type == "cuda"
    missing = max(0, held_bytes - torch.cuda.memory_allocated(device)) if on_gpu else 0
    ballast = torch.empty(missing, dtype=torch.uint8, device=device)
    images = torch.randint(
        256, (plan.micro_batch, job.model.image_size, job.model.image_size, 3), dtype=torch.uint8, device=device
    )
    labels = torch.zeros(plan.micro_batch, 1, dtype=torch.int64, device=device)
    if job.model.masked_patches:
        targets = masked_targets(images, job.model)
        num_patches = targets.shape[1]
        sources = torch.full((plan.micro_batch, num_patches), num_patches, device=device)  # all masked
        loss = masked_loss(module(images, None, sources), targets, target=job.model.masked_target)
    else:
        num_stay = job.with_most_tokens.largest_phase.num_stay
        first = None if num_stay is None else torch.arange(num_stay, device=device).expand(plan.micro_batch, -1)
        given = {"stay_BS": first, "patch": min(job.tokens.patch_sizes, default=None)}
        taught = teacher.logits(images) if teacher else None
        outputs = module(images, **{name: value for name, value in given.items() if value is not None})
        loss = learned_loss(job, outputs, labels, taught)
    # Unlike `backward`, `grad` does not run the hooks that reduce gradients, which would wait for the other ranks.
    torch.autograd.grad(loss, [parameter for parameter in module.parameters() if parameter.requires_grad])
    if on_gpu:
        torch.cuda.synchronize(device)
    del ballast


def refuse_lack_of_memory(error: RuntimeError, plan: BatchPlan, *, rank: int, num_steps: int) -> None:
    """Turns an out-of-memory error after `num_steps` steps, which happened although the trial fitted, into a message.
    Raises WillNotSucceedError after at most _FIRST_STEPS steps of a start, and TransientError later. Ignores other
    errors."""
    if not isinstance(error, torch.OutOfMemoryError):
        return
    message = (
        f"the GPU of rank {rank} ran out of memory after {plural(num_steps, 'step')} of this start, with a micro-batch "
        f"of {plural(plan.micro_batch, 'image')} ({str(error).partition(chr(10))[0]}); give a smaller --micro-batch, a "
        f"divisor of {plan.rank_batch}: batches stay as they are"
    )
    raise (WillNotSucceedError if num_steps <= _FIRST_STEPS else TransientError)(message) from error


def _fits(engine: Engine, plan: BatchPlan, first_pass: FirstPass) -> bool:
    try:
        first_pass(engine, plan)
    except torch.OutOfMemoryError as error:
        log.info("%s", str(error).partition("\n")[0])
        return False
    return True

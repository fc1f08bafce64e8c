"""Decides what a job leaves open when it starts: one function for each decision, in this order.

    setting             decided by            depends on
    model.num_classes   decide_classes        the data
    engine.compile      will_compile          the device, before the ranks join; all must decide alike
    engine.precision    decide_precision      the checkpoint or the device; written to RUN/job.yaml
    engine.activation_checkpointing           the memory of every rank, and the checkpoint
                        agreed_recomputation
    micro_batch         agreed_fit            the memory of every rank
    engine.attention    with_attention        how long each kernel takes on rank 0's GPU, if all ranks have it
    engine.overlap      with_checked_overlap  the gradients of a small copy of the model

`STEPS` lists the last four decisions and `engine.compile`. Every rank decides alike. RUN/starts.jsonl has all decisions
of a start, with their reasons. Callers have already made their own changes to the job, such as the warm-up of a shorter
run.
"""

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from pipeline.checkpoints.manifest import CheckpointManifest
from pipeline.data.evaluation import label_map
from pipeline.data.training_data import TrainingData
from pipeline.models.attention import (
    BY_NAME_ALONE,
    FLEX,
    KERNELS,
    best_kernel,
    kernel_seconds,
    use_kernel,
)
from pipeline.models.build import compile_fault
from pipeline.models.config import ModelConfig
from pipeline.models.vit import AttentionAlone
from pipeline.ranks.collectives import gather_json
from pipeline.ranks.host import Bf16
from pipeline.ranks.world import World, set_defaults
from pipeline.training.fitting.fit import Budget, agreed_fit, agreed_recomputation, with_recomputed
from pipeline.training.settings.job import EngineConfig, TrainingJob
from pipeline.training.settings.tokens import sizes_of_steps
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.gradient_check import check_gradients, checks_gradients, overlaps
from shards.class_names import near_equal
from shards.config_values import shown_value
from shards.dataset import Dataset
from shards.errors import UserError, WillNotSucceedError

log = logging.getLogger(__name__)
Precision = Literal["bf16", "fp32"]
AS_THE_JOB_SAYS = "as the job says"
# A trial must take longer than launching its kernels: with 8 images, the fastest kernel on an H200 changed from trial
# to trial.
_TRIED_TOKENS = 1 << 14
_COMPILE_THREADS, _MOST_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS", 8
_UNEVEN = 5.0  # ratio of the largest to the smallest class from which a note is logged


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a start decided: a field of the job, its value, and the reason."""

    setting: str
    value: str | int
    why: str


@dataclass(frozen=True, kw_only=True)
class Undecided:
    """A job whose number of classes is decided, and the facts on which the other decisions depend. `plan`: the plan
    with a rank's whole share in one pass, unless the job names a micro-batch. `budget`: this rank's memory.
    `is_compiled`: whether blocks will be compiled. `record`: the record of the checkpoint to continue, if there is
    one."""

    job: TrainingJob
    plan: BatchPlan
    budget: Budget
    world: World
    is_compiled: bool
    record: Mapping[str, Any] | None = None


def decide_classes(
    job: TrainingJob, data: TrainingData, held_out: Sequence[Dataset], *, say: bool
) -> tuple[TrainingJob, Decision]:
    """Returns the job with the data's number of classes, unless the job names one, and the decision. Raises UserError
    if the data has no classes, if the job has fewer than the data, or if a held-out dataset has labels that the data
    lacks. `say`: whether to log warnings, for example about classes that the data does not have."""
    setting = "model.num_classes"
    if job.model.masked_patches:
        return job, Decision(setting=setting, value=job.model.num_classes, why="the model predicts colours of patches")
    if not data.num_classes:
        raise UserError(
            f"{data.url} has no labels to train on",
            todo="give a dataset that has, predict masked patches, or read it with patchline.train_batches",
        )
    wanted = job.model.num_classes or data.num_classes
    if data.num_classes > wanted:
        raise UserError(
            f"{data.url} has {data.num_classes} classes, the model has {wanted}; "
            f"set --model.num-classes {data.num_classes}, or 0 to take the dataset's"
        )
    for each in held_out:
        label_map(each, data.label_names)
    if say and data.num_classes == 1:
        only = shown_value(data.label_names[0])
        log.warning(
            "%s has only one class, %s: there is nothing to tell it from, so a model learns nothing", data.url, only
        )
    if say and job.data.mix:
        for group in near_equal(data.label_names):
            names = ", ".join(map(shown_value, group))
            log.warning("the mixed classes %s differ only in case, spaces or similar characters; are they one?", names)
    if say and job.loss == "softmax" and job.class_weights == "equal" and (said := imbalance(data)):
        log.info("%s", said)
    if say and data.num_classes < wanted:
        log.warning(unused_classes(data.num_classes, wanted))
    why = AS_THE_JOB_SAYS if job.model.num_classes else "as the data has"
    decided = replace(job, model=replace(job.model, num_classes=wanted))
    return decided, Decision(setting=setting, value=wanted, why=why)


def imbalance(data: TrainingData) -> str:
    """Returns a note on the largest and the smallest class, with the flag that weights classes. Returns an empty string
    if the largest has less than five times the images of the smallest."""
    shares = data.class_shares
    smallest = int(np.where(shares > 0, shares, np.inf).argmin())
    ratio = shares.max() / shares[smallest] if shares.any() else 1.0
    if ratio < _UNEVEN:
        return ""
    names = [shown_value(data.label_names[place]) for place in (int(shares.argmax()), smallest)]
    return (
        f"the classes are uneven: {names[0]} has {ratio:,.0f} times the images of {names[1]}; --class-weights balanced "
        "weights them so that each class counts as much as any other"
    )


def unused_classes(of_data: int, of_model: int) -> str:
    """Returns a warning about a model with more classes than its data has."""
    unused = f"{of_model - of_data} of its outputs never {'has' if of_model - of_data == 1 else 'have'} an image"
    return f"the data has {of_data} classes, the model {of_model}: {unused}; --model.num-classes 0 takes the data's"


def will_compile(config: EngineConfig, world: World) -> bool:
    """Returns whether a run on this rank's device compiles its blocks. With "auto", blocks are compiled on GPUs with
    ZeRO-1 and 2 if compiling works. Raises UserError if the job says "on" or "tuned" and compiling does not work."""
    device = world.device
    is_asked = config.compile in ("on", "tuned")
    is_wanted = is_asked or (config.compile == "auto" and device.type == "cuda" and config.zero_stage < 3)
    # When torch compiles, it warns that TF32 is off. The warning is hidden: bf16 runs have no use for TF32, and fp32
    # runs avoid it on purpose.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)
    if is_wanted:  # by default torch starts 32 processes on each rank, 256 on a node of 8 GPUs
        set_defaults({_COMPILE_THREADS: str(min(_MOST_COMPILE_THREADS, world.num_threads))})
    fault = compile_fault(device) if is_wanted else ""
    if not fault:
        return is_wanted
    needed = "Triton and a C compiler" if device.type == "cuda" else "a C++ compiler"
    missing = f"torch.compile does not work on this {device.type}: {fault}. It needs {needed} and Python's headers"
    if is_asked:
        raise UserError(f"{missing} (Debian: apt-get install g++ python3-dev); install them, or --engine.compile off")
    log.warning("%s; the run continues without it, more slowly (--engine.compile off hides this)", missing)
    return False


def decide_precision(
    job: TrainingJob, manifest: CheckpointManifest | None, *, bf16: Bf16, say: bool = False
) -> tuple[TrainingJob, Decision]:
    """Returns the job with its precision decided, and the decision. With "auto", the checkpoint's precision is kept;
    without a checkpoint, the device decides. `say`: whether to log the reason."""
    recorded = manifest.job.precision if manifest else ""
    choice = choose_precision(job.engine.precision, recorded=recorded, bf16=bf16)
    if say and choice.message:
        log.log(logging.WARNING if choice.is_warning else logging.INFO, choice.message)
    decided = replace(job, engine=replace(job.engine, precision=choice.precision))
    why = choice.message or AS_THE_JOB_SAYS
    return decided, Decision(setting="engine.precision", value=choice.precision, why=why)


@dataclass(frozen=True, kw_only=True)
class PrecisionChoice:
    """The precision of a run. `message`: the reason; empty if the job names a precision that is fine on these devices.
    `is_warning`: whether the precision is slow on them."""

    precision: Precision
    message: str = ""
    is_warning: bool = False


def choose_precision(wanted: Literal["auto", "bf16", "fp32"], *, recorded: str, bf16: Bf16) -> PrecisionChoice:
    """Returns the precision to train in, and why. `wanted`: what the job says. `recorded`: the precision of the
    checkpoint that the run continues from; empty if there is none. `bf16`: whether the devices of the ranks compute
    bf16 natively, and why."""
    if wanted != "auto":
        return _as_demanded(wanted, recorded=recorded, bf16=bf16)
    if recorded in ("bf16", "fp32"):
        return _as_recorded("bf16" if recorded == "bf16" else "fp32", bf16=bf16)
    precision: Precision = "bf16" if bf16.is_native else "fp32"
    return PrecisionChoice(precision=precision, message=f"precision {precision}: {bf16.reason}")


def _as_demanded(wanted: Precision, *, recorded: str, bf16: Bf16) -> PrecisionChoice:
    before = f" (the run began with {recorded})" if recorded not in ("", wanted) else ""
    if wanted == "bf16" and not bf16.is_native:
        advice = "" if recorded == "bf16" else "; --engine.precision auto would take fp32"
        message = f"precision bf16, as the job says{before}, though {bf16.reason}{advice}"
        return PrecisionChoice(precision=wanted, message=message, is_warning=True)
    return PrecisionChoice(precision=wanted, message=f"precision {wanted}, as the job says{before}" if before else "")


def _as_recorded(recorded: Precision, *, bf16: Bf16) -> PrecisionChoice:
    message = f"precision {recorded}, as when the run started"
    if (recorded == "bf16") == bf16.is_native:
        return PrecisionChoice(precision=recorded, message=message)
    is_slow = recorded == "bf16"
    return PrecisionChoice(precision=recorded, message=f"{message}, though {bf16.reason}", is_warning=is_slow)


def decide_engine(undecided: Undecided) -> tuple[TrainingJob, BatchPlan, list[Decision]]:
    """Makes the decisions of STEPS, in their order. Returns the decided job and plan, and the decisions. Raises
    UserError or WillNotSucceedError, the same on every rank, if a setting of the job cannot be met or gradients are
    wrong. Collective."""
    now, decisions = undecided, []
    for setting, decide in STEPS:
        now, why = decide(now)
        value = now.plan.micro_batch if setting == "micro_batch" else getattr(now.job.engine, setting.partition(".")[2])
        decisions.append(Decision(setting=setting, value=value, why=why))
    return now.job, now.plan, decisions


def _decide_recomputation(now: Undecided) -> tuple[Undecided, str]:
    if now.job.engine.activation_checkpointing != "auto":
        return now, AS_THE_JOB_SAYS
    recomputed = agreed_recomputation(now.job, now.plan, now.budget, now.world, record=now.record)
    if now.world.is_first and recomputed != "off":
        log.info("the backward pass recomputes: %s (engine.activation_checkpointing auto)", recomputed)
    return replace(now, job=with_recomputed(now.job, recomputed)), "by what fits the memory"


def _decide_micro_batch(now: Undecided) -> tuple[Undecided, str]:
    fit = agreed_fit(now.job, now.plan, now.budget, now.world, record=now.record)
    return replace(now, plan=fit.plan), fit.why


def _decide_attention(now: Undecided) -> tuple[Undecided, str]:
    job = with_attention(now.job, now.world, is_compiled=now.is_compiled, record=now.record)
    measured = "PyTorch chooses" if job.engine.attention == "auto" else "the fastest of those that all ranks have"
    return replace(now, job=job), AS_THE_JOB_SAYS if now.job.engine.attention != "auto" else measured


def _decide_compile(now: Undecided) -> tuple[Undecided, str]:
    engine = now.job.engine
    if engine.compile != "auto":
        return now, AS_THE_JOB_SAYS
    engine = replace(engine, compile="on" if now.is_compiled else "off")
    return replace(now, job=replace(now.job, engine=engine)), "on GPUs with ZeRO-1 and 2, if it works"


def _decide_overlap(now: Undecided) -> tuple[Undecided, str]:
    is_asked = now.job.engine.overlap == "auto"
    why = "on GPUs, if gradients are checked and the check passes with it" if is_asked else AS_THE_JOB_SAYS
    return replace(now, job=with_checked_overlap(now.job, now.plan, now.world)), why


# The check of gradients comes last, because it computes with the kernel and the compiler that the run uses.
STEPS: tuple[tuple[str, Callable[[Undecided], tuple[Undecided, str]]], ...] = (
    ("engine.activation_checkpointing", _decide_recomputation),
    ("micro_batch", _decide_micro_batch),
    ("engine.attention", _decide_attention),
    ("engine.compile", _decide_compile),
    ("engine.overlap", _decide_overlap),
)


def with_attention(
    job: TrainingJob, world: World, *, is_compiled: bool = False, record: Mapping[str, Any] | None = None
) -> TrainingJob:
    """Returns the job with its attention kernel decided, and makes this process use that kernel. "auto" stays "auto" on
    CPUs, for ResNets and for deterministic runs. The job's precision must be decided. `is_compiled`: whether the blocks
    are compiled. `record`: the record of the checkpoint to continue, if there is one; "auto" keeps its kernel if that
    is still about as fast as the fastest. A kernel must support each number of tokens that the run's steps and its
    evaluations have. Raises UserError if a rank's device or the model does not allow the kernel that the job names.
    Collective."""
    wanted, model = job.engine.attention, job.model
    if world.device.type != "cuda":
        if wanted != "auto":
            raise UserError(
                f"engine.attention is {wanted!r}, but a CPU has one way to compute attention; allowed here: auto"
            )
        return job
    # A deterministic run cannot depend on measured times, which differ from start to start.
    if model.is_bit or (wanted == "auto" and job.engine.deterministic):
        return job
    sized, num_tokens = _lengths_of(job)
    num_heads, dtype = model.size.num_heads, torch.bfloat16 if job.engine.precision == "bf16" else torch.float32

    def tried(name: str, num_tokens: int, **how: Any) -> float | str:
        shape = max(1, _TRIED_TOKENS // num_tokens), num_heads, num_tokens, model.size.width // num_heads
        layer = partial(AttentionAlone, sized[num_tokens])
        return kernel_seconds(name, shape, dtype=dtype, device=world.device, layer=layer, **how)

    def seconds_or_fault(name: str) -> float | str:
        """Times the kernel for the usual number of tokens, and tries it for the others, at which a step would fail or
        take another kernel. flex is not tried for these: it supports any number, and takes long to compile."""
        for other in sized if name != FLEX else ():
            if other != num_tokens and isinstance(fault := tried(name, other, num_rounds=1), str):
                return f"{other} tokens: {fault}"
        return tried(name, num_tokens, is_compiled=is_compiled)

    # Measuring should take two seconds at most, but compiling flex takes longer.
    names = [name for name in KERNELS if name not in BY_NAME_ALONE] if wanted == "auto" else [wanted]
    found = {name: seconds_or_fault(name) for name in names}
    seconds = {name: each for name, each in found.items() if not isinstance(each, str)}
    why = "; ".join(each for each in found.values() if isinstance(each, str))
    # Ranks may measure differently, or not have a kernel. All ranks take rank 0's choice among the kernels that all
    # have, so that they compute the same bits.
    of_ranks = gather_json({"seconds": seconds, "why": why}, device=world.device)
    shared = [name for name in names if all(name in each["seconds"] for each in of_ranks)]
    if not shared:
        rank, lacking = min(enumerate(of_ranks), key=lambda each: len(each[1]["seconds"]))
        lengths = " or ".join(map(str, sorted(sized)))
        raise UserError(
            f"engine.attention is {wanted!r}, which the GPU of rank {rank} cannot compute for {lengths} tokens of "
            f"{num_heads} heads of width {model.size.width // num_heads} in {job.engine.precision} "
            f"({lacking['why']}); allowed: auto, or another kernel"
        )
    recorded = recorded_kernel(record or {})
    best = best_kernel({name: of_ranks[0]["seconds"][name] for name in shared}, recorded=recorded)
    if world.is_first:
        num_images = max(1, _TRIED_TOKENS // num_tokens)
        said = ", ".join(f"{name} {1000 * each:.3g} ms" for name, each in seconds.items())
        before = f"; the checkpoint has {recorded}" if recorded else ""
        log.info("attention by %s (engine.attention %s%s; %d images: %s)", best, wanted, before, num_images, said)
    use_kernel(best)
    torch.cuda.empty_cache()  # the kernel "math" may have taken gigabytes
    return replace(job, engine=replace(job.engine, attention=best))  # type: ignore[arg-type]  # one of KERNELS


def _lengths_of(job: TrainingJob) -> tuple[dict[int, ModelConfig], int]:
    """Returns the numbers of tokens of one attention in a run's steps and evaluations, each with the model at the image
    and patch size that has it, and the number for which a kernel is chosen: that of the smallest patch size, whose
    steps take most of the time, and with patch dropout, that of the steps before `whole_steps`."""

    def length(num_patches: int, model: ModelConfig) -> int:
        return max(model.grid) if model.attention == "axial" else model.num_prefix_tokens + num_patches

    sizes = sizes_of_steps(job.tokens, job.model, num_steps=job.steps)
    in_evaluations = math.prod(job.model.grid), job.model
    sized = {length(num_patches, model): model for num_patches, model in (in_evaluations, *sizes.items())}
    densest = job.with_most_tokens
    num_stay = densest.phases[0].num_stay
    return sized, length(math.prod(densest.model.grid) if num_stay is None else num_stay, densest.model)


def recorded_kernel(record: Mapping[str, Any]) -> str:
    """Returns the attention kernel that a checkpoint's record names; empty if it names none."""
    engine = record.get("engine")
    name = engine.get("attention") if isinstance(engine, dict) else None
    return name if isinstance(name, str) and name in KERNELS else ""


def with_checked_overlap(job: TrainingJob, plan: BatchPlan, world: World) -> TrainingJob:
    """Returns the job with `engine.overlap` decided, and checks its gradients if a check is due. "auto" becomes "on"
    only if `overlaps` returns True and the check passes with overlap. Raises WillNotSucceedError if the gradients are
    wrong. Collective."""
    is_checked = checks_gradients(job.engine, plan, world.device)
    is_asked = job.engine.overlap == "auto"
    if is_asked:
        job = _with_overlap(job, is_on=overlaps(plan, world.device, is_checked=is_checked))
    if not is_checked:
        return job
    try:
        check_gradients(job, plan, world)
    except WillNotSucceedError as error:
        if not is_asked or job.engine.overlap == "off":
            raise
        if world.is_first:
            log.warning("engine.overlap auto is off: %s", error)
        job = _with_overlap(job, is_on=False)
        check_gradients(job, plan, world)
    if is_asked and world.is_first and job.engine.overlap == "on":
        log.info("gradients are added up during the backward pass (engine.overlap auto)")
    return job


def _with_overlap(job: TrainingJob, *, is_on: bool) -> TrainingJob:
    return replace(job, engine=replace(job.engine, overlap="on" if is_on else "off"))

"""What a start decides of what the job leaves open: one function for each decision, in their order.

    setting             decided by            once this is known
    model.num_classes   decide_classes        the data
    engine.compile      will_compile          the device, before the ranks join: all must find the same
    engine.precision    decide_precision      the checkpoint; RUN/job.yaml has it from then on
    micro_batch         agreed_fit            the memory of every rank
    engine.attention    with_attention        what each kernel takes on the GPUs of all ranks
    engine.overlap      with_checked_overlap  the gradients of a small copy of the model, with it and without

The last three and `compile` are `STEPS`. Every rank decides alike. RUN/starts.jsonl has all decisions of a start, with
their reasons. What the rooms above change of a job, such as the warm-up of a shorter run, they decide before.
"""

import logging
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
    FLEX,
    KERNELS,
    best_kernel,
    kernel_seconds,
    use_kernel,
)
from pipeline.models.build import compile_fault
from pipeline.models.vit import AttentionAlone
from pipeline.ranks.collectives import gather_json
from pipeline.ranks.host import Bf16
from pipeline.ranks.world import World, set_defaults
from pipeline.training.fitting.fit import Budget, agreed_fit
from pipeline.training.settings.job import EngineConfig, TrainingJob
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.gradient_check import check_gradients, checks_gradients, overlaps
from shards.class_names import near_equal
from shards.config_values import shown_value
from shards.dataset import Dataset
from shards.errors import UserError, WillNotSucceedError

log = logging.getLogger(__name__)
Precision = Literal["bf16", "fp32"]
AS_THE_JOB_SAYS = "as the job says"
# Kernels must outlast their launches: of 8 images, an H200 found now one kernel and now another the fastest.
_TRIED_TOKENS = 1 << 14
_COMPILE_THREADS, _MOST_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS", 8
_UNEVEN = 5.0  # the images of the largest class over those of the smallest


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a start decided: a field of the job, its value, and the reason."""

    setting: str
    value: str | int
    why: str


@dataclass(frozen=True, kw_only=True)
class Undecided:
    """A job whose classes and precision are decided, and what the other decisions depend on: the plan of the whole
    share, this rank's memory, whether blocks will be compiled, and the record of the checkpoint to continue, if any."""

    job: TrainingJob
    plan: BatchPlan
    budget: Budget
    world: World
    is_compiled: bool
    record: Mapping[str, Any] | None


def decide_classes(
    job: TrainingJob, data: TrainingData, held_out: Sequence[Dataset], *, say: bool
) -> tuple[TrainingJob, Decision]:
    """The job with the data's number of classes, unless it has its own; more than the data has are a warning (`say`:
    log it). UserError for fewer, and for held-out datasets with other labels."""
    setting = "model.num_classes"
    if job.model.masked_patches:
        return job, Decision(setting=setting, value=job.model.num_classes, why="the model predicts colours of patches")
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
    """A note on the largest and the smallest class of images, with the flag that weights them; empty if the one has
    less than five times as many as the other."""
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
    """What a user should know of a model with more classes than its data has."""
    unused = f"{of_model - of_data} of its outputs never {'has' if of_model - of_data == 1 else 'have'} an image"
    return f"the data has {of_data} classes, the model {of_model}: {unused}; --model.num-classes 0 takes the data's"


def will_compile(config: EngineConfig, world: World) -> bool:
    """Whether a run on this rank's device compiles its blocks: "auto" if it works. UserError if "on" does not."""
    device = world.device
    is_wanted = config.compile == "on" or (config.compile == "auto" and device.type == "cuda" and config.zero_stage < 3)
    # torch proposes TF32 to everybody who compiles: bf16 runs have no use for it, and fp32 runs chose not to have it.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)
    if is_wanted:  # torch would start 32 processes on each rank, 256 on a node of 8 GPUs
        set_defaults({_COMPILE_THREADS: str(min(_MOST_COMPILE_THREADS, world.num_threads))})
    fault = compile_fault(device) if is_wanted else ""
    if not fault:
        return is_wanted
    needed = "Triton and a C compiler" if device.type == "cuda" else "a C++ compiler"
    missing = f"torch.compile does not work on this {device.type}: {fault}. It needs {needed} and Python's headers"
    if config.compile == "on":
        raise UserError(f"{missing} (Debian: apt-get install g++ python3-dev); install them, or --engine.compile off")
    log.warning("%s; the run continues without it, more slowly (--engine.compile off hides this)", missing)
    return False


def decide_precision(
    job: TrainingJob, manifest: CheckpointManifest | None, *, bf16: Bf16, say: bool = False
) -> tuple[TrainingJob, Decision]:
    """The job with its precision decided: "auto" takes that of the checkpoint, if there is one. `say`: log the
    reason."""
    recorded = manifest.job.precision if manifest else ""
    choice = choose_precision(job.engine.precision, recorded=recorded, bf16=bf16)
    if say and choice.message:
        log.log(logging.WARNING if choice.is_warning else logging.INFO, choice.message)
    decided = replace(job, engine=replace(job.engine, precision=choice.precision))
    why = choice.message or AS_THE_JOB_SAYS
    return decided, Decision(setting="engine.precision", value=choice.precision, why=why)


@dataclass(frozen=True, kw_only=True)
class PrecisionChoice:
    """`message`: the reason (empty if the job names a precision that is fine here). `is_warning`: it is slow here."""

    precision: Precision
    message: str = ""
    is_warning: bool = False


def choose_precision(wanted: Literal["auto", "bf16", "fp32"], *, recorded: str, bf16: Bf16) -> PrecisionChoice:
    """`wanted`: what the job says. `recorded`: the precision in the checkpoint that the run continues from, empty
    if it starts. `bf16`: what every rank's device can do."""
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
    """Decides, in the order of STEPS, what the engine needs to know. Returns the job and the plan as the engine takes
    them, and the decisions. UserError or WillNotSucceedError, the same on every rank. Collective."""
    now, decisions = undecided, []
    for setting, decide in STEPS:
        now, why = decide(now)
        value = now.plan.micro_batch if setting == "micro_batch" else getattr(now.job.engine, setting.partition(".")[2])
        decisions.append(Decision(setting=setting, value=value, why=why))
    return now.job, now.plan, decisions


def _decide_micro_batch(now: Undecided) -> tuple[Undecided, str]:
    fit = agreed_fit(now.job, now.plan, now.budget, now.world, record=now.record)
    return replace(now, plan=fit.plan), fit.why


def _decide_attention(now: Undecided) -> tuple[Undecided, str]:
    job = with_attention(now.job, now.world, is_compiled=now.is_compiled, record=now.record)
    measured = "PyTorch chooses" if job.engine.attention == "auto" else "the fastest of those that all ranks have"
    return replace(now, job=job), AS_THE_JOB_SAYS if now.job.engine.attention != "auto" else measured


def _decide_compile(now: Undecided) -> tuple[Undecided, str]:
    is_asked = now.job.engine.compile == "auto"
    engine = replace(now.job.engine, compile="on" if now.is_compiled else "off")
    why = "on GPUs with ZeRO-1 and 2, if it works" if is_asked else AS_THE_JOB_SAYS
    return replace(now, job=replace(now.job, engine=engine)), why


def _decide_overlap(now: Undecided) -> tuple[Undecided, str]:
    is_asked = now.job.engine.overlap == "auto"
    why = "on GPUs, if gradients are checked and the check passes with it" if is_asked else AS_THE_JOB_SAYS
    return replace(now, job=with_checked_overlap(now.job, now.plan, now.world)), why


# The check of gradients computes as the run does, so it comes after the kernel and the compiler are decided.
STEPS: tuple[tuple[str, Callable[[Undecided], tuple[Undecided, str]]], ...] = (
    ("micro_batch", _decide_micro_batch),
    ("engine.attention", _decide_attention),
    ("engine.compile", _decide_compile),
    ("engine.overlap", _decide_overlap),
)


def with_attention(
    job: TrainingJob, world: World, *, is_compiled: bool = False, record: Mapping[str, Any] | None = None
) -> TrainingJob:
    """The job with its kernel of attention decided, which this process uses from now on; "auto" stays where PyTorch
    chooses, or nothing is to be chosen. `job`: with its precision decided. `is_compiled`: whether its blocks are.
    `record`: of the checkpoint to continue, if any, whose kernel "auto" keeps if it is still about as fast. UserError
    if the job names a kernel that this device lacks. Collective."""
    wanted, model = job.engine.attention, job.model
    if world.device.type != "cuda":
        if wanted != "auto":
            raise UserError(
                f"engine.attention is {wanted!r}, but a CPU has one way to compute attention; allowed here: auto"
            )
        return job
    # What is measured may differ from start to start.
    if model.is_bit or (wanted == "auto" and job.engine.deterministic):
        return job
    if wanted == FLEX and (model.qk_norm or model.position in ("relative", "rope2d")):
        raise UserError(
            f"engine.attention is 'flex' with model.qk_norm {model.qk_norm} and model.position {model.position!r}; "
            "allowed: neither qk_norm nor positions within attention (relative, rope2d): give another kernel, or auto"
        )
    height, width = model.grid
    num_tokens = max(model.grid) if model.attention == "axial" else model.num_prefix_tokens + height * width
    num_images, num_heads = max(1, _TRIED_TOKENS // num_tokens), model.size.num_heads
    shape = (num_images, num_heads, num_tokens, model.size.width // num_heads)
    dtype = torch.bfloat16 if job.engine.precision == "bf16" else torch.float32
    # A start should measure for two seconds at most, and flex is compiled for longer.
    names = [name for name in KERNELS if name != FLEX] if wanted == "auto" else [wanted]
    layer = partial(AttentionAlone, model)
    found = {
        name: kernel_seconds(name, shape, dtype=dtype, device=world.device, layer=layer, is_compiled=is_compiled)
        for name in names
    }
    seconds = {name: each for name, each in found.items() if not isinstance(each, str)}
    why = "; ".join(each for each in found.values() if isinstance(each, str))
    # Ranks may measure differently, or lack a kernel: all take the one that is the first rank's choice of those that
    # all have, since the bits should be the same.
    of_ranks = gather_json({"seconds": seconds, "why": why}, device=world.device)
    shared = [name for name in names if all(name in each["seconds"] for each in of_ranks)]
    if not shared:
        rank, lacking = min(enumerate(of_ranks), key=lambda each: len(each[1]["seconds"]))
        raise UserError(
            f"engine.attention is {wanted!r}, which the GPU of rank {rank} cannot compute for {shape[2]} tokens of "
            f"{shape[1]} heads of width {shape[3]} in {job.engine.precision} ({lacking['why']}); allowed: auto, or "
            "another kernel"
        )
    recorded = recorded_kernel(record or {})
    best = best_kernel({name: of_ranks[0]["seconds"][name] for name in shared}, recorded=recorded)
    if world.is_first:
        said = ", ".join(f"{name} {1000 * each:.3g} ms" for name, each in seconds.items())
        before = f"; the checkpoint has {recorded}" if recorded else ""
        log.info("attention by %s (engine.attention %s%s; %d images: %s)", best, wanted, before, shape[0], said)
    use_kernel(best)
    torch.cuda.empty_cache()  # plain products may have taken gigabytes
    return replace(job, engine=replace(job.engine, attention=best))  # type: ignore[arg-type]  # one of KERNELS


def recorded_kernel(record: Mapping[str, Any]) -> str:
    """The kernel that computed attention in the run of a checkpoint's record; empty if it does not say so."""
    engine = record.get("engine")
    name = engine.get("attention") if isinstance(engine, dict) else None
    return name if isinstance(name, str) and name in KERNELS else ""


def with_checked_overlap(job: TrainingJob, plan: BatchPlan, world: World) -> TrainingJob:
    """The job with its overlap decided, after the check of its gradients if that is due. "auto" is off where the check
    fails with it and passes without, and where nothing is checked. Collective."""
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

"""What a run chooses by its device: the precision, which it keeps once it has started, and whether blocks are compiled.

Every rank chooses alike (prepare.py).
"""

import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from pipeline.checkpoints.manifest import CheckpointManifest
from pipeline.models.attention import (
    FLEX,
    KERNELS,
    best_kernel,
    kernel_in_use,
    kernel_seconds,
    kernel_that_ran,
    kernels_seen,
    use_kernel,
)
from pipeline.models.build import Model, compile_blocks, compile_fault
from pipeline.models.config import ModelConfig
from pipeline.models.float8 import float8_fault, use_float8
from pipeline.models.vit import AttentionAlone
from pipeline.ranks.collectives import gather_json
from pipeline.ranks.host import Bf16
from pipeline.ranks.rendezvous import ranks_words
from pipeline.ranks.world import World, set_defaults
from pipeline.training.settings.job import EngineConfig, TrainingJob
from shards.errors import UserError

log = logging.getLogger(__name__)
Precision = Literal["bf16", "fp32"]
# Kernels must outlast their launches: of 8 images, an H200 found now one kernel and now another the fastest.
_TRIED_TOKENS = 1 << 14
_MOST_LOOKS = 3  # at steps in which something is compiled
_COMPILE_THREADS, _MOST_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS", 8


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


def watches_kernel(job: TrainingJob, world: World) -> bool:
    """Whether it is looked up which kernel computes attention: on GPUs, which have several."""
    return world.device.type == "cuda" and not job.model.is_bit


class KernelWatch:
    """Finds out which kernel computes attention in a run's steps, and puts it into `engine`, the part of a checkpoint's
    record: a compiler's cache may hold another one than was chosen. It looks once, in the first step in which nothing
    is compiled, since tracing a block calls kernels, too."""

    def __init__(self, engine: dict[str, Any], model: ModelConfig, world: World) -> None:
        self._engine, self._model, self._world = engine, model, world
        self._looks_left = _MOST_LOOKS

    @contextmanager
    def step(self) -> Iterator[None]:
        """The forward and backward passes of a step are inside."""
        if not self._looks_left or torch._C._autograd._profiler_enabled():  # no second profiler beside that of a trace
            yield
            return
        num_graphs = _num_graphs()
        with kernels_seen() as calls:
            yield
        self._looks_left -= 1
        if self._looks_left and _num_graphs() > num_graphs:
            return
        self._looks_left = 0
        self._put_on_record(kernel_that_ran(calls, num_layers=self._model.num_blocks))

    def _put_on_record(self, ran: str) -> None:
        self._engine["attention"] = ran
        if (chosen := kernel_in_use()) not in ("", ran):
            log.warning(
                "rank %d: attention is computed by %s, although %s was chosen: the compiler's cache may hold blocks of "
                "another version; delete it (TORCHINDUCTOR_CACHE_DIR), or give --engine.compile off",
                self._world.rank,
                ran,
                chosen,
            )
        elif self._world.is_first:
            log.info("attention is computed by %s, by PyTorch's profiler", ran)


def _num_graphs() -> int:
    """Graphs that this process has compiled so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def refuse_missing_float8(job: TrainingJob, world: World, *, is_compiled: bool) -> None:
    """UserError, the same on every rank, if the job asks for float8 and a rank lacks it. Rank 0 warns of float8 in
    blocks that are not compiled. `job`: with its precision decided. Collective."""
    wanted = job.engine.float8
    if wanted == "off":
        return
    faults: list[str] = gather_json(float8_fault(world.device), device=world.device)
    if any(faults):
        lacking = [rank for rank, fault in enumerate(faults) if fault]
        why = "; ".join(dict.fromkeys(filter(None, faults)))
        raise UserError(
            f"engine.float8 is {wanted!r}, which {ranks_words(lacking)} of {world.num_ranks} cannot compute: {why}; "
            "allowed here: off"
        )
    if job.engine.precision != "bf16":
        raise UserError(
            f"engine.float8 is {wanted!r}, but the run's precision is {job.engine.precision}; allowed: bf16: give "
            "--engine.precision bf16, or --engine.float8 off"
        )
    if not is_compiled and world.is_first:
        log.warning(
            "engine.float8 is %r in blocks that are not compiled: rounding to float8 then usually takes longer than "
            "its products save; give --engine.compile on",
            wanted,
        )


def refuse_missing_graphs(job: TrainingJob, world: World, *, is_compiled: bool) -> None:
    """UserError, the same on every rank, if the job asks for CUDA graphs where there are none."""
    if job.engine.cuda_graphs and not (world.device.type == "cuda" and is_compiled):
        what = "a CPU has none" if world.device.type != "cuda" else "the blocks are not compiled"
        raise UserError(f"engine.cuda_graphs is on, but {what}; allowed here: off")


def set_up_blocks(model: Model, config: EngineConfig, *, is_compiled: bool, device: torch.device) -> None:
    """Gives a model's blocks the layers and the kernels that the engine is to have."""
    if config.float8 != "off":
        use_float8(model, config.float8, is_emulated=device.type == "cpu")
    if is_compiled:
        # As torchtitan does: with fused norms that were not rounded, rowwise scales made losses NaN (pytorch #150859).
        compile_blocks(
            model,
            deterministic=config.deterministic,
            rounds_as_eager=config.float8 == "rowwise",
            cuda_graphs=config.cuda_graphs,
            on_gpu=device.type == "cuda",
        )


def with_precision(
    job: TrainingJob, manifest: CheckpointManifest | None, *, bf16: Bf16, say: bool = False
) -> TrainingJob:
    """The job with its precision decided: "auto" takes that of the checkpoint, if there is one. `say`: log the
    reason."""
    recorded = manifest.job.precision if manifest else ""
    choice = choose_precision(job.engine.precision, recorded=recorded, bf16=bf16)
    if say and choice.message:
        log.log(logging.WARNING if choice.is_warning else logging.INFO, choice.message)
    return replace(job, engine=replace(job.engine, precision=choice.precision))

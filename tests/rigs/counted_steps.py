"""What one training step does beside computing: collectives with their bytes, and waits of the host for the device.

The process group is torch's fake one: rank 0 of any number of ranks that exist in name only, so 512 of them fit here.
The accelerator is DeepSpeed's for CPUs, but it says that it works asynchronously, as a GPU does, and its streams and
events do nothing but count who waits for them. Reading a number from a tensor is a wait, too. Not seen: copies from
pageable memory, and waits inside libraries.
"""

import os
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.engine_arms import be_asynchronous
from jobs.recipes.pretrain import digits_smoke
from pipeline.data.batches import COUNT_NAMES, Batch
from pipeline.models.build import build_model
from pipeline.models.config import ModelConfig
from pipeline.models.flops import num_parameters
from pipeline.ranks.streams import HostStreams
from pipeline.training.controls import Controls
from pipeline.training.gradients import Gradients
from pipeline.training.reporting.norms import Norms, PositionView
from pipeline.training.settings.job import OptimizerConfig, TrainingJob
from pipeline.training.step import TrainStep
from pipeline.training.watchdog.stopping import StopRequest
from pipeline.training.zero import engine as engines
from pipeline.training.zero.batch_plan import BatchPlan
from pipeline.training.zero.step_times import StepTimes
from tests.rigs.forks import forks
from tests.rigs.processes import one_world

MODEL = ModelConfig(name="vit", image_size=16, num_classes=10, patch=8, depth=2, width=320, mlp_width=640, num_heads=4)
DEEP = replace(MODEL, depth=8, width=80, mlp_width=320, num_heads=2)
IMAGES = 2  # per micro-batch
_STEPS_BEFORE = 3  # stage 3 learns in the first ones in which order it needs the weights
_DUE = _STEPS_BEFORE + 2  # the step, from 1 on, that is due for all that is looked at now and then
_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__")
_ROOMS = ("/deepspeed/", "/pipeline/")
_WRAPPERS = ("/comm/", "nvtx")

Case = tuple[Literal[1, 2, 3], int]  # ZeRO stage, accumulation


@dataclass(frozen=True, kw_only=True)
class Counted:
    """By the function that calls: collectives (their kind, how often, bytes in all), and how often the host waits.
    `inside_bytes`: of the collectives that begin in the backward pass, before its last gradient. `num_operations`: all
    that the host has the device do, views among it."""

    collectives: dict[str, tuple[str, int, int]]
    waits: dict[str, int]
    inside_bytes: int
    num_operations: int


@dataclass(frozen=True, kw_only=True)
class CountedSteps:
    """A step in which nothing else is due, and one with norms by group and the positions' similarities."""

    plain: Counted
    due: Counted


def counted_steps(
    num_ranks: int, cases: list[Case], *, with_timer: bool = False, overlap: Literal["on", "off"] = "off"
) -> dict[Case, CountedSteps]:
    """Launches, and reads, two steps of a tiny model in bf16 for every case. `with_timer`: DeepSpeed's throughput timer
    is left on. `overlap`: that of the engine; on, with a deeper model and 13 buckets."""
    with ProcessPoolExecutor(1, mp_context=forks()) as pool:
        return pool.submit(_count, num_ranks, cases, with_timer, overlap).result(300)


def _count(
    num_ranks: int, cases: list[Case], with_timer: bool, overlap: Literal["on", "off"]
) -> dict[Case, CountedSteps]:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  # registers the backend

    if with_timer:
        real = engines.deepspeed_config
        engines.deepspeed_config = lambda *words, **more: {**real(*words, **more), "timers": {}}
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed insists on it
    waits: Counter[str] = Counter()
    be_asynchronous(lambda: waits.update([_caller()]))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    return {case: _of_one(num_ranks, case, waits, overlap) for case in cases}


def _of_one(num_ranks: int, case: Case, waits: Counter[str], overlap: Literal["on", "off"]) -> CountedSteps:
    step = _train_step(num_ranks, case, overlap)
    batches = _batches(step.gradients.plan)
    for _ in range(_STEPS_BEFORE):
        step.read(step.launch(next(batches)))
    plain, due = (_one_step(step, next(batches), waits) for _ in range(2))
    return CountedSteps(plain=plain, due=due)


def _one_step(step: TrainStep, batch: Batch, waits: Counter[str]) -> Counted:
    collectives: dict[str, tuple[str, int, int]] = {}
    waits.clear()
    counter = _Collectives(collectives)
    with counter, _Reads(waits):
        step.read(step.launch(batch))
    return Counted(
        collectives=collectives,
        waits=dict(waits),
        inside_bytes=counter.inside_bytes,
        num_operations=counter.num_operations,
    )


def _train_step(num_ranks: int, case: Case, overlap: Literal["on", "off"]) -> TrainStep:
    stage, accumulation = case
    world = replace(one_world(), num_ranks=num_ranks)
    plan = BatchPlan(
        global_batch=IMAGES * accumulation * num_ranks,
        micro_batch=IMAGES,
        accumulation=accumulation,
        num_ranks=num_ranks,
    )
    job = digits_smoke()
    engine = replace(job.engine, zero_stage=stage, precision="bf16", overlap=overlap)
    if overlap == "on":
        engine = replace(engine, reduce_bucket=num_parameters(DEEP) * 10 // 126)
    model = DEEP if overlap == "on" else MODEL
    job = replace(job, model=model, engine=engine, similarity_every_steps=_DUE)
    gradients = Gradients(job, plan, _engine(job, plan), world)
    counts = dict.fromkeys(COUNT_NAMES, 0.0)
    stream = SimpleNamespace(counts=lambda: counts, launched=lambda: None, streams=HostStreams())
    ledger = SimpleNamespace(time=lambda _: nullcontext())
    controls = SimpleNamespace(ledger=ledger, times=StepTimes(), request=lambda: StopRequest.NOTHING)
    return TrainStep(
        gradients,
        cast("Any", stream),
        cast("Controls", controls),
        norms=Norms(gradients.engine, every=_DUE, device=world.device),
        view=PositionView(job, gradients.engine, world, HostStreams()),
    )


def _engine(job: TrainingJob, plan: BatchPlan) -> engines.Engine:
    optimizer = OptimizerConfig(weight_decay=0.1)  # two groups of parameters, as in every recipe
    return engines.Engine(build_model(job.model), config=job.engine, plan=plan, optimizer=optimizer, clip_norm=1.0)


def _batches(plan: BatchPlan) -> Iterator[Batch]:
    for step in range(1000):
        yield Batch(
            step=step,
            images=torch.randint(0, 256, (plan.rank_batch, 16, 16, 3), dtype=torch.uint8),
            labels=torch.randint(0, 10, (plan.rank_batch, 1)),
            sample_ids=torch.arange(plan.rank_batch),
            datasets=torch.zeros(plan.rank_batch, dtype=torch.int64),
        )


def _caller() -> str:
    """The innermost function of DeepSpeed or ours that has led here: `stage3.py:step`."""
    for frame in reversed(traceback.extract_stack()):
        is_ours = any(room in frame.filename for room in _ROOMS) and not any(w in frame.filename for w in _WRAPPERS)
        if is_ours:
            return f"{frame.filename.rpartition('/')[2]}:{frame.name}"
    return "elsewhere"


def _is_in_backward() -> bool:
    """Whether a gradient that has just been computed has led here."""
    return any(frame.name == "reduce_ready_partitions_and_remove_grads" for frame in traceback.extract_stack())


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every collective with the bytes of its larger side."""

    def __init__(self, found: dict[str, tuple[str, int, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self.inside_bytes, self.num_operations = found, 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.num_operations += 1
        room, _, name = func._schema.name.partition("::")
        if room == "c10d":
            kind = name.strip("_").removesuffix("_base").replace("_", "")
            _, count, num_bytes = self.found.get(_caller(), (kind, 0, 0))
            self.found[_caller()] = (kind, count + 1, num_bytes + max(map(_bytes, args)))
            self.inside_bytes += _is_in_backward() * max(map(_bytes, args))
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Notes every value that is read from a tensor: on a GPU the host waits for it."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.waits[_caller()] += getattr(func, "__name__", "") in _READS
        self.waits += Counter()  # without zeros
        return func(*args, **(kwargs or {}))


def _bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0

"""Measures one part of `patchline doctor --gpu`. It runs in a separate process, because it may crash, hang or run out
of memory.

    python -P -m pipeline.machine.gpu_parts FILE '{"kind": "step", "device": "cuda", "model": "vit_b16"}'

The result is written to FILE as JSON, and the code of inductor's kernels next to it. A part that cannot be measured
raises an error, and the last line of its output says why.
"""

import contextlib
import hashlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.profiler import record_function

from pipeline.data.config import DataConfig
from pipeline.data.stream import train_batches
from pipeline.machine import gpu_time
from pipeline.machine.checks import version_of
from pipeline.machine.gpu_sizes import CODE_SUFFIX, KEPT_SUMS, LAUNCHED_UPDATES, MOST_CODE, AttentionShape, GpuPart
from pipeline.machine.probes import driver_text, driver_words
from pipeline.models import build_model
from pipeline.models.attention import KERNELS, kernel_seconds, kernel_that_ran, kernels_seen
from pipeline.models.float8 import float8_fault
from pipeline.models.flops import FORWARD_AND_BACKWARD, forward_flops
from pipeline.models.fused_mlp import fused_mlp_fault
from pipeline.models.loss import classification_loss
from pipeline.models.packed_attention import CUDNN_PACKED, FLASH3, packed_fault
from pipeline.planning.rates import rates_from, speeds_of
from pipeline.planning.step_time import EIGHT_A_NODE, gpu_of_device, step_time
from pipeline.ranks import world
from pipeline.ranks.host import free_port
from pipeline.training.decisions import with_attention
from pipeline.training.fitting.fit import gpu_budget
from pipeline.training.fitting.memory import Topology, memory_of
from pipeline.training.gradients import Gradients
from pipeline.training.kernels import set_up_blocks
from pipeline.training.settings.job import TrainingJob
from pipeline.training.zero import engine
from pipeline.training.zero.batch_plan import plan_batch
from pipeline.training.zero.engine import Engine
from pipeline.training.zero.update import class_without_waiting
from shards.errors import UserError
from shards.files.local_files import read_local_file

RATE = 1e-4
_SEED = 0
_WARM_UP_STEPS, _LOSSES = 3, 5
_ROUNDS = 5
_MICRO_BATCHES = (256, 128, 64, 32, 16, 8)
_PHOTOGRAPH = (375, 500)
_MOST_TRACE_BYTES = 1 << 30
_PROFILED_STEPS = 5  # of which the first and the last are left out
Result = dict[str, Any]


def main() -> None:
    """Measures the part that the command line names."""
    file, words = sys.argv[1:]
    part = GpuPart(**json.loads(words))
    logging.disable(logging.WARNING)
    place = world.current_world("cuda" if part.device == "cuda" else "cpu")
    result = KINDS[part.kind](part, place)
    if place.is_first:
        Path(file).write_text(json.dumps(result, allow_nan=False))
        if code := _inductor_code():
            Path(file).with_suffix(CODE_SUFFIX).write_text(code)


def device_facts(device: str) -> dict[str, Any]:
    """Returns facts about the device that is measured. Raises UserError if there is no GPU, unless `device` is cpu."""
    place = world.current_world("cpu" if device == "cpu" else "auto")
    if not (_is_gpu(place) or device == "cpu"):
        raise UserError("there is no GPU to measure; --device cpu tries every part at a small size")
    return {
        "device": place.device.type,
        "name": torch.cuda.get_device_name(place.device) if _is_gpu(place) else "CPU",
        "num_gpus": torch.cuda.device_count() if _is_gpu(place) else 0,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "driver": driver_words(driver_text()) if _is_gpu(place) else "",
        **{name: version_of(name) for name in ("patchline", "deepspeed", "triton")},
        "lacks": {
            "float8": float8_fault(place.device),
            "fused MLPs": fused_mlp_fault(place.device),
            **{name: packed_fault(name, place.device) for name in (FLASH3, CUDNN_PACKED)},
        },
    }


def source_digest() -> str:
    """Returns a short digest of the code that is measured, which changes more often than Patchline's version."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(read_local_file(file, most_bytes=MOST_CODE) for file in files)).hexdigest()[:12]


def step(part: GpuPart, place: world.World) -> Result:
    """Measures the step of one model as in a run: ZeRO-1 with fp32 masters on one rank. The batch stays on the
    device."""
    with _entered(place):
        return _step(part, place)


def determinism(part: GpuPart, place: world.World) -> Result:
    """Measures the step with deterministic kernels, and checks whether two runs with the same seed have losses with the
    same bits."""
    world.fix_kernels(place)
    losses = []
    with _entered(place):
        found = _step(part, place)
        for _ in range(2):
            run = _Run(_job(part, place), place, part)
            losses.append([float(run.step()).hex() for _ in range(_LOSSES)])
            run.free()
    return found | {"same_bits": losses[0] == losses[1]}


def rank(part: GpuPart, place: world.World) -> Result:
    """Measures the step of one rank of many, which has few images: launching it may take longer than computing it. The
    rank exchanges with itself through NCCL or gloo. It updates all of the model, of which one rank of many updates a
    part."""
    with _entered(replace(place, master_port=free_port()), has_backend=True):
        found = _step(part, place, look=partial(_launching, place=place))
        backend = dist.get_backend()
    return found | {"backend": backend}


def _launching(run: "_Run", place: world.World) -> Result:
    """Measures how long the host needs to launch a step onto an idle device, including its waits for the device, and
    how long the update takes alone."""
    launches, updates = [], []
    for _ in range(_ROUNDS):
        began = _waited(place)
        run.step()
        launches.append(time.perf_counter() - began)
        run.accumulate()
        began = _waited(place)
        run.update()
        updates.append(_waited(place) - began)
    return {
        "host_milliseconds": round(1000 * statistics.median(launches), 2),
        "update_milliseconds": round(1000 * statistics.median(updates), 2),
    }


def _step(part: GpuPart, place: world.World, *, look: Callable[["_Run"], Result] = lambda _: {}) -> Result:
    """Measures a step, in a process group. `look`: measures more, with the same run."""
    job = _job(part, place)
    run = _Run(job, place, part)
    began = _waited(place)
    run.step()
    first = _waited(place) - began
    for _ in range(_WARM_UP_STEPS - 2):
        run.step()
    with kernels_seen() as calls:  # not in the first step, in which blocks are compiled
        run.step()
    rates = _rates(run.step, job.global_batch, part.seconds, place)
    allocated = torch.cuda.max_memory_allocated(place.device) if _is_gpu(place) else None
    more = look(run)
    try:
        profiled = _account(run, place)
    except Exception as error:  # from whatever fails in the profiler; the rates are measured
        profiled = {"failed": f"{type(error).__name__}: {error}"}
    run.free()
    return {
        "micro_batch": job.global_batch,
        "attention": "none" if job.model.is_bit else kernel_that_ran(calls, num_layers=job.model.num_blocks),
        "first_step_seconds": round(first, 2),
        "images_per_second": rates,
        "allocated_bytes": allocated,
        "predicted_bytes": memory_of(job, _topology(place), micro_batch=job.global_batch).peak,
    } | {**_beside_plan(part, job, statistics.median(rates), place), **more, "time": profiled}


def _account(run: "_Run", place: world.World) -> Result:
    """Profiles a few steps of a run that has made its first ones. Returns what they spent their time on."""
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, *([activity.CUDA] if _is_gpu(place) else [])]
    world.set_defaults(world.QUIET_PROFILER)
    _wait(place)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(_PROFILED_STEPS):
            with record_function(gpu_time.STEP):
                run.step()
        _wait(place)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        trace = json.loads(read_local_file(file, most_bytes=_MOST_TRACE_BYTES))
    gigabytes = gpu_time.kernel_gigabytes(_inductor_code(without=run.earlier))
    return gpu_time.account_of(trace, gigabytes=gigabytes, is_gpu=_is_gpu(place))


def _inductor_code(*, without: Collection[str] = ()) -> str:
    """Returns the code of all kernels that inductor has written for this process; empty if it has written none.
    `without`: files that are left out."""
    codes = (read_local_file(Path(file), most_bytes=MOST_CODE).decode() for file in _inductor_files(without=without))
    return "\n".join(codes)[:MOST_CODE]


def _inductor_files(*, without: Collection[str] = ()) -> list[str]:
    cache = sys.modules.get("torch._inductor.codecache")
    files = dict.fromkeys(str(module.__file__) for module in cache.PyCodeCache.modules) if cache else {}
    return [file for file in files if file not in without]


def zero(part: GpuPart, place: world.World) -> Result:
    """Measures the losses and the speed of a model in one ZeRO stage, on one rank that exchanges with itself through
    NCCL or gloo."""
    job = _job(part, place)
    with _entered(replace(place, master_port=free_port()), has_backend=True):
        run = _Run(job, place, part)
        losses = [float(run.step()) for _ in range(_LOSSES)]
        rates = _rates(run.step, job.global_batch, part.seconds, place)
        backend = dist.get_backend()
    return {"stage": job.engine.zero_stage, "backend": backend, "losses": losses, "images_per_second": rates}


def together(part: GpuPart, place: world.World) -> Result:
    """Measures the images per second of all ranks of this machine, which add up their gradients in each step. Every
    round has `repeats` steps, because all ranks must make the same number and their clocks differ."""
    job = _job(part, place)
    with _entered(place):
        run = _Run(job, place, part)
        for _ in range(_WARM_UP_STEPS - 1):
            run.step()
        with kernels_seen() as calls:
            run.step()
        rates = []
        for _ in range(_ROUNDS):
            began = _waited(place)
            for _ in range(part.repeats):
                run.step()
            seconds = _waited(place) - began
            rates.append(round(part.repeats * job.global_batch * place.num_ranks / seconds, 4))
        backend = dist.get_backend()
    return {
        "ranks": place.num_ranks,
        "backend": backend,
        "images_per_second": rates,
        "micro_batch": job.global_batch,
        "attention": kernel_that_ran(calls, num_layers=job.model.num_blocks),
    }


def attention(part: GpuPart, place: world.World) -> Result:
    """Measures the milliseconds of a forward and backward pass of attention, for each shape and kernel. For a kernel
    that cannot be used, gives the reason instead."""
    dtype = torch.bfloat16 if _is_gpu(place) else torch.float32
    found: Result = {}
    for shape in map(AttentionShape.from_list, part.shapes):
        size = (shape.batch, shape.heads, shape.tokens, shape.width)
        times = {
            name: kernel_seconds(name, size, dtype=dtype, device=place.device, is_compiled=part.compiled)
            for name in KERNELS
        }
        found[shape.name] = {
            name: each if isinstance(each, str) else round(1000 * each, 4) for name, each in times.items()
        }
    return {"milliseconds": found}


def loader(part: GpuPart, place: world.World) -> Result:
    """Measures the images per second that this machine's cores read, decode and augment for one rank while nothing
    trains."""
    config, num_batches = DataConfig(lanes=1, num_threads=place.num_threads), count()
    with tempfile.TemporaryDirectory() as folder:
        batches = train_batches(
            part.data_url,
            global_batch=part.batch,
            image_size=part.image_size,
            config=config,
            quarantine=Path(folder, "quarantine.jsonl"),
        )
        with batches:
            for _ in range(_WARM_UP_STEPS):
                next(batches)
            before = time.process_time()
            rates = _rates(lambda: (next(batches), next(num_batches)), part.batch, part.seconds, place)
            cpu = time.process_time() - before
    num_images = part.batch * next(num_batches)
    return {
        "images_per_second": rates,
        "threads": place.num_threads,
        "cpu_seconds_per_1000": round(1000 * cpu / num_images, 2),
    }


def pictures(part: GpuPart, _place: world.World) -> Result:
    """Writes smooth pictures with the size of ImageNet's photographs to the folder `data_url`, each about 60 kB."""
    rng = np.random.default_rng(_SEED)
    height, width = _PHOTOGRAPH
    for number in range(part.num_photographs):
        coarse = Image.fromarray(rng.integers(0, 256, (height // 12, width // 12, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = np.clip(pixels + rng.integers(-12, 13, pixels.shape), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(Path(part.data_url, f"{number}.jpg"), quality=85)
    return {"pictures": part.num_photographs}


def exchange(part: GpuPart, place: world.World) -> Result:
    """Measures the bus bandwidth of sums over all ranks of this machine, counted as in nccl-tests: 2 (n - 1) / n times
    the bytes of the tensor."""
    found: dict[str, float] = {}
    with _entered(place):
        for megabytes in part.megabytes:
            data = torch.ones(megabytes * 250_000, device=place.device)
            for _ in range(_WARM_UP_STEPS):
                dist.all_reduce(data)
            # A fixed number of sums, because all ranks must make the same number and their clocks differ.
            began = _waited(place)
            for _ in range(part.repeats):
                dist.all_reduce(data)
            seconds = (_waited(place) - began) / part.repeats
            bus = 2 * (place.num_ranks - 1) / place.num_ranks * megabytes / 1000 / seconds
            found[str(megabytes)] = round(bus, 3)
        backend = dist.get_backend()
    return {"ranks": place.num_ranks, "backend": backend, "gigabytes_per_second": found}


KINDS: dict[str, Callable[[GpuPart, world.World], Result]] = {
    "step": step,
    "rank": rank,
    "determinism": determinism,
    "zero": zero,
    "together": together,
    "attention": attention,
    "loader": loader,
    "exchange": exchange,
    "pictures": pictures,
}


@dataclass
class _Run:
    """A model in its engine as in a run, with a batch that stays on the device."""

    job: TrainingJob
    place: world.World
    part: GpuPart

    def __post_init__(self) -> None:
        is_compiled = self.part.compiled
        _leave_out(self.part.without)
        if is_compiled:  # then inductor's code says what each Triton kernel reads and writes
            torch._inductor.config.benchmark_combo_kernel = True
            for name, value in self.part.of_inductor().items():
                setattr(torch._inductor.config, name, value)
        kernel: Any = self.part.kernel or self.job.engine.attention
        asked = replace(self.job, engine=replace(self.job.engine, attention=kernel))
        with_attention(asked, self.place, is_compiled=is_compiled)
        self.earlier = _inductor_files()  # of timing attention; its kernels may have the names of the model's
        torch.manual_seed(_SEED)
        size, batch = self.job.model.image_size, self.job.global_batch
        model = build_model(self.job.model).to(self.place.device)
        set_up_blocks(model, self.job.engine, is_compiled=is_compiled, device=self.place.device)
        num_ranks = self.place.num_ranks
        plan = plan_batch(batch * num_ranks, micro_batch=batch, num_ranks=num_ranks, lanes=1)
        self._engine = Engine(
            model, config=self.job.engine, plan=plan, optimizer=self.job.optimizer, clip_norm=self.job.clip_norm
        )
        self._engine.train(True)
        self._gradients, self._num_steps = Gradients(self.job, plan, self._engine, self.place), 0
        generator = torch.Generator().manual_seed(_SEED)
        images = torch.randint(0, 256, (batch, size, size, 3), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, self.job.model.num_classes, (batch, 1), generator=generator)
        self._images, self._labels = images.to(self.place.device), labels.to(self.place.device)

    def free(self) -> None:
        """Frees the engine's memory."""
        self._engine.free()

    def step(self) -> torch.Tensor:
        """Runs one step: forward, backward, update. Returns the loss before the update."""
        loss = self.accumulate()
        self.update()
        return loss

    def accumulate(self) -> torch.Tensor:
        """Runs the forward and backward pass. Returns the loss."""
        branches, kept = self._gradients.branches(self._num_steps, slice(0, self.job.global_batch))
        more = () if branches is None else (branches, None, kept)

        def loss_of(model: torch.nn.Module) -> torch.Tensor:
            with record_function(gpu_time.FORWARD):
                return classification_loss(model(self._images, *more), self._labels, name=self.job.loss)

        with record_function(gpu_time.ACCUMULATE):
            return self._engine.accumulate(loss_of)

    def update(self) -> None:
        """Updates the weights."""
        with record_function(gpu_time.UPDATE):
            self._engine.update(learning_rate=RATE)
        self._num_steps += 1


def _leave_out(names: Sequence[str]) -> None:
    """Leaves out of this process what a run always has."""
    if KEPT_SUMS in names:
        from pipeline.models.residuals import KeepResiduals  # noqa: PLC0415 - it loads inductor, which takes 1 s

        methods: Any = KeepResiduals
        methods.__call__, methods.uuid = lambda *_: None, lambda _: b"left out"  # uuid: a key of inductor's cache
    if LAUNCHED_UPDATES in names:
        vars(engine)[class_without_waiting.__name__] = lambda kind: kind


def _job(part: GpuPart, place: world.World) -> TrainingJob:
    """Returns the job whose step is measured. It has the part's micro-batch or, by default, the largest of
    _MICRO_BATCHES that fits the GPU according to the plan. Raises RuntimeError if none fits."""
    has_float8 = part.settings.get("engine.float8", "off") != "off"
    job = part.job(precision="bf16" if _is_gpu(place) or has_float8 else "fp32")
    if part.batch:
        return job
    most = gpu_budget(torch.cuda.get_device_properties(place.device).total_memory, where="").bytes
    for size in _MICRO_BATCHES:
        if memory_of(replace(job, global_batch=size), _topology(place), micro_batch=size).peak <= most:
            return replace(job, global_batch=size)
    raise RuntimeError(f"{part.model} does not fit this GPU, not even {_MICRO_BATCHES[-1]} images")


def _beside_plan(part: GpuPart, job: TrainingJob, rate: float, place: world.World) -> Result:
    """Returns the share of the GPU's nominal speed that `rate` reaches, and the rate that the plan predicts. Both are
    None for a device that the plan does not know."""
    gpu = gpu_of_device(torch.cuda.get_device_name(place.device)) if _is_gpu(place) else None
    if gpu is None:
        return {"mfu": None, "planned_images_per_second": None}
    flops = FORWARD_AND_BACKWARD * forward_flops(job.model)
    plan = plan_batch(job.global_batch, micro_batch=job.global_batch, num_ranks=1, lanes=1)
    if not part.compiled:
        job = replace(job, engine=replace(job.engine, compile="off"))
    speeds = speeds_of(job, micro_batch=job.global_batch, gpu=gpu, name="this GPU", rates=rates_from())
    planned = step_time(job, plan, gpu=gpu, network=EIGHT_A_NODE, train_flops=flops, speed=speeds.usual)
    return {
        "mfu": round(rate * flops / (gpu.teraflops * 1e12), 4),
        "planned_images_per_second": round(job.global_batch / planned.seconds, 2),
    }


def _topology(place: world.World) -> Topology:
    return Topology(num_ranks=1, is_on_gpu=_is_gpu(place))


@contextlib.contextmanager
def _entered(place: world.World, *, has_backend: bool = False) -> Iterator[None]:
    world.enter(place, has_backend=has_backend)
    try:
        yield
    finally:
        world.leave()


def _rates(do: Callable[[], object], num_images: int, seconds: float, place: world.World) -> list[float]:
    """Returns the images per second in each of several rounds, which together take about `seconds`."""
    # One call is not enough to estimate the time of a call: a loader has read the first batches ahead and returns them
    # at once.
    began, until, tries = _waited(place), time.perf_counter() + seconds / _ROUNDS / 2, 0
    while not tries or time.perf_counter() < until:
        do()
        _wait(place)
        tries += 1
    repeats = max(1, round(seconds / _ROUNDS * tries / (time.perf_counter() - began)))
    rates = []
    for _ in range(_ROUNDS):
        began = _waited(place)
        for _ in range(repeats):
            do()
        rates.append(round(repeats * num_images / (_waited(place) - began), 4))
    return rates


def _waited(place: world.World) -> float:
    """Returns the time at which the device has finished its work."""
    _wait(place)
    return time.perf_counter()


def _wait(place: world.World) -> None:
    if _is_gpu(place):
        torch.cuda.synchronize(place.device)


def _is_gpu(place: world.World) -> bool:
    return place.device.type == "cuda"


if __name__ == "__main__":
    main()

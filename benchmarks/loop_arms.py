"""One rank of the loop benchmark: our loop and a bare one with DistributedDataParallel, in turns in one process.

torchrun --nproc-per-node 2 -m benchmarks.loop_arms --model vit_s16 --precision fp32 --report FILE
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.data.batches import COUNT_NAMES, Batch
from pipeline.data.stream import BatchStream
from pipeline.models import Model, ModelConfig, build_model, compile_blocks
from pipeline.models.loss import classification_loss
from pipeline.ranks.streams import streams_of
from pipeline.ranks.world import World, current_world, enter, leave
from pipeline.training.controls import Controls
from pipeline.training.gradients import Gradients
from pipeline.training.guard import NonFiniteGuard
from pipeline.training.reporting.ledger import Ledger
from pipeline.training.reporting.metrics import Metrics
from pipeline.training.reporting.norms import Norms, PositionView
from pipeline.training.reporting.reporter import Reporter
from pipeline.training.reporting.utilisation import Utilisation
from pipeline.training.settings.job import EngineConfig, TrainingJob
from pipeline.training.settings.schedule import ScheduleConfig
from pipeline.training.step import Launched, TrainStep
from pipeline.training.watchdog.stopping import Signals, Stopping
from pipeline.training.zero.batch_plan import plan_batch
from pipeline.training.zero.device_batches import batches_on
from pipeline.training.zero.engine import Engine, UpdateResult
from pipeline.training.zero.optimizer import build_optimizer
from pipeline.training.zero.step_times import StepTimes, marks_of

RATE, NUM_CLASSES, WARM_UP_STEPS, NUM_BATCHES = 1e-4, 1000, 2, 2
SIZES = {
    "vit_ti4": ModelConfig(
        name="vit", image_size=32, patch=4, width=192, depth=12, mlp_width=768, num_heads=3, num_classes=NUM_CLASSES
    ),
    "vit_tiny": ModelConfig(
        name="vit", image_size=16, patch=8, width=32, depth=2, mlp_width=64, num_heads=2, num_classes=NUM_CLASSES
    ),
    **{name: ModelConfig(name=name, image_size=224, num_classes=NUM_CLASSES) for name in ("vit_s16", "vit_b16")},
}
Loop = Callable[[int], float]  # runs this many steps; the first one's loss


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What both arms do. `batch`: images per rank."""

    model: str
    precision: str
    compiled: bool
    device: str
    batch: int
    rounds: int
    steps: int


def main() -> None:
    """Measures both arms; rank 0 writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="vit_s16")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name, default in (("batch", 8), ("rounds", 5), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--report", type=Path, required=True)
    arguments = vars(parser.parse_args())
    report = arguments.pop("report")
    logging.disable(logging.WARNING)
    world = current_world(arguments["device"])
    enter(world)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found = measure(Setting(**arguments), world, Path(folder), stack)
    if world.is_first:
        report.write_text(json.dumps(found))
    leave()


def measure(setting: Setting, world: World, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """images/s of all ranks, CPU-seconds per image and, of ours, the share outside forward, backward and optimiser."""
    engine = timed_engine(setting, world)
    arms: dict[str, Loop] = {
        "ours": OurLoop(setting, world, engine, folder, stack),
        "ddp": bare_loop(setting, world),
    }
    first_losses = {name: arm(1) for name, arm in arms.items()}
    for arm in arms.values():
        arm(WARM_UP_STEPS)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    overhead = []
    for number in range(setting.rounds):
        for name in list(arms)[:: 1 if number % 2 else -1]:
            engine.cpu_seconds = 0.0
            seconds, spent = timed(arms[name], setting, world)
            rates[name].append(setting.steps * setting.batch * world.num_ranks / seconds)
            cpu[name].append(spent / (setting.steps * setting.batch))
            if name == "ours":
                overhead.append(1 - engine.cpu_seconds / spent)
    return {
        "images_per_second": rates,
        "cpu_seconds_an_image": cpu,
        "overhead": overhead,
        "first_losses": first_losses,
        "num_ranks": world.num_ranks,
        "num_threads": world.num_threads,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if setting.device == "cuda" else "",
    }


def timed(arm: Loop, setting: Setting, world: World) -> tuple[float, float]:
    """Wall and CPU seconds of one round, from a moment that all ranks share."""
    dist.barrier()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    began, before = time.perf_counter(), time.process_time()
    arm(setting.steps)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, time.process_time() - before


def batches(setting: Setting, world: World) -> list[Batch]:
    """This rank's batches, the same for both arms."""
    generator = torch.Generator().manual_seed(world.rank)
    size, found = SIZES[setting.model].image_size, []
    for step in range(NUM_BATCHES):
        images = torch.randint(0, 256, (setting.batch, size, size, 3), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, NUM_CLASSES, (setting.batch, 1), generator=generator)
        if world.device.type == "cuda":
            images, labels = images.pin_memory(), labels.pin_memory()
        ids = torch.arange(setting.batch)
        found.append(Batch(step=step, images=images, labels=labels, sample_ids=ids, datasets=ids * 0))
    return found


def model_of(setting: Setting, world: World) -> Model:
    """The same weights on every rank and in both arms."""
    model = build_model(SIZES[setting.model]).to(world.device)
    if setting.compiled:
        compile_blocks(model, on_gpu=world.device.type == "cuda")
    return model.train()


class TimedEngine(Engine):
    """Adds up the CPU time of forward, backward and optimiser."""

    cpu_seconds = 0.0

    def accumulate(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
        """See Engine."""
        before = time.process_time()
        loss = super().accumulate(loss_of)
        self.cpu_seconds += time.process_time() - before
        return loss

    def update(self, *, learning_rate: float, ema_decay: float | None = None, discard: bool = False) -> UpdateResult:
        """See Engine."""
        before = time.process_time()
        result = super().update(learning_rate=learning_rate, ema_decay=ema_decay, discard=discard)
        self.cpu_seconds += time.process_time() - before
        return result


def job_of(setting: Setting, world: World) -> TrainingJob:
    """The job of our arm."""
    return TrainingJob(
        model=SIZES[setting.model],
        global_batch=setting.batch * world.num_ranks,
        steps=10**6,
        schedule=ScheduleConfig(learning_rate=RATE, decay="constant"),
        engine=EngineConfig(zero_stage=1, precision=cast(Any, setting.precision)),
    )


def timed_engine(setting: Setting, world: World) -> TimedEngine:
    """ZeRO-1 as in a run."""
    job = job_of(setting, world)
    plan = plan_batch(job.global_batch, micro_batch=0, num_ranks=world.num_ranks, lanes=world.num_ranks)
    engine = TimedEngine(model_of(setting, world), config=job.engine, plan=plan, optimizer=job.optimizer, clip_norm=0.0)
    engine.train(True)
    return engine


class _Repeated:
    """A stream that repeats a few batches, which are always ready."""

    is_ready = True

    def __init__(self, own: list[Batch]) -> None:
        self._own, self._next = own, 0

    @property
    def typed_position(self) -> SimpleNamespace:
        """What the loop asks of it: the number of the next step."""
        return SimpleNamespace(next_step=self._next)

    def counts(self) -> dict[str, float]:
        """Nothing is read."""
        return dict.fromkeys(COUNT_NAMES, 0.0)

    def __next__(self) -> Batch:
        batch = self._own[self._next % len(self._own)]
        self._next += 1
        return batch


class OurLoop:
    """Our loop as pipeline/training/loop.py runs it, without samples, checkpoints and evaluations. `times`: None for
    those of a run, with all that a step costs."""

    def __init__(
        self,
        setting: Setting,
        world: World,
        engine: Engine,
        folder: Path,
        stack: ExitStack,
        *,
        times: StepTimes | None = None,
    ) -> None:
        job, run_dir = job_of(setting, world), folder / "run"
        measures, times = times is None, times or StepTimes(marks_of(world.device))
        run_dir.mkdir()
        signals = Signals(run_dir, watch_markers=world.is_first)
        controls = Controls(signals=signals, stopping=Stopping(), ledger=Ledger(run_dir), times=times)
        plan = plan_batch(job.global_batch, micro_batch=0, num_ranks=world.num_ranks, lanes=world.num_ranks)
        stream = batches_on(
            cast(BatchStream, _Repeated(batches(setting, world))), streams_of(world.device), times=times
        )
        self.step = TrainStep(
            Gradients(job, plan, engine, world, times=times),
            stream,
            controls,
            norms=Norms(engine, every=job.norms_every_steps, device=world.device) if measures else None,
            view=PositionView(job, engine, world, streams_of(world.device)) if measures else None,
        )
        self.guard = NonFiniteGuard(job, num_updates=0, says=world.is_first)
        self.reporter: Reporter | None = None
        if world.is_first:
            metrics = stack.enter_context(closing(Metrics(run_dir, step=0)))
            utilisation = Utilisation(job, world, times) if measures else None
            reporter = Reporter(job, metrics, controls.ledger, step=0, epoch_samples=0, utilisation=utilisation)
            self.reporter = stack.enter_context(reporter)
        self.num_launched = self.num_read = 0

    def __call__(self, num_steps: int) -> float:
        """Each outcome is read after the next step is launched."""
        losses, unread = [], list[Launched]()
        for _ in range(num_steps):
            launched = self.step.launch(self.step.next_batch())
            self.num_launched += 1
            if self.reporter:
                self.reporter.launched(self.num_launched)
            losses += [self._read(unread.pop())] if unread else []
            unread.append(launched)
        return [*losses, self._read(unread.pop())][0]

    def _read(self, launched: Launched) -> float:
        self.num_read += 1
        found = self.step.read(launched)
        self.guard.count(self.num_read, loss=found.loss, was_skipped=found.was_skipped, last_saved=lambda: None)
        if self.reporter:
            self.reporter.step(
                self.num_read,
                loss=found.loss,
                grad_norm=found.grad_norm,
                rate=found.rate,
                traffic=found.counts,
                scores=None,
                norms=found.norms,
            )
            if found.similarity is not None:
                self.reporter.shows_positions(self.num_read, found.similarity)
        return found.loss


def bare_loop(setting: Setting, world: World) -> Loop:
    """Forward, backward, AdamW: fp32 parameters, under autocast if bf16 is asked for. It reads the first loss only."""
    devices = [world.device.index] if world.device.type == "cuda" else None
    model = DistributedDataParallel(model_of(setting, world), device_ids=devices, gradient_as_bucket_view=True)
    job = job_of(setting, world)
    optimizer = build_optimizer(model.module.named_parameters(), job.optimizer)
    for group in optimizer.param_groups:
        group["lr"] = RATE
    own, device, is_bf16 = batches(setting, world), world.device, setting.precision == "bf16"
    place = 0

    def loop(num_steps: int) -> float:
        nonlocal place
        first: torch.Tensor | None = None
        for _ in range(num_steps):
            batch, place = own[place % len(own)], place + 1
            images, labels = (x.to(device, non_blocking=True) for x in (batch.images, batch.labels))
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_bf16):
                logits = model(images)
            loss = classification_loss(logits, labels, name="softmax")
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            first = loss.detach() if first is None else first
        return float(first) if first is not None else 0.0

    return loop


if __name__ == "__main__":
    main()

"""The most bytes that a rank's tensors take in real steps, by PyTorch's own record of every allocation.

PyTorch's profiler counts what the profiled thread allocates and frees. gloo's threads free what they were the last to
hold, which is chance, so the allocator's flag for counting the frees of all threads is set meanwhile.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExtraFields_Allocation
from torch.profiler import ProfilerActivity, profile

from pipeline.models.build import build_model
from pipeline.models.config import ModelConfig
from pipeline.ranks.world import World
from pipeline.training.settings.job import TrainingJob
from pipeline.training.start import starting_model
from pipeline.training.teacher import Teacher, learned_loss
from pipeline.training.zero.batch_plan import BatchPlan, plan_batch
from pipeline.training.zero.engine import Engine
from tests.rigs.processes import run_ranks
from tests.rigs.random_weights import fill_randomly

_STEPS = 2  # the first has no moments yet


def peak_bytes(job: TrainingJob, *, micro_batch: int, num_ranks: int = 1, teacher: ModelConfig | None = None) -> int:
    """Of rank 0 of a CPU's ranks, training on images of zeros, with a teacher of random weights if one is given."""
    plan = plan_batch(job.global_batch, micro_batch=micro_batch, num_ranks=num_ranks, lanes=1)
    return int(run_ranks(_peak_of_a_rank, job, plan, teacher, num_ranks=num_ranks)[0])


def _peak_of_a_rank(_world: World, job: TrainingJob, plan: BatchPlan, teacher: ModelConfig | None) -> int:
    return peak_of(lambda: _train(job, plan, teacher))


def peak_of(work: Callable[[], None]) -> int:
    """The most bytes of the CPU's tensors that `work` allocates, at any moment.

    The allocator's sum goes on from record to record, and a tensor that was freed between two of them stays in it. What
    the sum begins with is found by a tensor that is freed at once.
    """
    recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with _frees_of_every_thread(), recorder as recorded:
        torch.empty(1)
        work()
    results: Any = recorded.profiler
    totals = list(_totals(results.kineto_results.experimental_event_tree()))
    return max(totals) - min(totals)


@contextmanager
def _frees_of_every_thread() -> Iterator[None]:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    flag.value = True
    try:
        yield
    finally:
        flag.value = False


def _totals(events: Iterable[Any]) -> Iterator[int]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation):
            yield int(fields.total_allocated)


def _train(job: TrainingJob, plan: BatchPlan, taught_by: ModelConfig | None) -> None:
    teacher = None
    if taught_by:
        model = build_model(taught_by).eval().requires_grad_(False)
        teacher = Teacher(model=model, config=taught_by, columns=torch.arange(job.model.num_classes), sha256="")
    engine = Engine(
        starting_model(job, is_compiled=False),
        config=job.engine,
        plan=plan,
        optimizer=job.optimizer,
        clip_norm=job.clip_norm,
        ema_decay=job.ema_decay,
    )
    fill_randomly(engine, std=0.02)
    side = job.model.image_size
    images = torch.zeros(plan.micro_batch, side, side, 3, dtype=torch.uint8)
    labels = torch.zeros(plan.micro_batch, 1, dtype=torch.int64)
    engine.train(True)
    for _ in range(_STEPS):
        for _ in range(plan.accumulation):
            taught = teacher.logits(images) if teacher else None
            engine.accumulate(partial(_loss_of, job=job, images=images, labels=labels, taught=taught))
        if engine.update(learning_rate=0.0).was_skipped:
            raise AssertionError("an update that is skipped takes less memory")


def _loss_of(
    model: torch.nn.Module,
    *,
    job: TrainingJob,
    images: torch.Tensor,
    labels: torch.Tensor,
    taught: torch.Tensor | None,
) -> torch.Tensor:
    return learned_loss(job, model(images), labels, taught)

"""The arms of benchmarks/engine.py: an engine each that trains a narrow model with ViT-H/14's number of tensors on a
CPU, and what is counted in one of its steps.

    python -m benchmarks.engine_arms ARM STAGE RANKS... --report FILE     # as benchmarks.engine calls it

The process group exchanges nothing and stands for any number of ranks. DeepSpeed's accelerator says that it works
asynchronously, as a GPU does, so that DeepSpeed takes the way through its code that it takes on GPUs.

What is counted in a step:

- launches: the operations that would launch at least one kernel on a GPU. Views, allocations and operations on empty
  tensors launch none. Collectives are counted apart. An operation on a list of tensors counts once.
- sent_bytes: what one of R ranks sends in a ring: 2 (R - 1) / R of the bytes of an all-reduce, and (R - 1) / R of the
  larger side of a reduce-scatter or all-gather.
- waits: how often the host would wait for the device, by the function that waits: numbers read from tensors, copies to
  the host, and waits for the device, a stream or an event through DeepSpeed's accelerator. Not seen: copies from
  pageable memory, and waits inside libraries.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SIDE, NUM_CLASSES = 28, 10
_WIDTH = 64  # so that a block's tensors have multiples of 64 elements, as ViT-H/14's have
_REAL = 632_045_800  # parameters of ViT-H/14 at 224 pixels with 1,000 classes
_CLIP, _RATE = 1.0, 1e-3
_STEPS, _WARM_UP, _ENOUGH_SECONDS = 14, 4, 3.0
# A bucket has the same share of the narrow model's parameters as of ViT-H/14's.
_OUR_BUCKET, _DEEPSPEED_BUCKET, _DDP_MEBIBYTES = 50_000_000, 500_000_000, 25.0
_KEPT_WHOLE = 1_000  # elements up to which stage 3 keeps a tensor on every rank: vectors only, as with ViT-H/14
_WITH_DEEPSPEED = ("ours", "before", "deepspeed")
_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")
_WITHOUT_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "resize_")
_SENT = {
    "allreduce": 2,
    "allgather": 1,
    "reducescatter": 1,
    "barrier": 0,
    "wait": 0,
    "wrap": 0,
}  # times (R - 1) / R of the bytes

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(kw_only=True)
class Counted:
    """Counts of what one step of a rank calls, as the module describes. `operations`: all of them, views among them."""

    launches: int = 0
    operations: int = 0
    collectives: int = 0
    sent_bytes: float = 0.0
    waits: Counter[str] = field(default_factory=Counter)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and collectives."""

    def __init__(self, counted: Counted, *, num_ranks: int, is_read: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted, self.num_ranks, self.is_read = counted, num_ranks, is_read

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its operations on this rank's part come here afterwards
        found = func(*args, **(kwargs or {}))
        room, _, name = func._schema.name.partition("::")
        if "c10d" in room:
            kind = name.replace("_", "")
            factor = next((factor for start, factor in _SENT.items() if kind.startswith(start)), None)
            if factor is None:
                raise ValueError(f"{func} is no collective that is counted; counted are {', '.join(_SENT)}")
            self.counted.collectives += factor > 0
            num_bytes = max(map(_bytes, (*args, found)))
            self.counted.sent_bytes += factor * num_bytes * (self.num_ranks - 1) / self.num_ranks
        elif room != "profiler":
            self.counted.operations += 1
            if name == "_local_scalar_dense":
                if not self.is_read():
                    self.counted.waits[_caller()] += 1
            elif not (func.is_view or name in _WITHOUT_KERNEL):
                self.counted.launches += any(map(_bytes, (*args, found)))
        return found


class _Reads(TorchFunctionMode):
    """Counts values that are read from tensors: on a GPU, the host waits for them."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted, self.depth = counted, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        is_read = getattr(func, "__name__", "") in _READS
        if is_read and not self.depth:
            self.counted.waits[_caller()] += 1
        self.depth += is_read
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.depth -= is_read


class Waits:
    """Counts the waits for DeepSpeed's accelerator inside `counting`."""

    def __init__(self) -> None:
        self.counted: Counted | None = None

    def note(self) -> None:
        """Is called at each wait."""
        if self.counted is not None:
            self.counted.waits[_caller()] += 1

    @contextmanager
    def counting(self, num_ranks: int) -> Iterator[Counted]:
        """Counts what is called in the `with` block."""
        counted = Counted()
        reads = _Reads(counted)
        self.counted = counted
        with _Operations(counted, num_ranks=num_ranks, is_read=lambda: reads.depth > 0), reads:
            yield counted
        self.counted = None


def _bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def _caller() -> str:
    """Returns the innermost function of DeepSpeed or ours that is running, such as `stage3.py:step`."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        path = frame.f_code.co_filename
        if ("/deepspeed/" in path or "/pipeline/" in path) and "/comm/" not in path and "nvtx" not in path:
            return f"{path.rpartition('/')[2]}:{frame.f_code.co_name}"
    return "elsewhere"


def be_asynchronous(noted: Callable[[], None]) -> None:
    """Makes DeepSpeed's accelerator for CPUs one whose work is not done when a call returns, and calls `noted` at every
    wait for it. Its streams and events do nothing else."""
    import deepspeed  # noqa: PLC0415 - it chooses an accelerator when it is imported

    def wait(*_: object) -> None:
        noted()

    class Queue:
        """A stream, or an event in it."""

        synchronize = wait

        def __init__(self, *_: object, **_more: object) -> None:
            """Accepts any priority."""

        def ignore(self, *_: object) -> None:
            """Other streams wait, not the host."""

        record = wait_stream = wait_event = ignore

        def query(self) -> bool:
            return False  # work that is not done yet has to be waited for

    kind, stream = type(deepspeed.accelerator.get_accelerator()), Queue()
    for name in ("is_synchronized_device", "resolves_data_dependency", "handles_memory_backpressure"):
        setattr(kind, name, lambda *_: False)
    kind.synchronize, kind.Stream, kind.Event = wait, Queue, Queue
    kind.current_stream = kind.default_stream = lambda *_: stream
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]


def made(arm: str, stage: int, num_ranks: int, *, num_blocks: int = 32) -> Step:
    """Returns a function that trains one step of an arm on a batch of images and labels, and returns its loss, which
    may still be on the device. The process group of the arm must have begun. All arms begin with the same weights, to
    the bit, if the random state is the same."""
    model = _model(num_blocks).to(torch.bfloat16).float()
    if arm in ("ours", "before"):
        return _ours(model, stage, num_ranks)
    if arm == "deepspeed":
        return _deepspeed(model, stage, num_ranks)
    if arm == "fsdp2":
        _shard(model, num_ranks, is_stage_3=stage == 3)
    elif arm in ("model", "ddp"):
        model = model.to(torch.bfloat16)
    is_autocast = arm == "ddp autocast"
    if arm.startswith("ddp"):
        model = _distributed(model, num_ranks)
    optimizer = _adamw(model)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            logits = model(images)
        loss = cross_entropy(logits.float(), labels)
        torch.autograd.backward(loss)
        if arm != "model":
            torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _model(num_blocks: int) -> nn.Module:
    from pipeline.models import ModelConfig, build_model  # noqa: PLC0415 - `--code` has put other code on the path

    sizes: dict[str, Any] = {"depth": num_blocks, "width": _WIDTH, "mlp_width": _WIDTH, "num_heads": 2}
    return build_model(ModelConfig(name="vit_h14", image_size=SIDE, num_classes=NUM_CLASSES, **sizes))


def num_parameters(num_blocks: int = 32) -> int:
    """Returns the number of parameters of the narrow model."""
    return sum(parameter.numel() for parameter in _model(num_blocks).parameters())


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    """Returns torch's AdamW, which decays the same parameters as ours."""
    named = list(model.named_parameters())
    kernels = [each for name, each in named if name.endswith("weight") and each.ndim > 1]
    others = [each for name, each in named if not (name.endswith("weight") and each.ndim > 1)]
    groups = [{"params": kernels, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=_RATE, fused=True)


def _like_real(model: nn.Module, size: float) -> float:
    """Returns the size of a bucket of which the model has as many as ViT-H/14 has of this size."""
    return size * sum(parameter.numel() for parameter in model.parameters()) / _REAL


def _shard(model: nn.Module, num_ranks: int, *, is_stage_3: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (num_ranks,))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": is_stage_3}
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*model.get_submodule("blocks").children(), model):
        fully_shard(block, **options)


def _distributed(model: nn.Module, num_ranks: int) -> nn.Module:
    size = _like_real(model, _DDP_MEBIBYTES)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=size)

    def summed(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Sums a bucket over the ranks, as DDP does itself. A fake group's own result has no future."""
        gradients = bucket.buffer().div_(num_ranks)
        dist.all_reduce(gradients)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(gradients)
        return done

    model.register_comm_hook(None, summed)
    return model


def _ours(model: nn.Module, stage: int, num_ranks: int) -> Step:
    import pipeline.training.zero.engine as zero  # noqa: PLC0415
    from pipeline.training.settings.job import EngineConfig, OptimizerConfig  # noqa: PLC0415
    from pipeline.training.zero.batch_plan import plan_batch  # noqa: PLC0415

    whole = dist.distributed_c10d._get_default_group()
    zero.second_group = lambda: whole  # type: ignore[attr-defined]  # as the engine of `before` needs it
    config = zero.deepspeed_config

    def narrow(*settings: Any, **more: Any) -> dict[str, Any]:
        found = config(*settings, **more)
        found["zero_optimization"]["stage3_param_persistence_threshold"] = _KEPT_WHOLE
        return found

    zero.deepspeed_config = narrow
    engine = zero.Engine(
        model,
        config=EngineConfig(
            zero_stage=stage,  # type: ignore[arg-type]
            precision="bf16",
            overlap="on" if num_ranks > 1 else "off",  # as `auto` decides on GPUs
            reduce_bucket=int(_like_real(model, _OUR_BUCKET)),
        ),
        plan=plan_batch(num_ranks, micro_batch=0, num_ranks=num_ranks, lanes=1),
        optimizer=OptimizerConfig(name="adamw", weight_decay=0.1),
        clip_norm=_CLIP,
    )
    engine.train(True)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = engine.accumulate(lambda model: cross_entropy(model(images).float(), labels))
        engine.update(learning_rate=_RATE)
        return loss

    return step


def _deepspeed(model: nn.Module, stage: int, num_ranks: int) -> Step:
    import deepspeed  # noqa: PLC0415

    # Otherwise it compiles a collective in C++ that only inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    settings = {
        "train_batch_size": num_ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": _CLIP,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": num_ranks > 1,
            "reduce_bucket_size": int(_like_real(model, _DEEPSPEED_BUCKET)),
            "stage3_param_persistence_threshold": _KEPT_WHOLE,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=settings, dist_init_required=False)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(engine(images).float(), labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def measured(arm: str, stage: int, num_ranks: int, *, num_steps: int = _STEPS, num_blocks: int = 32) -> dict[str, Any]:
    """Trains an arm under a group that exchanges nothing, and returns the CPU-milliseconds of a step, the median of its
    steps, and what was counted in one more."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - registers the backend

    torch.set_num_threads(1)
    waits = Waits()
    if arm in _WITH_DEEPSPEED:
        be_asynchronous(waits.note)
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    step = made(arm, stage, num_ranks, num_blocks=num_blocks)
    images = torch.zeros(1, SIDE, SIDE, 3, dtype=torch.uint8)
    labels = torch.zeros(1, dtype=torch.long)
    seconds: list[float] = []
    while len(seconds) < num_steps and (len(seconds) < _WARM_UP + 3 or sum(seconds) < _ENOUGH_SECONDS):
        began = time.process_time()
        step(images, labels)
        seconds.append(time.process_time() - began)
    with waits.counting(num_ranks) as counted:
        step(images, labels)
    return {"milliseconds": 1e3 * statistics.median(seconds[_WARM_UP:] or seconds), **vars(counted)}


def main() -> None:
    """Measures one arm under each number of ranks, in a process of its own, and writes a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm")
    parser.add_argument("stage", type=int)
    parser.add_argument("ranks", type=int, nargs="+")
    parser.add_argument("--code", type=Path, help="the checkout whose `pipeline` is measured (default: this one)")
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    if options.code:
        sys.path.insert(0, str(options.code.resolve()))
    _load(options.arm)  # once for all processes, which are forks
    report = {}
    for num_ranks in options.ranks:
        # Without LOCAL_SIZE, DeepSpeed asks the system for the number of its CPUs' nodes in each step.
        environment = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "WORLD_SIZE": str(num_ranks)}
        with ProcessPoolExecutor(
            1, mp_context=get_context("fork"), initializer=os.environ.update, initargs=(environment,)
        ) as pool:
            report[num_ranks] = pool.submit(measured, options.arm, options.stage, num_ranks).result()
    options.report.write_text(json.dumps(report))


def _load(arm: str) -> None:
    """Imports what the arm needs."""
    import torch.testing._internal.distributed.fake_pg  # noqa: PLC0415

    import pipeline.models  # noqa: PLC0415

    if arm in _WITH_DEEPSPEED:
        import pipeline.training.zero.engine  # noqa: F401, PLC0415
    elif arm == "fsdp2":
        import torch.distributed.fsdp  # noqa: F401, PLC0415


if __name__ == "__main__":
    main()

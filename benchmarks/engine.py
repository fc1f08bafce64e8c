"""What an engine costs the host in a step: ours, plain DeepSpeed, DDP and FSDP2, on a CPU, for 1 to 512 ranks.

    python -m benchmarks.engine --out benchmarks/results/engine.json     # --rounds 3
    python -m benchmarks.scale --update      # then: what `patchline plan` assumes, and the tables of docs/scale.md

The model has as many parameters as ViT-H/14 has tensors (392), but narrow ones, in bf16, so that computing takes little
time. Each arm trains it in a process of its own, under a process group of this many ranks that exchanges nothing. Its
figure is the CPU time of a step, the median of its steps; `model` is the forward and backward pass alone, which all
arms contain. On a GPU, the host launches the same operations and computes none of them. The arms:

- `ours`: the engine, ZeRO stage 1 or 3, with the parameters of each block in two flat tensors.
- `deepspeed`: deepspeed.initialize with the plain model and torch's AdamW, at the same stage.
- `ddp`: DistributedDataParallel, gradients as views of its buckets; weights and moments in bf16.
- `fsdp2`: fully_shard for each block and the model, fp32 parameters, passes in bf16, sums in fp32.
  `reshard_after_forward` is False beside stage 1, and True beside stage 3.

All arms clip to a norm of 1 and have AdamW's fused kernel. Rounds run the arms in turn. `--losses` trains each arm on
two real gloo ranks for 50 steps instead, and compares the losses.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import machine

_RANKS = (1, 8, 64, 512)
_ARMS = (
    ("model", 1),
    ("ours", 1),
    ("deepspeed", 1),
    ("ddp", 1),
    ("fsdp2", 1),
    ("ours", 3),
    ("deepspeed", 3),
    ("fsdp2", 3),
)
_STEPS, _WARM_UP, _LOSS_STEPS = 14, 4, 50
_SECONDS = 900.0  # the longest that an arm may take
_CLIP, _RATE, _SIDE = 1.0, 1e-3, 28


@dataclass(frozen=True, kw_only=True)
class Figure:
    """An arm under a number of ranks: CPU-milliseconds of a step on one rank, the median of the rounds, with the least
    and most; and the number of operations that a step calls."""

    arm: str
    stage: int
    ranks: int
    milliseconds: float
    least: float
    most: float
    operations: int


def arm_in_this_process(arm: str, stage: int, num_ranks: int) -> dict[str, float]:
    """Trains one arm under a group that exchanges nothing."""
    import torch  # noqa: PLC0415 - only the process that is measured needs it
    from torch import distributed as dist  # noqa: PLC0415
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        number = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += 1
            return func(*args, **(kwargs or {}))

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    step = made(arm, stage, num_ranks)
    images = torch.zeros(1, _SIDE, _SIDE, 3, dtype=torch.uint8)
    labels = torch.zeros(1, dtype=torch.long)
    seconds = []
    for _ in range(_STEPS):
        began = time.process_time()
        step(images, labels)
        seconds.append(time.process_time() - began)
    with Count() as count:  # type: ignore[no-untyped-call]
        step(images, labels)
    return {"milliseconds": 1e3 * statistics.median(seconds[_WARM_UP:]), "operations": count.number}


def made(arm: str, stage: int, num_ranks: int) -> Callable[[Any, Any], float]:
    """Returns a function that trains one step of an arm on a batch of images and labels, and returns the loss. The
    process group of the arm must have begun."""
    import torch  # noqa: PLC0415
    from torch import distributed as dist  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415
    from torch.nn.functional import cross_entropy  # noqa: PLC0415

    from pipeline.models import ModelConfig, build_model  # noqa: PLC0415

    model: nn.Module = build_model(
        ModelConfig(name="vit_h14", image_size=_SIDE, num_classes=10, width=32, mlp_width=64, num_heads=2)
    )
    if arm == "ours":
        return _ours(model, stage, num_ranks)
    if arm == "deepspeed":
        return _deepspeed(model, stage, num_ranks)
    if arm == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

        mesh = init_device_mesh("cpu", (num_ranks,))
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": stage == 3}
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in (*model.get_submodule("blocks").children(), model):
            fully_shard(block, **options)
    else:
        model = model.to(torch.bfloat16)
    if arm == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

        def summed(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
            """Sums a bucket over the ranks, as DDP does itself. A fake group's own result has no future."""
            gradients = bucket.buffer().div_(num_ranks)
            dist.all_reduce(gradients)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(gradients)
            return done

        model.register_comm_hook(None, summed)
    kernels = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": kernels, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=_RATE, fused=True)

    def step(images: torch.Tensor, labels: torch.Tensor) -> float:
        loss = cross_entropy(model(images).float(), labels)
        torch.autograd.backward(loss)
        if arm != "model":
            torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _ours(model: Any, stage: int, num_ranks: int) -> Callable[[Any, Any], float]:
    from torch import distributed as dist  # noqa: PLC0415
    from torch.nn.functional import cross_entropy  # noqa: PLC0415

    import pipeline.training.zero.engine as zero  # noqa: PLC0415
    from pipeline.training.settings.job import EngineConfig, OptimizerConfig  # noqa: PLC0415
    from pipeline.training.zero.batch_plan import plan_batch  # noqa: PLC0415

    whole = dist.distributed_c10d._get_default_group()
    zero.second_group = lambda: whole  # type: ignore[attr-defined]
    engine = zero.Engine(
        model,
        config=EngineConfig(zero_stage=stage, precision="bf16"),  # type: ignore[arg-type]
        plan=plan_batch(num_ranks, micro_batch=0, num_ranks=num_ranks, lanes=1),
        optimizer=OptimizerConfig(name="adamw", weight_decay=0.1),
        clip_norm=_CLIP,
    )
    engine.train(True)

    def step(images: Any, labels: Any) -> float:
        loss = engine.accumulate(lambda model: cross_entropy(model(images).float(), labels))
        engine.update(learning_rate=_RATE)
        return float(loss)

    return step


def _deepspeed(model: Any, stage: int, num_ranks: int) -> Callable[[Any, Any], float]:
    import deepspeed  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from torch.nn.functional import cross_entropy  # noqa: PLC0415

    settings = {
        "train_batch_size": num_ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": _CLIP,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    kernels = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": kernels, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=_RATE, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)

    def step(images: torch.Tensor, labels: torch.Tensor) -> float:
        loss = cross_entropy(engine(images).float(), labels)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def losses_of(world: Any, arm: str, stage: int) -> list[float]:
    """The losses of a rank over 50 steps of four images, which differ between ranks."""
    import torch  # noqa: PLC0415

    torch.manual_seed(0)
    step = made(arm, stage, world.num_ranks)
    generator = torch.Generator().manual_seed(world.rank)
    images = torch.randint(0, 256, (4, _SIDE, _SIDE, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (4,), generator=generator)
    return [step(images, labels) for _ in range(_LOSS_STEPS)]


def measured(arm: str, stage: int, num_ranks: int) -> dict[str, float]:
    """Runs one arm in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.engine", "--one", arm, str(stage), str(num_ranks)]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measures all arms, prints each figure, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file for the result")
    parser.add_argument("--rounds", type=int, default=3, help="how often each arm is measured")
    parser.add_argument("--losses", action="store_true", help="compare the losses of two gloo ranks instead")
    parser.add_argument("--one", nargs=3, metavar=("ARM", "STAGE", "RANKS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        arm, stage, num_ranks = options.one
        sys.stdout.write(json.dumps(arm_in_this_process(arm, int(stage), int(num_ranks))) + "\n")
        sys.stdout.flush()
        os._exit(0)  # a group that exchanges nothing cannot be left
    if options.losses:
        from tests.rigs.processes import run_ranks  # noqa: PLC0415

        for arm, stage in _ARMS[1:]:
            first = [sum(each) / 2 for each in zip(*run_ranks(losses_of, arm, stage, num_ranks=2), strict=True)]
            sys.stdout.write(f"{arm}, stage {stage}: {first[0]:.6f} -> {first[-1]:.6f}\n")
        return
    found: defaultdict[tuple[str, int, int], list[dict[str, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for num_ranks in _RANKS:
            for arm, stage in _ARMS:
                found[arm, stage, num_ranks].append(one := measured(arm, stage, num_ranks))
                sys.stdout.write(f"{arm}, stage {stage}, {num_ranks} ranks: {one['milliseconds']:.1f} ms\n")
                sys.stdout.flush()
    figures = []
    for (arm, stage, num_ranks), rounds in found.items():
        times = [one["milliseconds"] for one in rounds]
        figures.append(
            Figure(
                arm=arm,
                stage=stage,
                ranks=num_ranks,
                milliseconds=statistics.median(times),
                least=min(times),
                most=max(times),
                operations=int(rounds[-1]["operations"]),
            )
        )
    if options.out:
        result = {"command": "python -m benchmarks.engine", "machine": machine(), "figures": [*map(asdict, figures)]}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

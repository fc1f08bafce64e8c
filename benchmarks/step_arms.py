"""Arms of the step benchmark, in turns in one process: forward, backward and AdamW of one model, ours and timm's.

    python -m benchmarks.step_arms --model vit_b16 --arms ours timm --report FILE

Everything is in bf16, including weights and moments, except `zero1`: our model as it trains, with DeepSpeed's ZeRO-1
and fp32 masters (one rank). timm's models get normalised bf16 images; ours get uint8 images and normalise them.
"""

import argparse
import json
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.torchvision_operators import import_torchvision
from pipeline.models import ModelConfig, build_model, compile_blocks
from pipeline.models.flops import FORWARD_AND_BACKWARD, forward_flops
from pipeline.models.layers import centred
from pipeline.ranks import world
from pipeline.training.settings.job import EngineConfig, OptimizerConfig
from pipeline.training.zero.batch_plan import plan_batch
from pipeline.training.zero.engine import Engine

NUM_CLASSES, RATE = 1000, 1e-4
WARM_UP_STEPS = 3  # the first step compiles
TIMM_NAMES = {
    "vit_ti16": "vit_tiny_patch16_224",
    "vit_s16": "vit_small_patch16_224",
    "vit_b16": "vit_base_patch16_224",
    "vit_l16": "vit_large_patch16_224",
    "vit_h14": "vit_huge_patch14_224",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of every arm: `steps` steps of `batch` images per round."""

    model: str
    image_size: int
    batch: int
    compiled: bool
    device: str
    rounds: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Work:
    """A batch that stays on the device: uint8[B, H, W, 3] and int64[B]."""

    images: torch.Tensor
    labels: torch.Tensor


Step = Callable[[], torch.Tensor]


def main() -> None:
    """Measures the arms that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=TIMM_NAMES, default="vit_b16")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["ours", "timm"])
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name, default in (("image-size", 224), ("batch", 16), ("rounds", 8), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--report", type=Path, required=True)
    arguments = vars(parser.parse_args())
    names, report = arguments.pop("arms"), arguments.pop("report")
    logging.disable(logging.WARNING)
    report.write_text(json.dumps(measure(names, Setting(**arguments))))


def measure(names: list[str], setting: Setting) -> dict[str, Any]:
    """images/s, CPU-seconds per image and peak memory of each arm in each round."""
    torch.manual_seed(0)
    device, size = torch.device(setting.device), setting.image_size
    work = Work(
        images=torch.randint(0, 256, (setting.batch, size, size, 3), dtype=torch.uint8).to(device),
        labels=torch.randint(0, NUM_CLASSES, (setting.batch,)).to(device),
    )
    steps = {name: ARMS[name](setting, work) for name in names}
    first_losses = {name: float(step()) for name, step in steps.items()}
    for step in steps.values():
        for _ in range(WARM_UP_STEPS - 1):
            step()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(setting.rounds):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            rounds[name].append(timed(steps[name], setting))
    world.leave()
    config = ModelConfig(name=setting.model, image_size=size, num_classes=NUM_CLASSES)
    return {
        "train_flops_an_image": FORWARD_AND_BACKWARD * forward_flops(config),
        "first_losses": first_losses,
        "images_per_second": {name: [one["images_per_second"] for one in rounds[name]] for name in names},
        "cpu_seconds_an_image": {name: [one["cpu_seconds"] for one in rounds[name]] for name in names},
        "peak_bytes": {name: max(one["peak_bytes"] for one in rounds[name]) for name in names},
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if setting.device == "cuda" else "",
    }


def timed(step: Step, setting: Setting) -> dict[str, float]:
    """One round of an arm. `peak_bytes` is the memory of tensors on a GPU, and of the whole process with all its arms
    on a CPU."""
    is_gpu = setting.device == "cuda"
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began, before = time.perf_counter(), time.process_time()
    for _ in range(setting.steps):
        step()
    if is_gpu:
        torch.cuda.synchronize()
    seconds, cpu = time.perf_counter() - began, time.process_time() - before
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    num_images = setting.steps * setting.batch
    return {
        "images_per_second": num_images / seconds,
        "cpu_seconds": cpu / num_images,
        "peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else resident,
    }


def ours(setting: Setting, work: Work) -> Step:
    """Our model with plain PyTorch."""
    model = build_model(_config(setting)).to(torch.bfloat16).to(work.images.device)
    if setting.compiled:
        compile_blocks(model, on_gpu=setting.device == "cuda")
    return _trained(model, work.images, work.labels)


def zero1(setting: Setting, work: Work) -> Step:
    """Our model as in a run: ZeRO-1 on one rank, masters and moments in fp32."""
    world.enter(world.current_world("cuda" if setting.device == "cuda" else "cpu"))
    model = build_model(_config(setting)).to(work.images.device)
    if setting.compiled:
        compile_blocks(model, on_gpu=setting.device == "cuda")
    engine = Engine(
        model,
        config=EngineConfig(zero_stage=1, precision="bf16"),
        plan=plan_batch(setting.batch, micro_batch=0, num_ranks=1, lanes=1),
        optimizer=OptimizerConfig(name="adamw"),
        clip_norm=0.0,
    )
    engine.train(True)

    def loss_of(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(work.images), work.labels)

    def step() -> torch.Tensor:
        loss = engine.accumulate(loss_of)
        engine.update(learning_rate=RATE)
        return loss

    return step


def timm_exact(setting: Setting, work: Work) -> Step:
    """timm's model with its default GELU by the error function, which CPUs compute faster."""
    return _timm(setting, work, act_layer="gelu")


def timm_tanh(setting: Setting, work: Work) -> Step:
    """timm's model with the paper's GELU: the same arithmetic as ours."""
    return _timm(setting, work, act_layer="gelu_tanh")


ARMS: dict[str, Callable[[Setting, Work], Step]] = {
    "ours": ours,
    "timm": timm_exact,
    "timm, tanh": timm_tanh,
    "zero1": zero1,
}


def _config(setting: Setting) -> ModelConfig:
    return ModelConfig(name=setting.model, image_size=setting.image_size, num_classes=NUM_CLASSES)


def _timm(setting: Setting, work: Work, *, act_layer: str) -> Step:
    import_torchvision()
    import timm  # noqa: PLC0415 - imports torchvision, which may need its operators declared first

    fields = {"num_classes": NUM_CLASSES, "img_size": setting.image_size, "act_layer": act_layer}
    model = timm.create_model(TIMM_NAMES[setting.model], **fields).to(torch.bfloat16).to(work.images.device)
    if setting.compiled:
        model = torch.compile(model)
    images = centred(work.images, torch.bfloat16).permute(0, 3, 1, 2).contiguous()
    return _trained(model, images, work.labels)


def _trained(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    model.train()

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


if __name__ == "__main__":
    main()

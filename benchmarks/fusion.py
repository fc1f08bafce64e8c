"""What a block of ViT-H/14 launches in a forward and a backward pass in bf16, and the bytes that it reads and writes.

Eager by PyTorch's operators, with attention as one each way; compiled by the kernels of inductor's CPU backend. Each
tensor of a kernel counts once, so neither bytes that a cache saves nor those inside a product or attention are counted.
Command (half a minute):

    python -m benchmarks.fusion --out benchmarks/results/fusion.json
"""

import argparse
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch._inductor.compile_fx import inductor_metrics_log
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.measure import machine
from benchmarks.rounds import write
from pipeline.models import vit
from pipeline.models.build import blocks_of, build_model, compile_blocks
from pipeline.models.config import ModelConfig

IMAGES = 8
_VIEWS = ("view", "detach", "transpose", "permute", "unbind", "t")
Count = dict[str, dict[str, float]]  # kind of kernel -> how many, and their megabytes


def main() -> None:
    """Counts both; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    counts = {"eager": eager()}
    counts |= {"compiled": compiled(deterministic=False), "compiled, deterministic": compiled(deterministic=True)}
    command = "python -m benchmarks.fusion --out benchmarks/results/fusion.json"
    write(arguments.out, {"command": command, "machine": machine(), "images": IMAGES, "counts": counts})
    sys.stdout.write("| | products | attention | other kernels | their MB | all MB |\n|---|---|---|---|---|---|\n")
    for name, count in counts.items():
        numbers = [f"{count[kind]['kernels']:.0f}" for kind in ("products", "attention", "others")]
        whole = sum(row["megabytes"] for row in count.values())
        sys.stdout.write(f"| {name} | {' | '.join(numbers)} | {count['others']['megabytes']:.0f} | {whole:.0f} |\n")


def block_and_input(*, compiles: bool = False, deterministic: bool = False) -> tuple[torch.nn.Module, torch.Tensor]:
    """A block of ViT-H/14 that is trained, and its input."""
    model = build_model(ModelConfig(name="vit_h14", image_size=224, num_classes=10, depth=1)).to(torch.bfloat16).train()
    if compiles:
        compile_blocks(model, deterministic=deterministic)
    (block,) = blocks_of(model)
    return block, torch.randn(IMAGES, 257, 1280).to(torch.bfloat16).requires_grad_()


def eager() -> Count:
    """Operators of PyTorch that launch something, and the bytes of the tensors that they read and write."""
    block, z_BND = block_and_input()
    towards_BND = torch.randn_like(z_BND)
    found = Operators()
    with found, mock.patch.object(vit, "attend", torch.ops.patchline.attend_on_cpu):
        torch.autograd.backward(block(z_BND), towards_BND)
    return found.count


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that are more than a view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Count = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name not in _VIEWS:
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            add(self.count, name, sum(x.numel() * x.element_size() for x in tensors))
        return result


def compiled(*, deterministic: bool) -> Count:
    """Kernels that inductor makes of the block, and the bytes that each reads and writes."""
    torch.compiler.reset()
    metrics.reset()
    inductor_metrics_log.setLevel(logging.INFO)  # otherwise it counts no bytes
    inductor_metrics_log.propagate = False
    with inductor_config.patch(force_disable_caches=True):
        block, z_BND = block_and_input(compiles=True, deterministic=deterministic)
        torch.autograd.backward(block(z_BND), torch.randn_like(z_BND))
    count: Count = {}
    for node, num_words in metrics.nodes_num_elem:
        if num_words:  # not what only names the result of another kernel
            name = getattr(node.node, "python_kernel_name", None) or "fused"
            add(count, name.removeprefix("extern_kernels.").removeprefix("torch.ops.patchline."), 4 * num_words)
    return count


def add(count: Count, name: str, num_bytes: int) -> None:
    """Counts one kernel more."""
    kind = "products" if name in ("mm", "addmm") else "attention" if name.startswith("attend") else "others"
    row = count.setdefault(kind, {"kernels": 0, "megabytes": 0.0})
    row["kernels"] += 1
    row["megabytes"] = round(row["megabytes"] + num_bytes / 1e6, 2)


if __name__ == "__main__":
    main()

"""Compares our own CPU kernels with PyTorch's: gradients of attention in bf16, and compiled GELU.

Both kernels of a pair take turns in one process, and CPU time is measured; the first round is not counted. One thread:
two threads wait for each other when the machine is busy, and their CPU time then says little. Command (a minute):

    python -m benchmarks.kernels --out benchmarks/results/kernels.json
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import pipeline.models.attention  # noqa: F401  (defines the operator of torch.ops.patchline)
from benchmarks.measure import machine
from benchmarks.rounds import cell, spread, write
from pipeline.models.layers import gelu_by_sigmoid

# Images, heads, tokens, width of a head: B/16 at 224 and 384 px, H/14 at 224, L/16 at 512.
SHAPES = ((8, 12, 197, 64), (4, 16, 257, 80), (4, 12, 577, 64), (2, 16, 1025, 64))
MLP = (8 * 197, 768, 3072)  # tokens, width, MLP width of B/16
Pair = tuple[Callable[[], object], Callable[[], object]]


def main() -> None:
    """Measures all pairs; prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pairs = {f"attention's gradient, {' x '.join(map(str, shape))}": attention(shape) for shape in SHAPES}
    pairs["compiled MLP of B/16, forward and backward"] = mlp()
    found = {name: measured(pair, rounds=arguments.rounds) for name, pair in pairs.items()}
    command = f"python -m benchmarks.kernels --rounds {arguments.rounds} --threads {arguments.threads}"
    command += " --out benchmarks/results/kernels.json"
    write(arguments.out, {"command": command, "machine": machine(), "pairs": found})
    sys.stdout.write("| | ours, CPU-s | PyTorch's, CPU-s | ours to PyTorch's |\n|---|---|---|---|\n")
    for name, row in found.items():
        cells = (cell(row[figure]) for figure in ("ours", "pytorch", "ratio"))
        sys.stdout.write(f"| {name} | {' | '.join(cells)} |\n")


def measured(pair: Pair, *, rounds: int) -> dict[str, Any]:
    """CPU-seconds of each kernel, and their ratio in each round: quartiles."""
    times: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for place in ((0, 1), (1, 0))[number % 2]:
            began = time.process_time()
            pair[place]()
            times[place].append(time.process_time() - began)
    ours, theirs = (found[1:] for found in times)
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {"ours": spread(ours), "pytorch": spread(theirs), "ratio": spread(ratios)}


def attention(shape: tuple[int, int, int, int]) -> Pair:
    """The backward pass of attention alone, with q, k and v as views of one product."""
    batch, heads, tokens, width = shape
    qkv = torch.randn(batch, tokens, 3, heads, width).to(torch.bfloat16).permute(2, 0, 3, 1, 4).requires_grad_()
    q, k, v = qkv.unbind(0)
    results = torch.ops.patchline.attend_on_cpu(qkv), F.scaled_dot_product_attention(q, k, v)
    towards = torch.randn(batch, tokens, heads, width).to(torch.bfloat16).transpose(1, 2)

    def gradient(result: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(result, qkv, towards, retain_graph=True)

    return gradient(results[0]), gradient(results[1])


def mlp() -> Pair:
    """Two dense layers with GELU between them, as torch.compile fuses them."""
    num_tokens, width, mlp_width = MLP
    first = torch.nn.Linear(width, mlp_width).to(torch.bfloat16)
    second = torch.nn.Linear(mlp_width, width).to(torch.bfloat16)
    x = torch.randn(num_tokens, width).to(torch.bfloat16).requires_grad_()

    def ours(z: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = second(gelu_by_sigmoid(first(z)))
        return y

    def pytorchs(z: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = second(F.gelu(first(z), approximate="tanh"))
        return y

    def step(compiled: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(compiled(x).sum(), x)

    return step(torch.compile(ours)), step(torch.compile(pytorchs))


if __name__ == "__main__":
    main()

"""Muon: momentum with orthogonalised matrices, for matrices that ZeRO has cut into flat partitions.

Sources: Keller Jordan's post of 2024 (https://kellerjordan.github.io/posts/muon/) and its code, KellerJordan/Muon;
torch.optim.Muon, which makes bitwise the same update of a bf16 model; "Muon is Scalable for LLM Training" (Liu et al.,
2025, arXiv:2502.16982) for the size of an update. In an fp32 model, the iteration runs in fp32 here, but in bf16 in
torch. After 20 updates at a rate of 0.02, the weights differ by 1e-3, and the weights computed here are nearer to the
exact ones. With G the gradient of a matrix of A rows and B columns:

    M <- momentum M + (1 - momentum) G
    U  = (1 - momentum) G + momentum M                                          Nesterov's momentum
    W <- W - lr decay W - lr 0.2 sqrt(max(A, B)) orthogonal(U)                  decoupled decay, as AdamW's

The factor 0.2 sqrt(max(A, B)), torch's adjust_lr_fn="match_rms_adamw", gives an update the root mean square that
AdamW's updates usually have, so both can have the same learning rate and the same decay. Jordan's own factor,
sqrt(max(1, A / B)), would need a second learning rate.

ZeRO 1 and 2 put the matrices of a group end to end and give each rank one slice of equal length. The momentum needs no
whole matrix. Each rank then orthogonalises the matrices of which it holds a part. A matrix that is cut is gathered by
all its holders; each of them computes the whole result and keeps its own part. At each border between slices, one
matrix is cut; if slices are smaller than matrices, all matrices are cut.

DeepSpeed 0.19.8 has its own Muon, which is not used. It iterates in fp16, treats a fused q, k and v as one matrix (or
each head as one), and, outside its BF16_Optimizer, clips the orthogonalised update instead of the gradient.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipeline.training.zero.flat_blocks import ParameterPlace

# The Newton-Schulz iteration: the coefficients of Jordan's quintic, the number of steps, and the least norm.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_LEAST_NORM = 1e-7
_RMS = 0.2  # the usual root mean square of AdamW's updates


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix in a group's parameters, which are put end to end. `start`: its first element."""

    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        """One past its last element."""
        return self.start + self.rows * self.columns

    def part(self, rank: int, size: int) -> tuple[int, int]:
        """Returns (first, end) of the group's elements that belong to this matrix and are in the slice of a rank. There
        are none if first >= end. `size`: the number of elements in a slice."""
        return max(self.start, rank * size), min(self.end, (rank + 1) * size)

    def holders(self, size: int) -> range:
        """Returns the ranks whose slices of `size` elements hold a part of this matrix."""
        return range(self.start // size, (self.end - 1) // size + 1)


def is_orthogonalized(name: str) -> bool:
    """Returns whether Muon updates the parameter, which must be a matrix of a Transformer's block. AdamW updates the
    embedding, the head, biases and norms, as Jordan's post advises. It also updates attention pooling, which counts as
    a part of the head, tables of positions and, unlike in the post, a hybrid's convolutions."""
    parts = name.split(".")
    return parts[0] == "blocks" and parts[-1] == "weight" and "norm" not in parts[-2]


def matrices_of(parameters: Iterable[ParameterPlace]) -> tuple[Matrix, ...]:
    """Returns the matrices of a group's parameters, whose places are those in the group's flat partition. q, k and v
    share one parameter, but count as three matrices, since Muon then works better (Jordan's post)."""
    found = list[Matrix]()
    for place in parameters:
        num_parts = 3 if place.name.endswith(".qkv.weight") else 1
        rows, columns = place.shape[0] // num_parts, place.shape[1]
        starts = (place.start + part * rows * columns for part in range(num_parts))
        found += [Matrix(start=start, rows=rows, columns=columns) for start in starts]
    return tuple(found)


def step_matrices(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    *,
    matrices: Sequence[Matrix],
    group: Mapping[str, Any],
    dtype: torch.dtype,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Makes one update of this rank's slice of a group. `weights`, `gradient` and `momentum` are flat float32, and all
    three are changed. `group` has lr, weight_decay and momentum. `dtype` is the precision of the iteration.
    `found_inf`: float32[] on the device; if it is 1, weights and momentum keep their values. Collective if a matrix is
    cut."""
    size = len(weights)
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    is_skipped = torch.zeros_like(weights[0]).bool() if found_inf is None else found_inf.bool()
    gradient.masked_fill_(is_skipped, 0.0)  # it may be NaN, which no factor of 0 removes
    momentum.lerp_(gradient, torch.where(is_skipped, 0.0, 1 - group["momentum"]))
    update = gradient.lerp_(momentum, group["momentum"]).masked_fill_(is_skipped, 0.0)
    gathered = _gathered(update, matrices, rank=rank, num_ranks=num_ranks, dtype=dtype)
    weights.mul_(torch.where(is_skipped, 1.0, 1 - group["lr"] * group["weight_decay"]))
    offset = rank * size
    for matrix in matrices:
        low, high = matrix.part(rank, size)
        if low >= high:
            continue
        whole = gathered.pop(matrix) if matrix in gathered else update[low - offset : high - offset].to(dtype)
        made = orthogonal(whole.view(matrix.rows, matrix.columns)).reshape(-1)
        rate = group["lr"] * _RMS * math.sqrt(max(matrix.rows, matrix.columns))
        weights[low - offset : high - offset].add_(made[low - matrix.start : high - matrix.start], alpha=-rate)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Returns approximately U V^T for a matrix with the singular value decomposition U S V^T, by five steps of a
    Newton-Schulz iteration in the matrix's own precision. The singular values of the result lie between 0.5 and 1.5,
    which works as well as 1 (Jordan's post). Values that were tiny compared with the others may be smaller."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_LEAST_NORM)  # no singular value is above 1
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x


def _gathered(
    update: torch.Tensor, matrices: Sequence[Matrix], *, rank: int, num_ranks: int, dtype: torch.dtype
) -> dict[Matrix, torch.Tensor]:
    """Gathers the cut matrices of which this rank holds a part, and returns them whole and flat. Collective if any
    matrix is cut."""
    size = len(update)
    cut = [matrix for matrix in matrices if len(matrix.holders(size)) > 1]
    if not cut:
        return {}
    own = [matrix for matrix in cut if rank in matrix.holders(size)]
    offset = rank * size
    held = {}
    for matrix in own:
        low, high = matrix.part(rank, size)
        held[matrix] = update[low - offset : high - offset].to(dtype)
    shared = [[matrix for matrix in own if other in matrix.holders(size)] for other in range(num_ranks)]
    outgoing = [held[matrix] for of_other in shared for matrix in of_other]
    parts = [[matrix.part(other, size) for matrix in of_other] for other, of_other in enumerate(shared)]
    lengths = [[high - low for low, high in of_other] for of_other in parts]
    received = update.new_empty(sum(map(sum, lengths)), dtype=dtype)
    dist.all_to_all_single(
        received,
        torch.cat(outgoing) if outgoing else update.new_empty(0, dtype=dtype),
        [sum(of_other) for of_other in lengths],
        [sum(len(held[matrix]) for matrix in of_other) for of_other in shared],
    )
    pieces = iter(torch.split(received, [length for of_other in lengths for length in of_other]))
    found = {matrix: list[torch.Tensor]() for matrix in own}
    for of_other in shared:
        for matrix in of_other:
            found[matrix].append(next(pieces))
    return {matrix: torch.cat(each) for matrix, each in found.items()}

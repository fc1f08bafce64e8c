"""Adafactor as in big_vision: second moments that are products of rows and columns, for tensors that ZeRO has cut.

Sources: big_vision's scale_by_adafactor (optax.py), with which train_vit_g.py trains ViT-g and ViT-G ("Scaling Vision
Transformers", Zhai et al., 2022, section 3.3), and optax's scale_by_factored_rms; "Adafactor" (Shazeer and Stern, 2018,
arXiv:1804.04235). With G the clipped gradient of a matrix W at update t, and S = G^2 + 1e-30:

    b  = min(beta2, 1 - t^-0.8)                                                 beta2 is the cap, 0.999
    r <- b r + (1 - b) (means of S's rows),    c <- b c + (1 - b) (means of S's columns)
    M <- beta1 M + (1 - beta1) G / sqrt(r c^T / mean(r))                        no bias correction
    W <- W - lr M - lr decay W

A tensor without two axes of at least 32 elements keeps all of its second moment V <- b V + (1 - b) S instead. As in
optax, the axes are those of flax's kernels: attention's have an axis of heads, so each head's part of a projection is a
matrix of its own; the kernel of the patches has the axes (patch, patch, 3, width) and is not factored here, as with
patches below 32 px there.

The moments r and c are kept, end to end, where the second moment of the matrix begins that AdamW would keep, and the
rest of it is zero. They are thus fragments of logical tensors like all others, saved and cut in the same way, but need
as much memory as AdamW's. A rank adds up its fragment's rows and columns. One sum over the ranks for each group of
parameters completes them; to it each rank also adds the old moments that it holds, so all ranks get all new ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipeline.training.zero.flat_blocks import HeldPart, ParameterPlace

_LEAST_SIDE = 32  # big_vision's min_dim_size_to_factor
_EPSILON = 1e-30
_EXPONENT = 0.8


@dataclass(frozen=True, kw_only=True)
class Factoring:
    """The matrices that make up a parameter, whose elements have the shape (groups, rows, blocks, columns), abbreviated
    G, R, K and C. Each pair of a group and a block is one matrix. `start`: where its moments lie in the moments of all
    parameters end to end."""

    groups: int
    rows: int
    blocks: int
    columns: int
    start: int = 0

    @property
    def num_rows(self) -> int:
        """The number of the moments of rows, which come before those of columns."""
        return self.groups * self.rows * self.blocks

    @property
    def num_moments(self) -> int:
        """The number of the moments of rows and columns."""
        return self.num_rows + self.groups * self.blocks * self.columns


def factorings_of(parameters: Sequence[ParameterPlace], *, num_heads: int) -> dict[int, Factoring]:
    """Returns the factored parameters, by their number in `parameters`."""
    found: dict[int, Factoring] = {}
    start = 0
    for number, place in enumerate(parameters):
        sides = _sides(place.name, place.shape, num_heads=num_heads)
        if sides and min(sides[1], sides[3]) >= _LEAST_SIDE:
            groups, rows, blocks, columns = sides
            found[number] = Factoring(groups=groups, rows=rows, blocks=blocks, columns=columns, start=start)
            start += found[number].num_moments
    return found


def _sides(name: str, shape: Sequence[int], *, num_heads: int) -> tuple[int, int, int, int] | None:
    """Returns the shape of a parameter as groups, rows, blocks and columns; None if it is no matrix in flax."""
    if len(shape) == 3 and shape[0] == 1:  # a table of positions
        shape = shape[1:]
    if len(shape) != 2 or name == "embed.patch.weight":
        return None
    layer = name.split(".")[-2]
    if layer in ("qkv", "query", "key_value"):
        width = shape[1]
        return num_heads * shape[0] // width, width // num_heads, 1, width
    if layer == "out":
        return 1, shape[0], num_heads, shape[1] // num_heads
    return 1, shape[0], 1, shape[1]


def step_factored(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
    *,
    parts: Sequence[HeldPart],
    group: Mapping[str, Any],
    found_inf: torch.Tensor | None,
) -> None:
    """Makes one update of this rank's flat partition of a group: `weights` and `gradient`, float32[n], of which the
    update overwrites the gradient. `state` has exp_avg, exp_avg_sq and step. `parts`: the fragments of parameters in
    the partition. `group` has the `factorings` of all of them. `found_inf`: float32[] on the device; if it is 1,
    weights and moments keep their values. Collective."""
    is_skipped = torch.zeros_like(state["step"]).bool() if found_inf is None else found_inf.bool()
    factorings: Mapping[int, Factoring] = group["factorings"]
    beta1, cap = group["betas"]
    update_number = state["step"].double() + 1
    state["step"] += torch.where(is_skipped, 0.0, 1.0)
    kept = torch.where(is_skipped, 1.0, torch.clamp(1 - update_number**-_EXPONENT, max=cap)).float()
    gradient.masked_fill_(is_skipped, 0.0)  # it may be NaN, which no factor of 0 removes
    seconds = state["exp_avg_sq"]
    moments = _new_moments(gradient, seconds, parts, factorings=factorings, kept=kept)
    for part in parts:
        own, second = gradient[part.start : part.end], seconds[part.start : part.end]
        if part.number in factorings:
            factoring = factorings[part.number]
            new = moments[factoring.start : factoring.start + factoring.num_moments]
            held = new[part.first : part.first + len(second)]
            second[: len(held)] = held
            _divide(own, part.first, new, factoring)
        else:
            second.mul_(kept).add_((own.square() + _EPSILON) * (1 - kept))
            own.mul_(second.rsqrt())
    gradient.masked_fill_(is_skipped, 0.0)  # 0 divided by moments of 0, before there are any
    # As in optax's ema, the old moment is scaled in its own precision, and the update is the new one before rounding.
    first = state["exp_avg"].mul_(torch.where(is_skipped, 1.0, beta1))
    first.copy_(gradient.mul_(torch.where(is_skipped, 0.0, 1 - beta1)).add_(first))
    rate = torch.where(is_skipped, 0.0, group["lr"])
    weights.mul_(1 - rate * group["weight_decay"]).addcmul_(gradient, -rate)


def _new_moments(
    gradient: torch.Tensor,
    seconds: torch.Tensor,
    parts: Sequence[HeldPart],
    *,
    factorings: Mapping[int, Factoring],
    kept: torch.Tensor,
) -> torch.Tensor:
    """Returns the new moments of rows and columns of all parameters, float32, end to end. Those of parameters outside
    of this group are of no use. Collective."""
    num_moments = sum(factoring.num_moments for factoring in factorings.values())
    moments = gradient.new_zeros(num_moments)
    for part in parts:
        if part.number not in factorings:
            continue
        factoring = factorings[part.number]
        new = moments[factoring.start : factoring.start + factoring.num_moments]
        squares_gRKC, low = _whole_groups(gradient[part.start : part.end], part.first, factoring)
        squares_gRKC.square_()
        num_groups = len(squares_gRKC)
        rows = new[: factoring.num_rows].view(factoring.groups, factoring.rows, factoring.blocks)
        columns = new[factoring.num_rows :].view(factoring.groups, factoring.blocks, factoring.columns)
        rows[low : low + num_groups] += squares_gRKC.sum(dim=3) / factoring.columns * (1 - kept)
        columns[low : low + num_groups] += squares_gRKC.sum(dim=1) / factoring.rows * (1 - kept)
        if part.first == 0:  # once, by the rank that holds the parameter's beginning
            new += _EPSILON * (1 - kept)
        old = seconds[part.start : part.end][: max(0, factoring.num_moments - part.first)]
        new[part.first : part.first + len(old)] += kept * old
    if dist.is_initialized() and num_moments:
        dist.all_reduce(moments)
    return moments


def _divide(gradient: torch.Tensor, first: int, moments: torch.Tensor, factoring: Factoring) -> None:
    """Divides a fragment of a gradient, in place, by the roots of its second moments. `first`: its first element."""
    rows_GRK = moments[: factoring.num_rows].view(factoring.groups, factoring.rows, factoring.blocks)
    columns_GKC = moments[factoring.num_rows :].view(factoring.groups, factoring.blocks, factoring.columns)
    whole_gRKC, low = _whole_groups(gradient, first, factoring)
    chosen = slice(low, low + len(whole_gRKC))
    factors_gRK = (rows_GRK[chosen] / rows_GRK[chosen].mean(dim=1, keepdim=True)).rsqrt()
    whole_gRKC.mul_(factors_gRK[..., None]).mul_(columns_GKC[chosen, None].rsqrt())
    offset = first - low * factoring.rows * factoring.blocks * factoring.columns
    gradient.copy_(whole_gRKC.view(-1)[offset : offset + len(gradient)])


def _whole_groups(fragment: torch.Tensor, first: int, factoring: Factoring) -> tuple[torch.Tensor, int]:
    """Returns a copy of a fragment in the groups to which its elements belong, float32[g, R, K, C] with zeros for other
    elements, and the number of the first of these groups. `first`: the fragment's first element in its parameter."""
    size = factoring.rows * factoring.blocks * factoring.columns
    low, high = first // size, math.ceil((first + len(fragment)) / size)
    whole = fragment.new_zeros((high - low) * size)
    whole[first - low * size : first - low * size + len(fragment)] = fragment
    return whole.view(high - low, factoring.rows, factoring.blocks, factoring.columns), low

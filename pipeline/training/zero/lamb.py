"""LAMB: Adam with a trust ratio for each tensor, for tensors that ZeRO has cut into fragments.

Sources: "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (You et al., 2020, arXiv:1904.00962);
apex's FusedLAMB, with which DeiT III was trained, and timm's optim/lamb.py, which computes the same. With G the clipped
gradient of a tensor W at update t:

    M <- beta1 M + (1 - beta1) G,    V <- beta2 V + (1 - beta2) G^2
    U  = (M / (1 - beta1^t)) / (sqrt(V / (1 - beta2^t)) + epsilon) + decay W
    W <- W - lr (|W| / |U|) U

As in both sources, a tensor without weight decay has no trust ratio, and the ratio is 1 if either norm is 0. The
gradient is clipped before, by the run's own `clip_norm`; apex and timm do so inside the optimiser, at a norm of 1.

|W| and |U| are norms of a parameter of the model. ZeRO cuts it into fragments, and blocks join several parameters in
one flat tensor (flat_blocks.py). Each rank therefore sums the squares of the fragments that it holds, in float64, and
one sum over the ranks completes the norms of a group of parameters. A group that is not decayed needs no exchange.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipeline.training.zero.flat_blocks import HeldPart


def step_tensors(
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
    the partition, without its padding. `found_inf`: float32[] on the device; if it is 1, weights and moments keep their
    values. Collective if the group is decayed."""
    is_skipped = torch.zeros_like(state["step"]).bool() if found_inf is None else found_inf.bool()
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    first, second = state["exp_avg"], state["exp_avg_sq"]
    gradient.masked_fill_(is_skipped, 0.0)  # it may be NaN, which no factor of 0 removes
    first.lerp_(gradient, torch.where(is_skipped, 0.0, 1 - beta1))
    second.mul_(torch.where(is_skipped, 1.0, beta2)).addcmul_(gradient, gradient, value=1 - beta2)
    update_number = state["step"].double() + 1  # in fp32, 1 - 0.999 is off in the fifth digit
    state["step"] += torch.where(is_skipped, 0.0, 1.0)
    torch.sqrt(second, out=gradient)
    gradient.div_((1 - beta2**update_number).sqrt()).add_(group["eps"])
    update = torch.div(first, gradient, out=gradient).div_(1 - beta1**update_number)
    if decay:
        update.add_(weights, alpha=decay)
        _multiply_by_trust(update, weights, parts, num_tensors=group["num_tensors"])
    weights.addcmul_(update, torch.where(is_skipped, 0.0, -group["lr"]))


def _multiply_by_trust(
    update: torch.Tensor, weights: torch.Tensor, parts: Sequence[HeldPart], *, num_tensors: int
) -> None:
    """Multiplies each parameter's update by the norm of its weights over the norm of its update. Collective."""
    pieces = [[flat[part.start : part.end] for part in parts] for flat in (weights, update)]
    norms = torch._foreach_norm([*pieces[0], *pieces[1]], dtype=torch.float64) if parts else ()
    none = update.new_zeros((), dtype=torch.float64)
    squares = [none] * (2 * num_tensors)
    for place, norm in zip([part.number + of * num_tensors for of in (0, 1) for part in parts], norms, strict=True):
        squares[place] = norm.square()
    summed_2T = torch.stack(squares).view(2, num_tensors)
    if dist.is_initialized():
        dist.all_reduce(summed_2T)
    of_weights_T, of_updates_T = summed_2T.sqrt()
    has_both_T = (of_weights_T > 0) & (of_updates_T > 0)
    ratios_T = torch.where(has_both_T, of_weights_T / of_updates_T, 1.0)
    for part, piece in zip(parts, pieces[1], strict=True):
        piece.mul_(ratios_T[part.number])

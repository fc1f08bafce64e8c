"""Optimisers of the paper: Adam with decoupled weight decay to pre-train, SGD with momentum to fine-tune.

Sources: "An Image is Worth 16x16 Words", Tables 3 and 4; big_vision's optax.py and train_vit_g.py for the decay that
follows the schedule, the mask and the head's multiple. With w a decayed weight, u Adam's direction and s(t) = lr(t) /
peak, `rate` (PyTorch's AdamW) moves it by -lr(t) (u + decay w), `schedule` (big_vision) by -(lr(t) u + s(t) decay w):
there the decay does not depend on the peak. big_vision's 1e-4 at a peak of 1e-3 is the paper's 0.1.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from pipeline.config_values import refuse_wrong_values
from shards.errors import UserError

_HEAD = "head.weight"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """`decay` says which tensors `weight_decay` touches: `kernels` only matrices and convolutions (big_vision's mask
    `.*/kernel$`), `all` every parameter. `decay_scale` says what it is multiplied with at each step: the learning
    `rate` (PyTorch's AdamW), or the `schedule` alone, as big_vision does. `head_decay` multiplies it for the head's
    matrix (100 in ViT-G). SGD takes `momentum`; its weight decay is part of the gradient (PyTorch's SGD)."""

    name: Literal["adamw", "sgd"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.0
    decay: Literal["kernels", "all"] = "kernels"
    decay_scale: Literal["rate", "schedule"] = "rate"
    head_decay: float = 1.0

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="optimizer.")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and 0 <= self.momentum < 1 and self.weight_decay >= 0):
            raise UserError(f"allowed are betas and momentum from 0 to below 1 and a decay of 0 or more: {self}")
        if self.epsilon <= 0 or self.head_decay < 0:
            raise UserError(
                f"optimizer.epsilon is {self.epsilon} and optimizer.head_decay {self.head_decay}; "
                "allowed are an epsilon above 0 and a head_decay of 0 or more (1: as every other matrix)"
            )
        if self.name == "sgd" and self.decay_scale == "schedule":
            raise UserError(
                "optimizer.decay_scale is 'schedule' with optimizer.name 'sgd', whose decay is part of the gradient; "
                "take --optimizer.decay-scale rate, or --optimizer.name adamw"
            )


def scaled_by_rate(config: OptimizerConfig, *, peak_rate: float) -> OptimizerConfig:
    """The same decay as a multiple of the learning rate, whose peak is `peak_rate`. UserError where that is 0."""
    if config.decay_scale == "rate":
        return config
    if peak_rate <= 0:
        raise UserError(
            f"schedule.learning_rate is {peak_rate} with optimizer.decay_scale 'schedule'; a decay that follows the "
            "schedule needs one: give a rate above 0, or --optimizer.decay-scale rate"
        )
    return replace(config, decay_scale="rate", weight_decay=config.weight_decay / peak_rate)


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """The optimiser with one group for each weight decay; the learning rate, 0 here, is set anew each step.

    A decay that follows the schedule comes through `scaled_by_rate` first; ValueError where it has not.
    """
    if config.decay_scale != "rate":
        raise ValueError("the decay is not yet a multiple of the learning rate: call scaled_by_rate first")
    by_decay: dict[float, list[torch.nn.Parameter]] = {}
    for name, parameter in named_parameters:
        by_decay.setdefault(decay_of(name, config), []).append(parameter)
    # Strongest first; the order is part of how DeepSpeed lays parameters out, not of what is computed.
    groups = [{"params": by_decay[decay], "weight_decay": decay} for decay in sorted(by_decay, reverse=True)]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=config.momentum, fused=True)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=True)


def decay_of(name: str, config: OptimizerConfig) -> float:
    """Weight decay of one parameter, 0 where the mask leaves it out."""
    if not is_decayed(name, config):
        return 0.0
    return config.weight_decay * config.head_decay if name == _HEAD else config.weight_decay


def is_decayed(name: str, config: OptimizerConfig) -> bool:
    """True where weight decay touches the parameter: matrices' weights, or all."""
    is_kernel = name.endswith(".weight") and "norm" not in name.split(".")[-2]
    return config.decay == "all" or is_kernel


def update_average(average: torch.Tensor, weights: torch.Tensor, *, factor: float) -> None:
    """Polyak averaging, in place: average = factor x average + (1 - factor) x weights (section 4.1: 0.9999)."""
    average.lerp_(weights, 1.0 - factor)

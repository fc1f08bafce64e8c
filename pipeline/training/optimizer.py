"""Optimisers of the paper: Adam with decoupled weight decay to pre-train, SGD with momentum to fine-tune."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """`weight_decay` is multiplied by the learning rate (PyTorch's AdamW); `decay` says which tensors it touches:
    `kernels` only matrices (big_vision's mask `.*/kernel$`), `all` every parameter. SGD takes `momentum`."""

    name: Literal["adamw", "sgd"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.0
    decay: Literal["kernels", "all"] = "kernels"

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and 0 <= self.momentum < 1 and self.weight_decay >= 0):
            raise UserError(f"allowed are betas and momentum from 0 to below 1 and a decay of 0 or more: {self}")


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """The optimiser with one group for decayed tensors and one for the others; rates are set anew each step."""
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in named_parameters:
        (decayed if is_decayed(name, config) else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=config.momentum, fused=True)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=True)


def is_decayed(name: str, config: OptimizerConfig) -> bool:
    """True where weight decay touches the parameter: matrices' weights, or all."""
    is_kernel = name.endswith(".weight") and "norm" not in name.split(".")[-2]
    return config.decay == "all" or is_kernel

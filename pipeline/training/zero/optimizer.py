"""The optimisers (AdamW, SGD, Muon, LAMB and Adafactor), and which parameters they train at which rate.

Sources: "An Image is Worth 16x16 Words", Tables 3 and 4 (Adam with decoupled decay to pre-train, SGD to fine-tune);
big_vision's optax.py and train_vit_g.py for the decay that follows the schedule, the mask and the head's multiple. Let
w be a decayed weight, u Adam's direction and s(t) = lr(t) / peak. Then `rate` (PyTorch's AdamW) moves w by -lr(t) (u +
decay w), and `schedule` (big_vision) by -(lr(t) u + s(t) decay w), where the decay does not depend on the peak.
big_vision's 1e-4 at a peak of 1e-3 is the paper's 0.1.

Layer-wise decay follows BEiT (Bao et al., 2022) and timm's param_groups_layer_decay, which has the same layers: the
embedding (in a ResNet, its root; in a hybrid, also the whole ResNet); each block (or unit), of which the last includes
the final norm; and the head with the hidden layer before it.
"""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from pipeline.training.settings.job import OptimizerConfig
from pipeline.training.zero.adafactor import step_factored
from pipeline.training.zero.flat_blocks import HeldPart, Layout, end_to_end, layout_of
from pipeline.training.zero.lamb import step_tensors
from pipeline.training.zero.muon import is_orthogonalized, matrices_of, step_matrices

_HEAD_PREFIXES = ("head.", "head_dist.", "representation.")
_POOL = "pool."  # attention pooling, which has the head's rate, as in timm
_BLOCK = re.compile(r"blocks\.(\d+)\.|stages\.(\d+)\.(\d+)\.")
_FINAL_NORM = "norm."
_GROUP = re.compile(r"blocks\.\d+|(embed\.resnet\.)?stages\.\d+|embed\.resnet|embed\.patch")
_POSITION = ("embed.position", "embed.class_token", "embed.distillation_token", "embed.registers")
_HEADS = ("head.weight", "head_dist.weight")
RATE_FACTOR = "rate_factor"  # key of a group: the factor of its learning rate
MOMENTS = "moments"  # key of a group: the names of what the optimiser keeps for its parameters
FOUND_INF = "found_inf"  # torch's name: the attribute of an optimiser that says whether an update is skipped
_MATRICES = "matrices"  # key of a group: where the matrices that Muon updates are; empty for other groups
_DTYPE = "dtype"  # key of a group: the precision of Muon's iteration, which is the model's
_PIECE = 1 << 22  # the most elements of a first moment that are in fp32 at once
# torch's own steps, without the wrapper that loads torch._dynamo. Loading it takes a second, in vain if the run
# compiles nothing.
_STEPS = inspect.unwrap(torch.optim.SGD.step), inspect.unwrap(torch.optim.AdamW.step)


def is_trained(name: str, config: OptimizerConfig) -> bool:
    """Returns whether updates change the parameter. They change all parameters but the frozen backbone's."""
    return not config.freeze_backbone or name.startswith(_HEAD_PREFIXES)


def freeze(model: nn.Module, config: OptimizerConfig) -> None:
    """Sets `requires_grad` of every parameter, in place: False for those that are not trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, config))


def rate_factors(names: Iterable[str], config: OptimizerConfig) -> dict[str, float]:
    """Returns the factor of the learning rate for each parameter of a model: 1 for the head, and layer_decay ** n for
    the n-th layer below it."""
    places = {name: _place(name) for name in names}
    if config.layer_decay == 1.0:
        return dict.fromkeys(places, 1.0)
    blocks = sorted({place for place in places.values() if place})
    depths = {(): len(blocks) + 1} | {place: len(blocks) - number for number, place in enumerate(blocks)}
    factors = {name: config.layer_decay ** depths[place] for name, place in places.items()}
    for name in factors:
        if name.startswith((*_HEAD_PREFIXES, _POOL)):
            factors[name] = 1.0
        elif name.startswith(_FINAL_NORM):
            factors[name] = config.layer_decay
    return factors


def group_of(name: str) -> str:
    """Returns the part of the model to which a parameter belongs: a block, a ResNet's stage, the embedding of patches,
    the positions with the tokens before the patches (`embed.position`), a hybrid's root (`embed.resnet`), or else a
    module of the model, such as `norm` and `head`."""
    if name.startswith(_POSITION):
        return _POSITION[0]
    found = _GROUP.match(name)
    return found.group() if found else name.partition(".")[0]


def _place(name: str) -> tuple[int, ...]:
    """Returns the number of a parameter's block, or the numbers of its stage and unit; empty for other parameters."""
    found = _BLOCK.match(name)
    return tuple(int(number) for number in found.groups() if number) if found else ()


class _SGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update, with the same result as torch's."""
        for group in self.param_groups:
            for weights in group["params"] if group["momentum"] else ():
                # In its first update, torch's kernel would leave a new buffer unfilled if it skips the update.
                if weights.grad is not None and "momentum_buffer" not in self.state[weights]:
                    self.state[weights]["momentum_buffer"] = torch.zeros_like(weights)
        _STEPS[0](self, closure)


class _AdamW(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update, with the same result as torch's."""
        _STEPS[1](self, closure)


class _AdamWInBf16(_AdamW):
    """AdamW that keeps its first moment in bf16 between steps, rounded to nearest. As in optax's
    scale_by_adam(mu_dtype="bfloat16"), which big_vision uses, an update uses the new moment before it is rounded."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - as torch has it
        """Makes one update, one piece after the other, since torch's kernel needs the moment in fp32."""
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self._step_in_pieces(weights, weights.grad, group)

    def _step_in_pieces(self, weights: torch.Tensor, gradients: torch.Tensor, group: dict[str, Any]) -> None:
        state, skips = self.state[weights], skip_flag(self)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weights.device)
            state["exp_avg"] = torch.zeros_like(weights, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(weights)
        flat = (weights, gradients, state["exp_avg"], state["exp_avg_sq"])
        for piece, gradient, first, second in zip(*(each.view(-1).split(_PIECE) for each in flat), strict=True):
            wide = first.float()
            adamw(
                *([piece], [gradient], [wide], [second], [], [state["step"].clone()]),
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                found_inf=skips,
            )
            first.copy_(wide)
        state["step"] += 1.0 if skips is None else 1.0 - skips


class _Muon(_AdamW):
    """Muon for the groups with matrices, AdamW for the others. During an update, a group with matrices has a single
    flat parameter: this rank's slice, which DeepSpeed makes. The update overwrites its gradient."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group[_MATRICES]]
        super().step(closure)
        self.param_groups = groups
        for group in groups:
            if group[_MATRICES]:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        (weights,) = group["params"]
        state = self.state[weights]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weights)
        momentum = state["momentum_buffer"]
        matrices, dtype = group[_MATRICES], group[_DTYPE]
        step_matrices(
            weights, weights.grad, momentum, matrices=matrices, group=group, dtype=dtype, found_inf=skip_flag(self)
        )


class OfParts(_AdamW):
    """An optimiser that must know which parameters of the model it updates. During an update, a group has a single flat
    parameter: this rank's partition, which DeepSpeed makes. The update overwrites its gradient. The engine sets `parts`
    and `about` as soon as it knows the partitions; all learning rates are 0 until then. `parts`: the fragments of the
    model's parameters in each partition. `about`: what the rule needs to know about all parameters, as if it were in
    each group. `first_moment`: the precision in which the first moment is kept between steps."""

    parts: Mapping[torch.Tensor, Sequence[HeldPart]] = MappingProxyType({})
    about: Mapping[str, Any] = MappingProxyType({"num_tensors": 0, "factorings": MappingProxyType({})})
    first_moment: torch.dtype = torch.float32
    rule = staticmethod(step_tensors)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - as torch has it
        """Makes one update."""
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state = self.state[weights]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=weights.device)
                    state["exp_avg"] = torch.zeros_like(weights, dtype=self.first_moment)
                    state["exp_avg_sq"] = torch.zeros_like(weights)
                own, known = self.parts.get(weights, ()), {**group, **self.about}
                self.rule(weights, weights.grad, state, parts=own, group=known, found_inf=skip_flag(self))


class _Adafactor(OfParts):
    rule = staticmethod(step_factored)


def skip_flag(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """Returns whether the running update is skipped, as torch's optimisers have it: float32[] on the device, 1 if it
    is, else 0. None: every update is made."""
    found: torch.Tensor | None = getattr(optimizer, FOUND_INF, None)
    return found


def ways_of(names: Iterable[str], config: OptimizerConfig) -> dict[str, tuple[float, float, bool]]:
    """Returns how each trained parameter of a model is updated: its weight decay, its rate factor, and whether by
    Muon's rule. `names`: those of all the model's parameters."""
    factors = rate_factors(names, config)
    return {
        name: (decay_of(name, config), factor, _is_of_muon(name, config))
        for name, factor in factors.items()
        if is_trained(name, config)
    }


def build_optimizer(
    named_tensors: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerConfig, *, layout: Layout | None = None
) -> torch.optim.Optimizer:
    """Returns the optimiser, with a group for each combination of weight decay and RATE_FACTOR, in which Muon's
    matrices are separate groups. The learning rate is 0 here and set at each step. Parameters that are not trained are
    left out. `named_tensors`: those that DeepSpeed sees. `layout`: the parameters in each of them (None: tensors and
    parameters are the same).

    A decay that follows the schedule must be converted by `scaled_by_rate` first. Raises ValueError otherwise.
    """
    if config.decay_scale != "rate":
        raise ValueError("the decay is not yet a multiple of the learning rate: call scaled_by_rate first")
    tensors = dict(named_tensors)
    if layout is None:
        layout = layout_of({name: tensor.shape for name, tensor in tensors.items()}, {})
    ways = ways_of((place.name for places in layout.values() for place in places), config)
    members: dict[tuple[float, float, bool], list[str]] = {}
    for name, places in layout.items():
        if places[0].name in ways:
            members.setdefault(ways[places[0].name], []).append(name)
    # The strongest decay comes first. The order determines how DeepSpeed lays out parameters, but not the results.
    groups: list[dict[str, Any]] = []
    for key in sorted(members, reverse=True):
        (decay, factor, is_of_muon), names = key, members[key]
        group = {"params": [tensors[name] for name in names], "weight_decay": decay, RATE_FACTOR: factor}
        group[MOMENTS] = moments_of(layout[names[0]][0].name, config)
        group[_MATRICES] = matrices_of(end_to_end(layout, names)) if is_of_muon else ()
        if is_of_muon:
            group |= {"momentum": config.muon_momentum, _DTYPE: tensors[names[0]].dtype}
        groups.append(group)
    if config.name == "sgd":
        return _SGD(groups, lr=0.0, momentum=config.momentum, fused=True)
    betas = (config.beta1, config.beta2)
    if config.name == "muon":
        return _Muon(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=True)
    if config.name == "lamb":
        return OfParts(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=True)
    if config.name == "adafactor":
        adafactor = _Adafactor(groups, lr=0.0, betas=betas, fused=True)
        adafactor.first_moment = torch.bfloat16 if config.first_moment == "bf16" else torch.float32
        return adafactor
    kind = _AdamWInBf16 if config.first_moment == "bf16" else _AdamW
    return kind(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=True)


def moments_of(name: str, config: OptimizerConfig) -> tuple[str, ...]:
    """Returns PyTorch's names of what the optimiser keeps for a parameter that it updates, from its first step on."""
    if config.name == "sgd":
        return ("momentum_buffer",) if config.momentum else ()
    return ("momentum_buffer",) if _is_of_muon(name, config) else ("exp_avg", "exp_avg_sq")


def _is_of_muon(name: str, config: OptimizerConfig) -> bool:
    return config.name == "muon" and is_orthogonalized(name)


def decay_of(name: str, config: OptimizerConfig) -> float:
    """Returns the weight decay of one parameter; 0 if the mask excludes it."""
    if not is_decayed(name, config):
        return 0.0
    return config.weight_decay * config.head_decay if name in _HEADS else config.weight_decay


def is_decayed(name: str, config: OptimizerConfig) -> bool:
    """Returns whether weight decay applies to the parameter. Depending on `config.decay`, it applies to all parameters,
    or only to kernels, which are weights that do not belong to a norm."""
    is_kernel = name.endswith(".weight") and "norm" not in name.split(".")[-2]
    return config.decay == "all" or is_kernel


def update_averages(
    averages: list[torch.Tensor],
    weights: list[torch.Tensor],
    *,
    decay: float,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Updates Polyak averages in place: average = decay x average + (1 - decay) x weights (section 4.1: 0.9999). On a
    GPU, this is one kernel for all tensors, with the same bits as a `lerp_` for each. `found_inf`: float32[] on the
    device; if it is 1, nothing changes."""
    if found_inf is None:
        torch._foreach_lerp_(averages, weights, 1.0 - decay)
        return
    share = torch.where(found_inf.bool(), 0.0, 1.0 - decay)
    for average, own in zip(averages, weights, strict=True):
        average.lerp_(own, share)

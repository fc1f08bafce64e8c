"""Which parameters are trained, and at what share of the learning rate: by layer, from their names. Pure.

Also the groups of layers whose norms a run shows.

Layer-wise decay as in BEiT (Bao et al., 2022) and timm's param_groups_layer_decay, whose layers these are: the
embedding (or a ResNet's root; of a hybrid, its whole ResNet), each block (or unit), the last of which includes the
final norm, and the head with the hidden layer before it.
"""

import re
from collections.abc import Iterable

from torch import nn

from pipeline.training.settings.job import OptimizerConfig

_HEAD = ("head.", "representation.")
_POOL = "pool."  # attention pooling, which has the head's rate in timm, too
_BLOCK = re.compile(r"blocks\.(\d+)\.|stages\.(\d+)\.(\d+)\.")
_FINAL_NORM = "norm."
_GROUP = re.compile(r"blocks\.\d+|(embed\.resnet\.)?stages\.\d+|embed\.resnet|embed\.patch")
_POSITION = ("embed.position", "embed.class_token", "embed.registers")


def is_trained(name: str, config: OptimizerConfig) -> bool:
    """Whether updates change the parameter: all but a frozen backbone."""
    return not config.freeze_backbone or name.startswith(_HEAD)


def freeze(model: nn.Module, config: OptimizerConfig) -> None:
    """Makes what is not trained need no gradient, in place."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, config))


def rate_factors(names: Iterable[str], config: OptimizerConfig) -> dict[str, float]:
    """The factors of the learning rate for each parameter of a model: 1 for the head, layer_decay to the power of n
    for the layer n below it."""
    places = {name: _place(name) for name in names}
    if config.layer_decay == 1.0:
        return dict.fromkeys(places, 1.0)
    blocks = sorted({place for place in places.values() if place})
    depths = {(): len(blocks) + 1} | {place: len(blocks) - number for number, place in enumerate(blocks)}
    factors = {name: config.layer_decay ** depths[place] for name, place in places.items()}
    for name in factors:
        if name.startswith((*_HEAD, _POOL)):
            factors[name] = 1.0
        elif name.startswith(_FINAL_NORM):
            factors[name] = config.layer_decay
    return factors


def group_of(name: str) -> str:
    """The part of the model that a parameter belongs to: a block, a ResNet's stage, the embedding of patches, that of
    positions with the class token and registers (`embed.position`), a hybrid's root (`embed.resnet`), or else a module
    of the model, such as `norm` and `head`."""
    if name.startswith(_POSITION):
        return _POSITION[0]
    found = _GROUP.match(name)
    return found.group() if found else name.partition(".")[0]


def _place(name: str) -> tuple[int, ...]:
    """The numbers of a block, or of a unit and its stage; empty for all else."""
    found = _BLOCK.match(name)
    return tuple(int(number) for number in found.groups() if number) if found else ()

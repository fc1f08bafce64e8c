"""Reads and writes published .npz files: removes their prefixes, stacked layers and old shapes.

Sources: vision_transformer's checkpoint.py, big_vision's utils.py (`load_params`), big_transfer.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from pipeline.models.config import MOST_LAYERS, ModelConfig
from pipeline.models.conversion import npz_bit, npz_vit
from pipeline.models.conversion.layout import read_layout, without_class_row, write_layout
from pipeline.models.conversion.open_file import open_tensor_file
from pipeline.models.conversion.sizes import Hints, assumed, shapes_in_file
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.conversion.zip_file import write_npz
from pipeline.models.weights.folder import Weights
from pipeline.models.weights.safetensors import MOST_TENSORS, TensorByName
from shards.errors import InvalidDataError, UserError

log = logging.getLogger(__name__)
Dialect = Literal["vision_transformer", "big_vision"]
PREFIXES = ("opt/target/", "params/img/", "params/", "")
_FIRST = ("embedding/kernel", "root_block/conv_root/kernel", "resnet/root_block/standardized_conv2d/kernel")
_STACK = "Transformer/encoderblock/"


def open_npz(path: Path, hints: Hints) -> Weights:
    """The weights in a published file of either dialect. UserError with the tensor that does not fit, and why."""
    file = normalised(npz_bit.without_numbers(open_tensor_file(path)))
    bit_names = npz_bit.names_in(file)
    beside: tuple[str, ...] = ()  # what else is assumed
    if bit_names is not None:
        config = npz_bit.config_in(file, bit_names, hints)
        layout = npz_bit.layout(config, bit_names)
    else:
        file, beside = npz_vit.with_positions(file)
        names = npz_vit.names_in(file)
        config = npz_vit.config_in(file, names, hints)
        layout = npz_vit.layout(config, names)
    shapes = shapes_in_file(config)
    tensor = read_layout(file, layout, shapes, advice=hints.advice())
    said = assumed(config, said=("num_heads",), hints=hints) + beside
    return Weights(where=str(path), config=config, labels=(), shapes=shapes, tensor=tensor, assumed=said)


def save_npz(path: Path, *, config: ModelConfig, tensor: TensorByName, dialect: Dialect) -> None:
    """Writes the file of one dialect; for BiT, "vision_transformer" means big_transfer. Logs what is lost."""
    is_big_vision = dialect == "big_vision"
    if config.is_bit:
        bit_names = npz_bit.BIG_VISION if is_big_vision else npz_bit.BIG_TRANSFER
        layout, prefix = npz_bit.layout(config, bit_names), bit_names.prefix
    else:
        if is_big_vision and config.resnet:
            raise UserError(
                "big_vision has no hybrids; allowed: the formats vision_transformer and timm, or give a ViT or a BiT"
            )
        names = npz_vit.BIG_VISION if is_big_vision else npz_vit.VISION_TRANSFORMER
        layout, prefix = npz_vit.layout(config, names), names.prefix
        has_token = config.num_class_tokens > 0
        tensor = without_class_row(tensor) if is_big_vision and has_token and "embed.position" in layout else tensor
    lost = _flags_of_what_is_lost(config)
    if lost:
        log.warning("%s cannot say how this model computes; patchline import needs %s with it", path, " ".join(lost))
    write_npz(path, ((prefix + name, value) for name, value in write_layout(layout, tensor)))


def _flags_of_what_is_lost(config: ModelConfig) -> list[str]:
    """Flags that `patchline import` needs: settings that differ from the paper's code and that the file cannot hold."""
    flags = []
    if config.gelu != npz_vit.USUAL.gelu:
        flags.append(f"--gelu {config.gelu}")
    if config.layer_norm_epsilon != npz_vit.USUAL.layer_norm_epsilon:
        flags.append(f"--layer-norm-epsilon {config.layer_norm_epsilon}")
    if config.resnet and config.resnet_epsilons != npz_vit.USUAL.resnet_epsilons:
        flags.append(f"--resnet-epsilons {config.resnet_epsilons}")
    return flags


def normalised(file: TensorFile) -> TensorFile:
    """Only the model's tensors, without a prefix, one tensor per layer, group norm's vectors as vectors.

    Tensors without the prefix (the optimiser's state, a text tower) are not part of the model.
    """
    prefix = next((p for p in PREFIXES if any(p + first in file.shapes for first in _FIRST)), None)
    if prefix is None:
        some = ", ".join(sorted(file.shapes)[:5])
        raise UserError(
            f"{file.where!r} has no embedding/kernel and no root_block, with none of the prefixes {PREFIXES[:-1]}; its "
            f"tensors are {some}, ...; give the file of a ViT, a hybrid or a BiT ResNet"
        )
    bare = file.renamed({name.removeprefix(prefix): name for name in file.shapes if name.startswith(prefix)})
    if "probe" in bare.shapes:  # as big_vision named its attention pooling at first (fix_old_checkpoints)
        bare = bare.renamed({npz_vit.pool_name(name): name for name in bare.shapes})
    return _vectors(_unstacked(bare))


def _unstacked(file: TensorFile) -> TensorFile:
    """big_vision's `scan` stacks the tensors of all layers: (depth, ...)."""
    stacked = {name: shape for name, shape in file.shapes.items() if name.startswith(_STACK)}
    if not stacked:
        return file
    _refuse_other_depths(file.where, stacked)
    sources = dict(_slices(stacked))
    shapes = {name: shape for name, shape in file.shapes.items() if name not in stacked}
    shapes |= {name: stacked[old][1:] for name, (old, _) in sources.items()}
    kept: dict[str, torch.Tensor] = {}  # a stack has a slice for every layer; it is read once

    def read(name: str) -> torch.Tensor:
        if name not in sources:
            return file.read(name)
        old, number = sources[name]
        if old not in kept:
            kept[old] = file.read(old)
        return kept[old][number]

    return TensorFile(where=file.where, shapes=shapes, read=read)


def _refuse_other_depths(where: str, stacked: dict[str, tuple[int, ...]]) -> None:
    depth = next((shape[0] for shape in stacked.values() if shape), 0)
    if len(stacked) * depth > MOST_TENSORS:
        raise InvalidDataError(
            f"{where!r} has {len(stacked):,} tensors of {depth:,} layers; allowed: {MOST_TENSORS:,} of all layers: "
            "fetch the file again"
        )
    for name, shape in stacked.items():
        if not shape or shape[0] != depth or min(shape) < 1 or depth > MOST_LAYERS:
            raise UserError(
                f"{name} in {where!r} is {list(shape)}, others are of {depth} layers; a stack has one slice for each "
                f"of the layers, of which {MOST_LAYERS} are allowed: fetch the file again"
            )


def _slices(stacked: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[str, int]]]:
    for name, shape in stacked.items():
        for number in range(shape[0]):
            yield f"Transformer/encoderblock_{number}/{name.removeprefix(_STACK)}", (name, number)


def _vectors(file: TensorFile) -> TensorFile:
    """Old hybrids have group norm as (1, 1, 1, C) (flax issue 1721). BiT still has, and its layout expects that."""
    pattern = r"(gn_root|block\d+/unit\d+/(gn\d|gn_proj))/(scale|bias)$"
    if "embedding/kernel" not in file.shapes:
        return file
    old = {name for name, shape in file.shapes.items() if re.match(pattern, name) and shape[:-1] == (1, 1, 1)}
    shapes = {name: shape[-1:] if name in old else shape for name, shape in file.shapes.items()}
    return TensorFile(
        where=file.where,
        shapes=shapes,
        read=lambda name: file.read(name).flatten() if name in old else file.read(name),
    )

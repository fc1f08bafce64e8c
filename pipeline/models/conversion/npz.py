"""Published .npz files of ViTs, hybrids and BiT ResNets, by vision_transformer, big_transfer and big_vision.

Each library has its own names, in a table below. Reading also removes prefixes, takes stacked layers apart, and accepts
old shapes and names. Sources: vision_transformer's checkpoint.py, models_vit.py and models_resnet.py; big_vision's
utils.py (`load_params`), models/vit.py (`fix_old_checkpoints`) and models/bit_paper.py; big_transfer's
bit_pytorch/models.py (`load_from`).

big_vision adds position embeddings before it prepends the class token, so its table has no row for the token. Its files
do not hold the fixed embeddings (posemb "sincos2d"), so they are computed here. TensorFlow, in which big_transfer is
written, appends a number to a layer's name if the name is taken: `standardized_conv2d_17`.

Shape letters: D width, h heads, d width of a head, P patch, C channels, N patches.
"""

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from pipeline.models.build import shapes_of
from pipeline.models.config import MOST_LAYERS, ModelConfig
from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.layout import (
    AS_IS,
    FLAX_CONVOLUTION,
    FLAX_DENSE,
    FLAX_NORM,
    TENSOR,
    VECTOR_OF_FOUR,
    LayerTensors,
    OurView,
    Row,
    Section,
    Table,
    Transform,
    layout_of,
    one_to_one,
    positions,
    without_class_row,
    write_layout,
)
from pipeline.models.conversion.open_file import open_tensor_file
from pipeline.models.conversion.sizes import (
    BIT_UNITS,
    Declared,
    Found,
    Usual,
    bit_in,
    side_of,
    transformer_in,
    weights_of,
)
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.conversion.zip_file import write_npz
from pipeline.models.positions import from_axes, sines
from pipeline.models.weights.folder import Assumption, Weights
from pipeline.models.weights.safetensors import MOST_TENSORS, TensorByName
from shards.errors import InvalidDataError, UserError

log = logging.getLogger(__name__)
Dialect = Literal["vision_transformer", "big_vision"]
PREFIXES = ("opt/target/", "params/img/", "params/", "")
_WRITTEN_PREFIX: dict[Dialect, str] = {"vision_transformer": "", "big_vision": "params/"}
_FIRST = ("embedding/kernel", "root_block/conv_root/kernel", "resnet/root_block/standardized_conv2d/kernel")
_STACK, _BLOCK = "Transformer/encoderblock/", "Transformer/encoderblock_{}/"
TABLE = "pos_embedding"
_MAP = "MAPHead_0/"  # attention pooling
_IMAGE_SIZE = 224  # px: the size at which big_vision trains models with this table
_POSITIONS = ("pos_embedding", "Transformer/pos_embedding", "Transformer/posembed_input/pos_embedding")
_TENSORFLOW_NORM: LayerTensors = {"weight": ("gamma", AS_IS), "bias": ("beta", AS_IS)}
_FLAX_BIT_NORM: LayerTensors = {"weight": ("scale", VECTOR_OF_FOUR), "bias": ("bias", VECTOR_OF_FOUR)}


@dataclass(frozen=True, kw_only=True)
class NpzNames:
    """What differs between the dialects of a ViT. `class_row`: whether the position table has a row for the class
    token."""

    attention: str
    second_norm: str
    mlp: str
    position: str
    class_row: bool


VISION_TRANSFORMER = NpzNames(
    attention="MultiHeadDotProductAttention_1",
    second_norm="LayerNorm_2",
    mlp="MlpBlock_3",
    position="Transformer/posembed_input/pos_embedding",
    class_row=True,
)
BIG_VISION = NpzNames(
    attention="MultiHeadDotProductAttention_0",
    second_norm="LayerNorm_1",
    mlp="MlpBlock_0",
    position="pos_embedding",
    class_row=False,
)


def open_npz(path: Path, hints: Hints) -> Weights:
    """Opens the weights in a published file of any dialect. Raises a UserError that names the tensor that does not fit
    and says why."""
    file = normalised(_without_numbers(open_tensor_file(path)))
    dialect: Dialect | None = None
    if _FIRST[2] in file.shapes:
        dialect = "vision_transformer"  # for BiT, this means big_transfer
    elif _FIRST[1] in file.shapes:
        dialect = "big_vision"
    if dialect:
        table = bit_table(dialect)
        found = bit_in(OurView(file=file, table=table), usual=Usual(), hints=hints)
    else:
        file, beside = with_positions(file)
        names = names_in(file)
        found = _transformer(file, names, hints)
        found = replace(found, assumed=(*found.assumed, *beside))
        table = vit_table(found.config, names)
    return weights_of(file, table, found, advice=hints.advice())


def _transformer(file: TensorFile, names: NpzNames, hints: Hints) -> Found:
    """Finds the ViT or hybrid from the shapes of a file without its prefix and with unstacked layers."""
    patch, _, _, width = file.shape("embedding/kernel", 4)
    _, num_heads, _ = file.shape(f"{_BLOCK.format(0)}{names.attention}/query/kernel", 3)
    declared = Declared(
        width=width,
        patch=patch,
        num_heads=num_heads,
        class_row=names.class_row,
        is_square=True,  # both dialects' own resampling assumes a square grid
    )
    view = OurView(file=file, table=_vit_sections(names, patch=patch, num_heads=num_heads, position=AS_IS))
    return transformer_in(view, declared, usual=Usual(said=("num_heads",)), hints=hints)


def save_npz(path: Path, *, config: ModelConfig, tensor: TensorByName, dialect: Dialect) -> None:
    """Writes the file of one dialect; for BiT, "vision_transformer" means big_transfer. Logs the settings that the file
    cannot hold."""
    if config.is_bit:
        table = bit_table(dialect)
    else:
        table = vit_table(config, BIG_VISION if dialect == "big_vision" else VISION_TRANSFORMER)
        if dialect == "big_vision" and config.num_class_tokens and config.has_table:
            tensor = without_class_row(tensor)
    if lost := _flags_of_what_is_lost(config):
        log.warning("%s cannot say how this model computes; patchline import needs %s with it", path, " ".join(lost))
    layout, prefix = layout_of(table, shapes_of(config)), _WRITTEN_PREFIX[dialect]
    write_npz(path, ((prefix + name, value) for name, value in write_layout(layout, tensor)))


def _flags_of_what_is_lost(config: ModelConfig) -> list[str]:
    """Returns the flags that `patchline import` will need: settings that differ from the paper's code and that the file
    cannot hold."""
    flags, usual = list[str](), Usual()
    if config.gelu != usual.gelu:
        flags.append(f"--gelu {config.gelu}")
    if config.layer_norm_epsilon != usual.layer_norm_epsilon:
        flags.append(f"--layer-norm-epsilon {config.layer_norm_epsilon}")
    if config.resnet and config.resnet_epsilons != usual.resnet_epsilons:
        flags.append(f"--resnet-epsilons {config.resnet_epsilons}")
    return flags


def vit_table(config: ModelConfig, names: NpzNames) -> Table:
    """Returns the table of a ViT's or a hybrid's tensors in a file of the dialect."""
    position = positions(class_row=names.class_row, class_token=config.num_class_tokens > 0)
    return _vit_sections(names, patch=config.size.patch, num_heads=config.size.num_heads, position=position)


def _vit_sections(names: NpzNames, *, patch: int, num_heads: int, position: Transform) -> Table:
    # (D, P * P * C) -> (P, P, C, D)
    patches = one_to_one(lambda t: t.T.reshape(patch, patch, -1, t.shape[0]), lambda t: t.flatten(0, 2).T)
    # (D, D) -> (h, d, D)
    out = one_to_one(lambda t: t.T.reshape(num_heads, -1, t.shape[0]), lambda t: t.flatten(0, 1).T)
    out_layer = {"weight": ("kernel", out), "bias": ("bias", AS_IS)}
    attention, pooling = f"{names.attention}/", f"{BIG_VISION.attention}/"
    return (
        Section(
            ours="embed.resnet.",
            rows=(("conv_root.", "conv_root/", FLAX_CONVOLUTION), ("norm_root.", "gn_root/", FLAX_NORM)),
        ),
        Section(
            ours="embed.resnet.stages.{}.{}.",
            theirs="block{}/unit{}/",
            first=1,
            rows=(
                ("conv1.", "conv1/", FLAX_CONVOLUTION),
                ("norm1.", "gn1/", FLAX_NORM),
                ("conv2.", "conv2/", FLAX_CONVOLUTION),
                ("norm2.", "gn2/", FLAX_NORM),
                ("conv3.", "conv3/", FLAX_CONVOLUTION),
                ("norm_out.", "gn3/", FLAX_NORM),
                ("conv_proj.", "conv_proj/", FLAX_CONVOLUTION),
                ("norm_proj.", "gn_proj/", FLAX_NORM),
            ),
        ),
        Section(
            rows=(
                ("embed.patch.", "embedding/", {"weight": ("kernel", patches), "bias": ("bias", AS_IS)}),
                ("embed.class_token", "cls", TENSOR),
                ("embed.position", names.position, {"": ("", position)}),
            )
        ),
        Section(
            ours="blocks.{}.",
            theirs=_BLOCK,
            rows=(
                ("norm1.", "LayerNorm_0/", FLAX_NORM),
                _fused("attention.qkv.", attention, ("query", "key", "value"), num_heads),
                ("attention.out.", f"{attention}out/", out_layer),
                ("norm2.", f"{names.second_norm}/", FLAX_NORM),
                ("mlp.dense1.", f"{names.mlp}/Dense_0/", FLAX_DENSE),
                ("mlp.dense2.", f"{names.mlp}/Dense_1/", FLAX_DENSE),
            ),
        ),
        Section(rows=(("norm.", "Transformer/encoder_norm/", FLAX_NORM),)),
        Section(
            ours="pool.",
            theirs=_MAP,  # only big_vision has it
            rows=(
                ("probe", "probe", TENSOR),
                _fused("query.", pooling, ("query",), num_heads),
                _fused("key_value.", pooling, ("key", "value"), num_heads),
                ("out.", f"{pooling}out/", out_layer),
                ("norm.", "LayerNorm_0/", FLAX_NORM),
                ("mlp.dense1.", f"{BIG_VISION.mlp}/Dense_0/", FLAX_DENSE),
                ("mlp.dense2.", f"{BIG_VISION.mlp}/Dense_1/", FLAX_DENSE),
            ),
        ),
        Section(rows=(("representation.", "pre_logits/", FLAX_DENSE), ("head.", "head/", FLAX_DENSE))),
    )


def _fused(ours: str, theirs: str, parts: tuple[str, ...], num_heads: int) -> Row:
    """Returns the row of a dense layer of our attention that is several layers in the file: (n * D, D) -> n tensors (D,
    h, d)."""
    weights = Transform(
        split=lambda t: tuple(piece.T.reshape(piece.shape[1], num_heads, -1) for piece in t.chunk(len(parts))),
        join=lambda pieces: torch.cat([piece.flatten(1).T for piece in pieces]),
    )
    biases = Transform(
        split=lambda t: tuple(piece.reshape(num_heads, -1) for piece in t.chunk(len(parts))),
        join=lambda pieces: torch.cat([piece.flatten() for piece in pieces]),
    )
    return ours, tuple(f"{theirs}{part}/" for part in parts), {"weight": ("kernel", weights), "bias": ("bias", biases)}


def bit_table(dialect: Dialect) -> Table:
    """Returns the table of a BiT ResNet's tensors. In TensorFlow the three layers of a unit are a, b and c, and the
    projection is part of a."""
    if dialect == "big_vision":
        units: tuple[Row, ...] = (
            ("norm1.", "gn1/", _FLAX_BIT_NORM),
            ("conv1.", "conv1/", FLAX_CONVOLUTION),
            ("norm2.", "gn2/", _FLAX_BIT_NORM),
            ("conv2.", "conv2/", FLAX_CONVOLUTION),
            ("norm3.", "gn3/", _FLAX_BIT_NORM),
            ("conv3.", "conv3/", FLAX_CONVOLUTION),
            ("conv_proj.", "conv_proj/", FLAX_CONVOLUTION),
        )
        return (
            Section(rows=(("conv_root.", "root_block/conv_root/", FLAX_CONVOLUTION),)),
            Section(ours=BIT_UNITS, theirs="block{}/unit{:02d}/", first=1, rows=units),
            Section(rows=(("norm.", "norm-pre-head/", _FLAX_BIT_NORM), ("head.", "head/", FLAX_DENSE))),
        )
    head = one_to_one(lambda t: t.T[None, None], lambda t: t[0, 0].T)
    return (
        Section(rows=(("conv_root.", "resnet/root_block/standardized_conv2d/", FLAX_CONVOLUTION),)),
        Section(
            ours=BIT_UNITS,
            theirs="resnet/block{}/unit{:02d}/",
            first=1,
            rows=(
                ("norm1.", "a/group_norm/", _TENSORFLOW_NORM),
                ("conv1.", "a/standardized_conv2d/", FLAX_CONVOLUTION),
                ("norm2.", "b/group_norm/", _TENSORFLOW_NORM),
                ("conv2.", "b/standardized_conv2d/", FLAX_CONVOLUTION),
                ("norm3.", "c/group_norm/", _TENSORFLOW_NORM),
                ("conv3.", "c/standardized_conv2d/", FLAX_CONVOLUTION),
                ("conv_proj.", "a/proj/standardized_conv2d/", FLAX_CONVOLUTION),
            ),
        ),
        Section(
            rows=(
                ("norm.", "resnet/group_norm/", _TENSORFLOW_NORM),
                ("head.", "resnet/head/conv2d/", {"weight": ("kernel", head), "bias": ("bias", AS_IS)}),
            )
        ),
    )


def _without_numbers(file: TensorFile) -> TensorFile:
    """Returns the file with TensorFlow's numbered layers under their plain names."""
    return file.renamed(
        {re.sub(r"/standardized_conv2d_\d+/", "/standardized_conv2d/", name): name for name in file.shapes}
    )


def normalised(file: TensorFile) -> TensorFile:
    """Returns only the model's tensors, without a prefix, with one tensor per layer, and with the parameters of group
    norm as vectors.

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
    if "probe" in bare.shapes:  # the first names of big_vision's attention pooling (fix_old_checkpoints)
        bare = bare.renamed({pool_name(name): name for name in bare.shapes})
    return _vectors(_unstacked(bare))


def _unstacked(file: TensorFile) -> TensorFile:
    """Returns the file with one tensor per layer. big_vision's `scan` stacks the tensors of all layers as (depth,
    ...)."""
    stacked = {name: shape for name, shape in file.shapes.items() if name.startswith(_STACK)}
    if not stacked:
        return file
    _refuse_other_depths(file.where, stacked)
    sources = dict(_slices(stacked))
    shapes = {name: shape for name, shape in file.shapes.items() if name not in stacked}
    shapes |= {name: stacked[old][1:] for name, (old, _) in sources.items()}
    kept: dict[str, torch.Tensor] = {}  # a stack holds every layer's slice, so it is read only once

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
    """Returns the file with the parameters of group norm as vectors. Old hybrids have them as (1, 1, 1, C) (flax issue
    1721). BiT still does, and its table expects this, so its files are not changed."""
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


def with_positions(file: TensorFile) -> tuple[TensorFile, tuple[Assumption, ...]]:
    """Returns the file with a position table, and what is assumed about the table. big_vision does not store a table
    that it computes.

    Raises UserError if the table is missing in a file of the other dialect, whose models all learn it.
    """
    if any(name in file.shapes for name in _POSITIONS):
        return file, ()
    if _is_old(file) or "conv_root/kernel" in file.shapes:
        raise UserError(
            f"{file.where!r} has no position embeddings ({_POSITIONS[-1]}), which every model of vision_transformer "
            "has; allowed without are big_vision's, which computes them: fetch the file again"
        )
    file = with_table(file)
    _, num_positions, _ = file.shape(TABLE, 3)
    side = math.isqrt(num_positions)
    return file, (Assumption(field="position", value=f"embeddings sincos2d of {side} x {side} patches"),)


def sincos_table(side: int, width: int) -> torch.Tensor:
    """Returns the table of sines for side x side patches, float32 (1, N, D). Raises UserError if the width does not
    allow one."""
    if width % 4 or width < 8:
        raise UserError(
            f"the file has no {TABLE}, and its width {width} has no table of sines; allowed: multiples of 4 from 8 "
            "on: give the file of a model with position embeddings"
        )
    axis_LD = sines(side, width)
    return from_axes(axis_LD, axis_LD, num_prefix_tokens=0)


def with_table(file: TensorFile) -> TensorFile:
    """Returns a file without position embeddings with big_vision's computed table added. Hybrids are not supported."""
    patch, _, _, width = file.shape("embedding/kernel", 4)
    side = max(1, _IMAGE_SIZE // patch)

    def read(name: str) -> torch.Tensor:
        return sincos_table(side, width) if name == TABLE else file.read(name)

    sincos_table(1, width)  # refuses a width without a table before anything is read
    return TensorFile(where=file.where, shapes={**file.shapes, TABLE: (1, side**2, width)}, read=read)


def _is_old(file: TensorFile) -> bool:
    return any("/MlpBlock_3/" in name for name in file.shapes)


def pool_name(name: str) -> str:
    """Returns the present name of a tensor of attention pooling, which old files have outside MAPHead_0. Returns any
    other name unchanged."""
    parts = ("probe", BIG_VISION.attention, BIG_VISION.mlp, "LayerNorm_0")
    return _MAP + name if name.split("/", maxsplit=1)[0] in parts else name


def names_in(file: TensorFile) -> NpzNames:
    """Returns the names of a file's dialect. The file's prefix must be removed, and its layers unstacked."""
    numbers = VISION_TRANSFORMER if _is_old(file) else BIG_VISION
    position = next((name for name in _POSITIONS if name in file.shapes), _POSITIONS[-1])
    class_row = "cls" in file.shapes and _is_old(file)
    if "cls" in file.shapes and not class_row and position != BIG_VISION.position and position in file.shapes:
        _, num_positions, _ = file.shape(position, 3)
        _, class_row = side_of(num_positions, num_class_tokens=1, where=file.where, name=position)
    return replace(numbers, position=position, class_row=class_row)

"""Vision Transformers and hybrids in published .npz files: vision_transformer's names and big_vision's.

Sources: vit_jax/models_vit.py, models_resnet.py and checkpoint.py; big_vision/models/vit.py (fix_old_checkpoints).
big_vision adds position embeddings before it prepends the class token: its table has no row for it. Its files do not
hold the fixed embeddings (posemb "sincos2d"), so they are computed here.

Shape letters: D width, h heads, d width of a head, P patch, C channels, N patches.
"""

import math
from dataclasses import dataclass

import torch

from pipeline.models.config import ModelConfig
from pipeline.models.conversion.layout import (
    Layout,
    TensorMapping,
    as_is,
    changed,
    convolution,
    positions,
    transposed,
)
from pipeline.models.conversion.sizes import (
    Hints,
    TransformerShapes,
    Usual,
    count,
    hybrid_of,
    side_of,
    transformer_config,
    units_of,
)
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.positions import from_axes, sines
from shards.errors import UserError

USUAL = Usual(gelu="tanh", layer_norm_epsilon=1e-6, resnet_epsilons="paper")
TABLE = "pos_embedding"
_MAP = "MAPHead_0/"  # attention pooling
_IMAGE_SIZE = 224  # px: the file does not say it; big_vision trains its models with this table at 224
_POSITIONS = ("pos_embedding", "Transformer/pos_embedding", "Transformer/posembed_input/pos_embedding")


@dataclass(frozen=True, kw_only=True)
class NpzNames:
    """What differs between the dialects. `class_row`: the position table has a row for the class token."""

    prefix: str
    attention: str
    second_norm: str
    mlp: str
    position: str
    class_row: bool


VISION_TRANSFORMER = NpzNames(
    prefix="",
    attention="MultiHeadDotProductAttention_1",
    second_norm="LayerNorm_2",
    mlp="MlpBlock_3",
    position="Transformer/posembed_input/pos_embedding",
    class_row=True,
)
BIG_VISION = NpzNames(
    prefix="params/",
    attention="MultiHeadDotProductAttention_0",
    second_norm="LayerNorm_1",
    mlp="MlpBlock_0",
    position="pos_embedding",
    class_row=False,
)


def with_positions(file: TensorFile) -> tuple[TensorFile, tuple[str, ...]]:
    """The file with a position table, and what is assumed about the table: big_vision omits the one that it computes.

    Raises UserError if the table is missing in the other dialect, whose models all learn theirs.
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
    return file, (f"position embeddings sincos2d of {side} x {side} patches",)


def sincos_table(side: int, width: int) -> torch.Tensor:
    """The table (1, N, D), float32, of side x side patches. Raises UserError for a width without such a table."""
    if width % 4 or width < 8:
        raise UserError(
            f"the file has no {TABLE}, and its width {width} has no table of sines; allowed: multiples of 4 from 8 "
            "on: give the file of a model with position embeddings"
        )
    axis_LD = sines(side, width)
    return from_axes(axis_LD, axis_LD, num_prefix_tokens=0)


def with_table(file: TensorFile) -> TensorFile:
    """A file without position embeddings, and big_vision's table added to its tensors; not for hybrids."""
    patch, _, _, width = file.shape("embedding/kernel", 4)
    side = max(1, _IMAGE_SIZE // patch)

    def read(name: str) -> torch.Tensor:
        return sincos_table(side, width) if name == TABLE else file.read(name)

    sincos_table(1, width)  # refuses a width without a table before anything is read
    return TensorFile(where=file.where, shapes={**file.shapes, TABLE: (1, side**2, width)}, read=read)


def _is_old(file: TensorFile) -> bool:
    return any("/MlpBlock_3/" in name for name in file.shapes)


def pool_name(name: str) -> str:
    """The name of a tensor of attention pooling, which old files have outside MAPHead_0; any other name as it is."""
    parts = ("probe", BIG_VISION.attention, BIG_VISION.mlp, "LayerNorm_0")
    return _MAP + name if name.split("/", maxsplit=1)[0] in parts else name


def names_in(file: TensorFile) -> NpzNames:
    """The dialect of a file without its prefix and with unstacked layers."""
    numbers = VISION_TRANSFORMER if _is_old(file) else BIG_VISION
    position = next((name for name in _POSITIONS if name in file.shapes), _POSITIONS[-1])
    class_row = "cls" in file.shapes and _is_old(file)
    if "cls" in file.shapes and not class_row and position != BIG_VISION.position and position in file.shapes:
        _, num_positions, _ = file.shape(position, 3)
        _, class_row = side_of(num_positions, class_token=True, where=file.where, name=position)
    return NpzNames(
        prefix="",
        attention=numbers.attention,
        second_norm=numbers.second_norm,
        mlp=numbers.mlp,
        position=position,
        class_row=class_row,
    )


def config_in(file: TensorFile, names: NpzNames, hints: Hints) -> ModelConfig:
    """The configuration, from the shapes of such a file."""
    patch, _, _, width = file.shape("embedding/kernel", 4)
    block = "Transformer/encoderblock_0"
    _, num_heads, _ = file.shape(f"{block}/{names.attention}/query/kernel", 3)
    _, mlp_width = file.shape(f"{block}/{names.mlp}/Dense_0/kernel", 2)
    units, root = units_of(file.shapes, r"block(\d+)/unit(\d+)/", first=1), "conv_root/kernel"
    shapes = TransformerShapes(
        patch=patch,
        depth=count(file.shapes, r"Transformer/encoderblock_(\d+)/"),
        width=width,
        mlp_width=mlp_width,
        num_heads=num_heads,
        num_classes=file.shape("head/kernel", 2)[1] if "head/kernel" in file.shapes else 0,
        num_positions=file.shape(names.position, 3)[1] if names.position in file.shapes else None,
        class_token="cls" in file.shapes,
        representation="pre_logits/kernel" in file.shapes,
        attention_pooling=f"{_MAP}probe" in file.shapes,
        resnet=hybrid_of(units, root_channels=file.shape(root, 4)[3]) if root in file.shapes else None,
        class_row=names.class_row,
        is_square=True,  # as both dialects' own resampling takes it
    )
    return transformer_config(shapes, where=file.where, position_name=names.position, usual=USUAL, hints=hints)


def layout(config: ModelConfig, names: NpzNames) -> Layout:
    """Our tensors in the file."""
    size, has_token = config.size, config.num_class_tokens > 0
    mappings = _resnet(config) if config.resnet else {}
    patch = size.patch
    mappings["embed.patch.weight"] = changed(
        "embedding/kernel",
        lambda t: t.T.reshape(patch, patch, -1, t.shape[0]),  # (D, P * P * C) -> (P, P, C, D)
        lambda t: t.flatten(0, 2).T,
    )
    mappings["embed.patch.bias"] = as_is("embedding/bias")
    if has_token:
        mappings["embed.class_token"] = as_is("cls")
    if config.position == "learned_1d":
        mappings["embed.position"] = positions(names.position, class_row=names.class_row, class_token=has_token)
    for number in range(size.depth):
        mappings |= _block(f"blocks.{number}.", f"Transformer/encoderblock_{number}/", names, size.num_heads)
    mappings |= _norm("norm.", "Transformer/encoder_norm/")
    if config.pooling == "attention":
        mappings |= _pool(size.num_heads)
    if config.representation:
        mappings |= _dense("representation.", "pre_logits/")
    if config.num_classes:
        mappings |= _dense("head.", "head/")
    return mappings


def _pool(num_heads: int) -> dict[str, TensorMapping]:
    """big_vision's MAPHead."""
    attention = f"{_MAP}{BIG_VISION.attention}/"
    mappings = {
        "pool.probe": as_is(f"{_MAP}probe"),
        **_fused("pool.query.", attention, ("query",), num_heads),
        **_fused("pool.key_value.", attention, ("key", "value"), num_heads),
        **_out("pool.out.", attention, num_heads),
        **_norm("pool.norm.", f"{_MAP}LayerNorm_0/"),
    }
    for number in (1, 2):
        mappings |= _dense(f"pool.mlp.dense{number}.", f"{_MAP}{BIG_VISION.mlp}/Dense_{number - 1}/")
    return mappings


def _block(ours: str, theirs: str, names: NpzNames, num_heads: int) -> dict[str, TensorMapping]:
    attention = f"{theirs}{names.attention}/"
    return {
        **_norm(f"{ours}norm1.", f"{theirs}LayerNorm_0/"),
        **_fused(f"{ours}attention.qkv.", attention, ("query", "key", "value"), num_heads),
        **_out(f"{ours}attention.out.", attention, num_heads),
        **_norm(f"{ours}norm2.", f"{theirs}{names.second_norm}/"),
        **_dense(f"{ours}mlp.dense1.", f"{theirs}{names.mlp}/Dense_0/"),
        **_dense(f"{ours}mlp.dense2.", f"{theirs}{names.mlp}/Dense_1/"),
    }


def _fused(ours: str, theirs: str, parts: tuple[str, ...], num_heads: int) -> dict[str, TensorMapping]:
    """Several dense layers of an attention that are one here."""
    kernels, biases = (tuple(f"{theirs}{part}/{kind}" for part in parts) for kind in ("kernel", "bias"))
    return {
        # (n * D, D) -> n of (D, h, d)
        f"{ours}weight": TensorMapping(
            names=kernels,
            split=lambda t: tuple(piece.T.reshape(piece.shape[1], num_heads, -1) for piece in t.chunk(len(parts))),
            join=lambda pieces: torch.cat([piece.flatten(1).T for piece in pieces]),
        ),
        f"{ours}bias": TensorMapping(
            names=biases,
            split=lambda t: tuple(piece.reshape(num_heads, -1) for piece in t.chunk(len(parts))),
            join=lambda pieces: torch.cat([piece.flatten() for piece in pieces]),
        ),
    }


def _out(ours: str, theirs: str, num_heads: int) -> dict[str, TensorMapping]:
    """The last dense layer of an attention: (D, D) -> (h, d, D)."""
    return {
        f"{ours}weight": changed(
            f"{theirs}out/kernel",
            lambda t: t.T.reshape(num_heads, -1, t.shape[0]),
            lambda t: t.flatten(0, 1).T,
        ),
        f"{ours}bias": as_is(f"{theirs}out/bias"),
    }


_UNIT = (("conv1", "gn1", "norm1"), ("conv2", "gn2", "norm2"), ("conv3", "gn3", "norm_out"))


def _resnet(config: ModelConfig) -> dict[str, TensorMapping]:
    mappings = {"embed.resnet.conv_root.weight": convolution("conv_root/kernel")}
    mappings |= _norm("embed.resnet.norm_root.", "gn_root/")
    for stage, num_units in enumerate(config.resnet.units if config.resnet else ()):
        for unit in range(num_units):
            ours, theirs = f"embed.resnet.stages.{stage}.{unit}.", f"block{stage + 1}/unit{unit + 1}/"
            projection = (("conv_proj", "gn_proj", "norm_proj"),) if unit == 0 else ()
            for conv, their_norm, our_norm in (*_UNIT, *projection):
                mappings[f"{ours}{conv}.weight"] = convolution(f"{theirs}{conv}/kernel")
                mappings |= _norm(f"{ours}{our_norm}.", f"{theirs}{their_norm}/")
    return mappings


def _norm(ours: str, theirs: str) -> dict[str, TensorMapping]:
    return {f"{ours}weight": as_is(f"{theirs}scale"), f"{ours}bias": as_is(f"{theirs}bias")}


def _dense(ours: str, theirs: str) -> dict[str, TensorMapping]:
    return {f"{ours}weight": transposed(f"{theirs}kernel"), f"{ours}bias": as_is(f"{theirs}bias")}

"""Finds the configuration of a model from the shapes in its file, and from hints about what a file cannot say."""

import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.models.build import shapes_of
from pipeline.models.config import (
    BIT_RESNETS,
    HYBRID_RESNETS,
    SIZES,
    Gelu,
    InnerNorms,
    MlpKind,
    ModelConfig,
    NormKind,
    Position,
    ResNetEpsilons,
    ResNetSize,
    Size,
)
from pipeline.models.conversion.config import Hints, Pair
from pipeline.models.conversion.layout import OurView, Table, layout_of, read_layout
from pipeline.models.conversion.tensor_file import FlagNeededError, TensorFile
from pipeline.models.flops import num_parameters
from pipeline.models.weights.folder import AXES, HEAD, HEADS, POSITION, Assumption, Weights
from pipeline.models.weights.safetensors import Shapes
from pipeline.models.weights.usage import DEFAULT_USAGE, Usage
from shards.config_values import shown_value
from shards.errors import InvalidDataError, UserError

# The usual number of heads for a width. ViT-b/32 (vit_b32_half) is left out: it has the width of S/16 and S/32, but
# twice their heads.
HEADS_BY_WIDTH = {size.width: size.num_heads for name, size in SIZES.items() if name != "vit_b32_half"}
ROOT_WIDTH = 64
BIT_UNITS = "stages.{}.{}."
USUAL_LAYER_SCALE = 1e-5  # timm's initial value, which trained weights no longer have
# Image sizes (px) at which ViTs are published or usually trained. At any other size, a table whose number of rows is a
# square may just as well belong to a rectangular grid.
_USUAL_IMAGE_SIZES = frozenset(
    {32, 112, 128, 160, 192, 196, 224, 256, 288, 320, 336, 378, 384, 392, 432, 448, 480, 512, 518, 560, 576, 592, 640}
)
_MOST_PARAMETERS = 10**11


@dataclass(frozen=True, kw_only=True)
class Usual:
    """The usual values for a file's format, and for the architecture that it names, if any; by default the values of
    the paper's code. `said`: the fields that the file gives, directly or by naming its architecture. `num_heads`: None
    if it follows only from the width."""

    gelu: Gelu = "tanh"
    layer_norm_epsilon: float = 1e-6
    resnet_epsilons: ResNetEpsilons = "paper"
    num_heads: int | None = None
    said: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The facts about a transformer that a file's format or the config.json beside it gives; None if neither gives a
    fact.

    `width` and `patch` come from the patch embedding, whose shape differs between formats. `class_row`: whether the
    position table has a row for the class token. `grid`: height and width of the table's grid. `is_square`: whether the
    format has only square grids. `layer_scale`: the initial value of LayerScale in a file that has it.
    `has_later_parts`: whether the format has SwiGLU, whose first layer is twice as wide, and RMSNorms, which have no
    bias. `settings`: fields of the model that no tensor shows.
    """

    width: int
    patch: int
    num_heads: int | None = None
    class_row: bool | None = None
    grid: Pair | None = None
    is_square: bool = False
    layer_scale: float = USUAL_LAYER_SCALE
    has_later_parts: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The model of a file, whether its position table has a row for the class token, and what is assumed about it."""

    config: ModelConfig
    class_row: bool = True
    assumed: tuple[Assumption, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TransformerShapes(Declared):
    """The sizes of a ViT or a hybrid, from declarations and from the shapes in its file. `num_positions`: the number of
    rows of the position table; None if there is no table. `layer_scale`: 0 if the file has no LayerScale."""

    depth: int
    mlp_width: int
    num_classes: int
    num_positions: int | None
    class_token: bool
    distillation_token: bool = False
    layer_scale: float = 0.0
    representation: bool = False
    resnet: ResNetSize | None = None
    registers: int = 0
    qk_norm: bool = False
    attention_pooling: bool = False
    position: Position | None = None
    mlp: MlpKind = "plain"
    inner_norms: InnerNorms = "none"
    norm: NormKind = "layernorm"
    patch_norm: bool = False
    first_norm: bool = False

    @property
    def num_class_tokens(self) -> int:
        """The number of tokens before the registers: class token and distillation token."""
        return self.class_token + self.distillation_token

    def side(self, where: str, name: str) -> tuple[int, bool]:
        """Returns the side of the table's grid, and whether the class token has a row in it; (0, False) without a
        table."""
        if self.num_positions is None:
            return 0, False
        return side_of(
            self.num_positions,
            num_class_tokens=self.num_class_tokens,
            where=where,
            name=name,
            class_row=self.class_row,
            declared=self.grid,
        )


def transformer_in(view: OurView, declared: Declared, *, usual: Usual, hints: Hints) -> Found:
    """Finds the ViT or hybrid in a file. If `hints.model` is given, it is the model of that name. Raises UserError for
    sizes that do not fit together."""
    where, position_name = view.file.where, view.theirs(POSITION)
    is_2d = all(view.has(name) for name in AXES)
    num_positions = view.shape(AXES[0], 2)[0] ** 2 if is_2d else None
    if view.has(POSITION):
        _, num_positions, _ = view.file.shape(position_name, 3)
    mlp_width = view.shape("blocks.0.mlp.dense1.weight", 2)[0]
    is_gated = declared.has_later_parts and view.has("blocks.0.mlp.dense2.weight")
    is_gated = is_gated and mlp_width == 2 * view.shape("blocks.0.mlp.dense2.weight", 2)[1]
    inner_norms = ("none", "mlp", "both")[
        view.has("blocks.0.mlp.norm.weight") + view.has("blocks.0.attention.norm.weight")
    ]
    has_bias = view.has("blocks.0.norm1.bias") or not view.has("blocks.0.norm1.weight")
    is_rms = declared.has_later_parts and not has_bias
    found = {
        "depth": len(view.numbers("blocks.{}.")),
        "mlp_width": mlp_width // (1 + is_gated),
        "mlp": "swiglu" if is_gated else "plain",
        "inner_norms": inner_norms,
        "norm": "rmsnorm" if is_rms else "layernorm",
        "patch_norm": view.has("embed.patch_norm.weight"),
        "first_norm": view.has("embed.norm.weight"),
        "num_classes": view.shape(HEAD[0], 2)[0] if view.has(HEAD[0]) else 0,
        "num_positions": num_positions,
        "class_token": view.has("embed.class_token"),
        "distillation_token": view.has("embed.distillation_token"),
        "representation": view.has("representation.weight"),
        "resnet": hybrid_resnet(view),
        "position": "learned_2d" if is_2d else None,
        "grid": declared.grid or (None if declared.is_square else hints.grid),
        "layer_scale": declared.layer_scale if view.has("blocks.0.scale1.gamma") else 0.0,
        "registers": view.shape("embed.registers", 3)[1] if view.has("embed.registers") else 0,
        "attention_pooling": view.has("pool.probe"),
        "qk_norm": view.has("blocks.0.attention.q_norm.weight"),
    }
    shapes = TransformerShapes(**{**vars(declared), **found})
    config = transformer_config(shapes, where=where, position_name=position_name, usual=usual, hints=hints)
    side, class_row = shapes.side(where, position_name)
    assumed = _assumed(config, said=usual.said, hints=hints)
    if side and not shapes.grid and not shapes.is_square and "position" not in usual.said:
        # timm's vit_..._rope_ape_224 has such a table, and rotary positions, which leave no tensor.
        no_row = " without a row for the class token, not rotary" if shapes.class_token and not class_row else ""
        square = f"embeddings of a square grid of {side} x {side} patches{no_row}"
        assumed = (*assumed, Assumption(field="position", value=square, flag="--grid-side"))
    if shapes.grid and not shapes.num_positions and shapes.grid[0] != shapes.grid[1]:
        height, width = (side * config.stride for side in shapes.grid)
        square, in_file = f"{config.image_size} px, a square", f"{height} x {width} px"
        assumed = (*assumed, Assumption(field="image_size", value=square, flag="--image-size", in_file=in_file))
    if not (hints.layer_norm_epsilon or "layer_norm_epsilon" in usual.said):  # no architecture is named
        by_shapes = {
            "mlp": "swiglu, whose gate is the first half of its first layer" if is_gated else "",
            "norm": "rmsnorm, as norms have no bias" if is_rms else "",
        }
        assumed = (*assumed, *(Assumption(field=name, value=value) for name, value in by_shapes.items() if value))
    return Found(config=config, class_row=class_row, assumed=assumed)


def bit_in(view: OurView, *, usual: Usual, hints: Hints, is_basic: bool = False) -> Found:
    """Finds the BiT ResNet in a file. If `hints.model` is given, it is the model of that name. `is_basic`: whether its
    units are basic."""
    units, root_channels = units_of(view.numbers(BIT_UNITS)), view.shape("conv_root.weight", 4)[0]
    resnet = ResNetSize(units=units, factor=factor_of(root_channels), is_basic=is_basic)
    if not units:
        raise UserError(f"{view.file.where!r} has no stages after its root; give the file of a BiT ResNet")
    num_classes = view.shape(HEAD[0], 2)[0] if view.has(HEAD[0]) else 0
    config = bit_config(resnet, num_classes=num_classes, where=view.file.where, usual=usual, hints=hints)
    return Found(config=config, assumed=_assumed(config, said=usual.said, hints=hints))


def weights_of(
    file: TensorFile,
    table: Table,
    found: Found,
    *,
    advice: str,
    labels: tuple[str, ...] = (),
    usage: Usage = DEFAULT_USAGE,
) -> Weights:
    """Returns the weights in a file whose model is known. Raises a UserError that names the tensor that does not fit
    and says why."""
    shapes = shapes_in_file(found.config)
    return Weights(
        where=file.where,
        config=found.config,
        labels=labels,
        shapes=shapes,
        tensor=read_layout(file, layout_of(table, shapes), shapes, advice=advice),
        assumed=found.assumed,
        usage=usage,
    )


def transformer_config(
    shapes: TransformerShapes, *, where: str, position_name: str, usual: Usual, hints: Hints
) -> ModelConfig:
    """Returns the configuration of a ViT or a hybrid. If `hints.model` is given, it is the model of that name."""
    known = SIZES.get(hints.model)
    if hints.model and known is None:
        raise UserError(f"--model is {hints.model!r}, the file is of a transformer; allowed: {', '.join(SIZES)}")
    if hints.resnet_epsilons and not shapes.resnet:
        raise UserError(f"--resnet-epsilons is given, but {where!r} has no ResNet; leave it out")
    num_heads = _num_heads(shapes, known, where=where, usual=usual, hints=hints)
    size = Size(
        patch=shapes.patch, depth=shapes.depth, width=shapes.width, mlp_width=shapes.mlp_width, num_heads=num_heads
    )
    names = [name for name in SIZES if SIZES[name] == size and HYBRID_RESNETS.get(name) == shapes.resnet]
    fields = {} if known or names else vars(size)
    resnet = HYBRID_RESNETS.get(hints.model) if known else shapes.resnet
    is_custom = not (known or names) and resnet is not None
    stride = max(1, (resnet.stride if resnet else 1) * (known.patch if known else shapes.patch))
    side, _ = shapes.side(where, position_name)
    if shapes.num_positions is None and shapes.grid and shapes.grid[0] == shapes.grid[1]:
        side = shapes.grid[0]
    image_size = side * stride or 224 // stride * stride or stride
    if side and not shapes.grid and not shapes.is_square and image_size not in _USUAL_IMAGE_SIZES:
        rows = f"{position_name} in {where!r} has {shapes.num_positions} rows"
        raise FlagNeededError(
            f"{rows}, which would be a square image of {image_size} px, an unusual size; the rows can as well be of a "
            f"rectangular grid ({_other_grids(shapes)}), which the file does not say; if the image was square, give "
            f"--grid-side {side}"
        )
    position = shapes.position or ("none" if shapes.num_positions is None else "learned_1d")
    return _config_in(
        where,
        name=hints.model or (names[0] if names else "vit"),
        image_size=image_size,
        num_classes=shapes.num_classes,
        **fields,
        resnet_units=resnet.units if is_custom and resnet else None,
        resnet_factor=resnet.factor if is_custom and resnet else None,
        pooling="token" if shapes.class_token else "attention" if shapes.attention_pooling else "average",
        distillation_token=shapes.distillation_token,
        representation=shapes.representation,
        gelu=hints.gelu or usual.gelu,
        layer_norm_epsilon=hints.layer_norm_epsilon or usual.layer_norm_epsilon,
        resnet_epsilons=(hints.resnet_epsilons or usual.resnet_epsilons) if resnet else "paper",
        layer_scale=shapes.layer_scale,
        registers=shapes.registers,
        qk_norm=shapes.qk_norm,
        mlp=shapes.mlp,
        inner_norms=shapes.inner_norms,
        norm=shapes.norm,
        patch_norm=shapes.patch_norm,
        first_norm=shapes.first_norm,
        **{"position": position, **shapes.settings},
    )


def bit_config(resnet: ResNetSize, *, num_classes: int, where: str, usual: Usual, hints: Hints) -> ModelConfig:
    """Returns the configuration of a BiT ResNet. If `hints.model` is given, it is the model of that name."""
    if hints.model and hints.model not in BIT_RESNETS:
        raise UserError(f"--model is {hints.model!r}, the file is of a BiT ResNet; allowed: {', '.join(BIT_RESNETS)}")
    if hints.num_heads or hints.gelu or hints.layer_norm_epsilon:
        raise UserError("a BiT ResNet has no heads, GELU or layer norm; leave out --num-heads, --gelu and the like")
    names = [hints.model] if hints.model else [name for name in BIT_RESNETS if BIT_RESNETS[name] == resnet]
    return _config_in(
        where,
        name=names[0] if names else "bit_r18x1" if resnet.is_basic else "bit_r50x1",
        image_size=224,
        num_classes=num_classes,
        resnet_units=None if names else resnet.units,
        resnet_factor=None if names else resnet.factor,
        resnet_epsilons=hints.resnet_epsilons or usual.resnet_epsilons,
    )


def pair_of(value: Any, *, key: str, where: str) -> Pair:
    """Returns height and width, from one number for both or from two. Raises UserError for anything else."""
    pair = [value, value] if not isinstance(value, list | tuple) else value
    if len(pair) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in pair):
        raise UserError(
            f"config.json beside {where!r} says {key} {shown_value(value)}; allowed: a number of pixels of 1 or more, "
            "or two (height, width)"
        )
    return pair[0], pair[1]


def temperature_of(value: Any, *, key: str, where: str) -> float:
    """Returns the temperature of rotary positions. Raises UserError for anything but a finite number above 1."""
    if type(value) not in (int, float) or not 1 < value <= sys.float_info.max:
        raise UserError(
            f"config.json beside {where!r} says {key} {shown_value(value)}; allowed: a finite number above 1; "
            "correct it"
        )
    return float(value)


def grid_of(image: Pair, patch: Pair) -> Pair:
    """Returns the numbers of patches down and across. The convolution that embeds patches drops incomplete ones."""
    return image[0] // patch[0], image[1] // patch[1]


def units_of(numbers: set[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the number of units of each stage. `numbers` has the number of the stage and of the unit for each
    unit."""
    num_units = Counter(stage for stage, _ in numbers)
    return tuple(num_units[stage] for stage in range(len(num_units)))


def hybrid_resnet(view: OurView) -> ResNetSize | None:
    """Finds the ResNet of a hybrid, which may be the root alone; None for a file without one."""
    root = "embed.resnet.conv_root.weight"
    if not view.has(root):
        return None
    units = units_of(view.numbers("embed.resnet.stages.{}.{}."))
    return ResNetSize(units=units, factor=factor_of(view.shape(root, 4)[0]))


def factor_of(root_channels: int) -> int:
    """Returns how many times wider a ResNet is than one with 64 channels after the root; at least 1."""
    return max(1, root_channels // ROOT_WIDTH)


def side_of(
    num_positions: int,
    *,
    num_class_tokens: int,
    where: str,
    name: str,
    class_row: bool | None = None,
    declared: Pair | None = None,
) -> tuple[int, bool]:
    """Returns the side of the square grid of the position embeddings, and whether the class token has a row.

    If nothing is declared, both follow from the number of rows. Raises UserError if no square grid has that number of
    rows, or the declared grid has another.
    """
    rows = (0, num_class_tokens) if num_class_tokens else (0,)
    rows = rows if class_row is None else (class_row * num_class_tokens,)
    if declared:
        return _declared_side(num_positions, declared, rows, f"{name} in {where!r} has {num_positions} rows")
    for num_rows in rows:
        side = math.isqrt(max(0, num_positions - num_rows))
        if side and side**2 + num_rows == num_positions:
            return side, num_rows > 0
    more = {0: "", 1: " and one more for the class token", 2: " and two more for the class and the distillation token"}
    allowed = " or ".join(f"a square{more[num_rows]}" for num_rows in rows)
    raise UserError(
        f"{name} in {where!r} has {num_positions} rows, which is the grid of no square image; allowed: {allowed}"
    )


def _declared_side(num_positions: int, declared: Pair, rows: tuple[int, ...], has: str) -> tuple[int, bool]:
    height, width = declared
    if height != width or not height:
        raise UserError(
            f"{has}, config.json says a grid of {height} x {width} patches (height, width); the models here take "
            "square images: give weights of those"
        )
    for num_rows in rows:
        if height * width + num_rows == num_positions:
            return height, num_rows > 0
    words = {0: "without the class token", 1: "and the class token", 2: "and the class and the distillation token"}
    wanted = [f"a grid of {height} x {width} {words[num_rows]}, {height * width + num_rows} rows" for num_rows in rows]
    raise FlagNeededError(
        f"{has}, config.json or --grid-side says {' or '.join(wanted)}; give both files of one model, or write the "
        "image size of the tensors into config.json (--image-size then resamples them)"
    )


def _other_grids(shapes: TransformerShapes) -> str:
    """Lists up to four rectangular grids that a position table's rows may belong to, with or without a row for the
    class token."""
    found = [
        f"{height} x {num // height}"
        for num in sorted(
            {shapes.num_positions or 0, (shapes.num_positions or 0) - shapes.num_class_tokens}, reverse=True
        )
        for height in range(1, math.isqrt(num) + 1)
        if num % height == 0 and height * height != num
    ]
    return ", ".join(found[-4:]) or "1 x 1"


def _config_in(where: str, **fields: Any) -> ModelConfig:
    try:
        config = ModelConfig(**fields)
    except UserError as error:
        raise InvalidDataError(f"{where!r} is of no model that can be built: {error}") from error
    refuse_absurd(config, where=where)
    return config


def _num_heads(shapes: TransformerShapes, known: Size | None, *, where: str, usual: Usual, hints: Hints) -> int:
    """Returns the number of heads that the user, the file and the model's name agree on. If none of them says it,
    returns the usual number for the width, which a model with RMSNorms does not have.

    A named model of another width is ignored here: its tensors will be refused for their shapes. `--num-heads`
    overrides the architecture that a file names; `--model` does not.
    """
    is_of_its_width = known is not None and known.width == shapes.width
    in_file = shapes.num_heads or (None if hints.num_heads else usual.num_heads)
    said = (hints.num_heads, in_file, known.num_heads if known and is_of_its_width else None)
    if len({number for number in said if number}) > 1:
        raise UserError(
            f"--num-heads, {where!r} and --model say {', '.join(str(number or 'nothing') for number in said)} heads; "
            "leave out --num-heads and --model where the file says it"
        )
    is_rms = shapes.norm == "rmsnorm"
    by_width = 0 if is_rms else HEADS_BY_WIDTH.get(shapes.width, 0)
    num_heads = next((number for number in said if number), by_width)
    if not num_heads and not known:
        advice = " (AIMv2, which has RMSNorms like this file, has one for each 128 channels)" if is_rms else ""
        raise FlagNeededError(
            f"{where!r} does not say how many heads its attention of width {shapes.width} has; give --num-heads{advice}"
        )
    return num_heads


def refuse_absurd(config: ModelConfig, *, where: str) -> None:
    """Raises UserError for more parameters than any model has."""
    number = num_parameters(config, head=config.num_classes > 0)
    if number > _MOST_PARAMETERS:
        raise UserError(
            f"{where!r} is of {number} parameters, more than any model; allowed: {_MOST_PARAMETERS} "
            f"(config.json and the shapes say {config})"
        )


def _assumed(config: ModelConfig, *, said: tuple[str, ...], hints: Hints) -> tuple[Assumption, ...]:
    """Returns the settings that neither the file nor the user gives, with the values assumed."""
    names = [] if config.is_bit else ["gelu", "layer_norm_epsilon", "num_heads"]
    names += ["resnet_epsilons"] if config.resnet else []
    known = {*said, *(name for name in names if getattr(hints, name)), *(("num_heads",) if hints.model else ())}
    return tuple(
        Assumption(
            field=name,
            value=str(config.size.num_heads if name == "num_heads" else getattr(config, name)),
            flag=f"--{name.replace('_', '-')}",
        )
        for name in names
        if name not in known
    )


def shapes_in_file(config: ModelConfig) -> Shapes:
    """Returns the names (ours) and shapes of the tensors in a file of this model. A model without classes has no
    head."""
    if config.num_classes:
        return shapes_of(config)
    return {name: shape for name, shape in shapes_of(replace(config, num_classes=1)).items() if name not in HEADS}

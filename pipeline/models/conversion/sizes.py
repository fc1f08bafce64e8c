"""Finds the configuration of a model from the shapes in its file, and from hints about what a file cannot say."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pipeline.models.build import shapes_of
from pipeline.models.config import (
    BIT_RESNETS,
    HYBRID_RESNETS,
    MOST_PIXELS,
    SIZES,
    Gelu,
    ModelConfig,
    Position,
    ResNetEpsilons,
    ResNetSize,
    Size,
)
from pipeline.models.conversion.config import PixelName, Take
from pipeline.models.flops import num_parameters
from pipeline.models.weights.folder import HEAD
from pipeline.models.weights.safetensors import Shapes
from shards.errors import InvalidDataError, UserError
from shards.schema.config_values import Range, refuse_wrong_values, shown_value

Pair = tuple[int, int]  # height, width
# The usual number: ViT-b/32 (vit_b32_half) has the width of S/16 and S/32, but twice their heads.
HEADS_BY_WIDTH = {size.width: size.num_heads for name, size in SIZES.items() if name != "vit_b32_half"}
ROOT_WIDTH = 64
USUAL_LAYER_SCALE = 1e-5  # timm's; an initial value, so only weights that start anew would have it
# Image sizes (px) at which ViTs are published or usually trained. At any other size, a table whose number of rows is a
# square may as well be that of a rectangular grid.
_USUAL_IMAGE_SIZES = frozenset(
    {32, 112, 128, 160, 192, 196, 224, 256, 288, 320, 336, 378, 384, 392, 432, 448, 480, 512, 518, 560, 576, 592, 640}
)
_MOST_PARAMETERS = 10**11


def pair_of(value: Any, *, key: str, where: str) -> Pair:
    """Height and width, from one number for both or from two. Raises UserError for anything else."""
    pair = [value, value] if not isinstance(value, list | tuple) else value
    if len(pair) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in pair):
        raise UserError(
            f"config.json beside {where!r} says {key} {shown_value(value)}; allowed: a number of pixels of 1 or more, "
            "or two (height, width)"
        )
    return pair[0], pair[1]


def grid_of(image: Pair, patch: Pair) -> Pair:
    """Patches down and across; the convolution that embeds them drops incomplete patches."""
    return image[0] // patch[0], image[1] // patch[1]


@dataclass(frozen=True, kw_only=True)
class Hints:
    """Settings that a file does not contain, as the user gave them; None: the usual value of the file's format."""

    model: str = ""
    """Name of the model that the file must hold, such as vit_b16; empty: any."""
    num_heads: Annotated[int, Range(1)] | None = None
    """Attention heads per layer."""
    gelu: Gelu | None = None
    """Form of the GELU."""
    layer_norm_epsilon: Annotated[float, Range(above=0)] | None = None
    """Epsilon of every LayerNorm."""
    resnet_epsilons: ResNetEpsilons | None = None
    """Epsilons of the ResNet's norms."""
    pixels: PixelName | None = None
    """Pixels that the weights were trained on."""
    grid_side: Annotated[int, Range(1, MOST_PIXELS)] | None = None
    """Side of the square grid of position embeddings, in patches."""
    take: Take | None = None
    """Which weights of a file that holds the raw ones and their average over training."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")

    @property
    def grid(self) -> Pair | None:
        """The grid that `grid_side` declares."""
        return (self.grid_side, self.grid_side) if self.grid_side else None

    def advice(self) -> str:
        """What to do if tensors do not fit, which includes leaving out the hints that were given."""
        given = [f"--model {self.model}"] if self.model else []
        given += [f"--num-heads {self.num_heads}"] if self.num_heads else []
        return "Give the file of another model" + (f", or leave out {' and '.join(given)}" if given else "")


@dataclass(frozen=True, kw_only=True)
class Usual:
    """The usual values for a file's format, and for the architecture that it names, if any; `said`: those of them that
    the file gives itself, by its architecture too. `num_heads`: None if nothing but the width says it."""

    gelu: Gelu
    layer_norm_epsilon: float
    resnet_epsilons: ResNetEpsilons
    num_heads: int | None = None
    said: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TransformerShapes:
    """The sizes of a ViT or a hybrid, from the shapes in a file. `num_positions`: rows of the table; None: no table.

    `class_row` (whether the table has a row for the class token) and `declared` (its grid, height and width) come from
    a config.json; None: they follow from the number of rows. `is_square`: the format has no other grids. `layer_scale`:
    its initial value, 0 without any; the file does not say it, so it may be USUAL_LAYER_SCALE.
    """

    patch: int
    depth: int
    width: int
    mlp_width: int
    num_heads: int | None
    num_classes: int
    num_positions: int | None
    class_token: bool
    representation: bool = False
    resnet: ResNetSize | None = None
    position: Position | None = None
    class_row: bool | None = None
    declared: Pair | None = None
    is_square: bool = False
    layer_scale: float = 0.0
    registers: int = 0
    qk_norm: bool = False
    attention_pooling: bool = False

    def assumed_grid(self, where: str, name: str) -> tuple[str, ...]:
        """What is assumed about the position table, if nothing declares its grid."""
        side, has_row = self.side(where, name)
        if not side or self.declared or self.is_square:
            return ()
        no_row = " without a row for the class token" if self.class_token and not has_row else ""
        return (f"position embeddings of a square grid of {side} x {side} patches{no_row}",)

    def side(self, where: str, name: str) -> tuple[int, bool]:
        """Side of the table's grid and whether the class token has a row in it; (0, False) without a table."""
        if self.num_positions is None:
            return 0, False
        return side_of(
            self.num_positions,
            class_token=self.class_token,
            where=where,
            name=name,
            class_row=self.class_row,
            declared=self.declared,
        )


def count(names: Iterable[str], pattern: str) -> int:
    """How many different numbers the pattern's first group finds in the names."""
    return len({int(match[1]) for name in names if (match := re.match(pattern, name))})


def units_of(names: Iterable[str], pattern: str, *, first: int) -> tuple[int, ...]:
    """Units of each stage. The pattern's groups are stage and unit; their numbers begin with `first`."""
    found = {(int(m[1]) - first, int(m[2]) - first) for name in names if (m := re.match(pattern, name))}
    num_units = Counter(stage for stage, _ in found)
    return tuple(num_units[stage] for stage in range(len(num_units)))


def resnet_of(units: tuple[int, ...], *, root_channels: int, is_basic: bool = False) -> ResNetSize | None:
    """The ResNet with these units; None without any."""
    return replace(hybrid_of(units, root_channels=root_channels), is_basic=is_basic) if units else None


def hybrid_of(units: tuple[int, ...], *, root_channels: int) -> ResNetSize:
    """The ResNet of a hybrid with these units; without any, it is the root alone."""
    return ResNetSize(units=units, factor=max(1, root_channels // ROOT_WIDTH))


def side_of(
    num_positions: int,
    *,
    class_token: bool,
    where: str,
    name: str,
    class_row: bool | None = None,
    declared: Pair | None = None,
) -> tuple[int, bool]:
    """Side of the square grid of the position embeddings, and whether the class token has a row of its own.

    If nothing is declared, both follow from the number of rows. Raises UserError if no square grid, or not the declared
    grid, has that number of rows.
    """
    rows = (False, True) if class_token else (False,)
    rows = rows if class_row is None else (class_row,)
    if declared:
        return _declared_side(num_positions, declared, rows, f"{name} in {where!r} has {num_positions} rows")
    for has_row in rows:
        side = math.isqrt(max(0, num_positions - has_row))
        if side and side**2 + has_row == num_positions:
            return side, has_row
    allowed = " or ".join("a square and one more for the class token" if row else "a square" for row in rows)
    raise UserError(
        f"{name} in {where!r} has {num_positions} rows, which is the grid of no square image; allowed: {allowed}"
    )


def _declared_side(num_positions: int, declared: Pair, rows: tuple[bool, ...], has: str) -> tuple[int, bool]:
    height, width = declared
    if height != width or not height:
        raise UserError(
            f"{has}, config.json says a grid of {height} x {width} patches (height, width); the models here take "
            "square images: give weights of those"
        )
    for has_row in rows:
        if height * width + has_row == num_positions:
            return height, has_row
    wanted = [
        f"a grid of {height} x {width} {'and' if row else 'without'} the class token, {height * width + row} rows"
        for row in rows
    ]
    raise UserError(
        f"{has}, config.json or --grid-side says {' or '.join(wanted)}; give both files of one model, or write the "
        "image size of the tensors into config.json (--image-size then resamples them)"
    )


def transformer_config(
    shapes: TransformerShapes, *, where: str, position_name: str, usual: Usual, hints: Hints
) -> ModelConfig:
    """The configuration of a ViT or a hybrid; that of `hints.model` if it is given."""
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
    if shapes.num_positions is None and shapes.declared and shapes.declared[0] == shapes.declared[1]:
        side = shapes.declared[0]
    image_size = side * stride or 224 // stride * stride or stride
    if side and not shapes.declared and not shapes.is_square and image_size not in _USUAL_IMAGE_SIZES:
        rows = f"{position_name} in {where!r} has {shapes.num_positions} rows"
        raise UserError(
            f"{rows}, which would be a square image of {image_size} px, an unusual size; the rows can as well be of a "
            f"rectangular grid ({_other_grids(shapes)}), which the file does not say; if the image was square, give "
            f"--grid-side {side}"
        )
    return _config_in(
        where,
        name=hints.model or (names[0] if names else "vit"),
        image_size=image_size,
        num_classes=shapes.num_classes,
        **fields,
        resnet_units=resnet.units if is_custom and resnet else None,
        resnet_factor=resnet.factor if is_custom and resnet else None,
        pooling="token" if shapes.class_token else "attention" if shapes.attention_pooling else "average",
        representation=shapes.representation,
        position=shapes.position or ("none" if shapes.num_positions is None else "learned_1d"),
        gelu=hints.gelu or usual.gelu,
        layer_norm_epsilon=hints.layer_norm_epsilon or usual.layer_norm_epsilon,
        resnet_epsilons=(hints.resnet_epsilons or usual.resnet_epsilons) if resnet else "paper",
        layer_scale=shapes.layer_scale,
        registers=shapes.registers,
        qk_norm=shapes.qk_norm,
    )


def _other_grids(shapes: TransformerShapes) -> str:
    """Grids with as many patches as a position table has rows, with and without one for the class token."""
    found = [
        f"{height} x {num // height}"
        for num in sorted({shapes.num_positions or 0, (shapes.num_positions or 0) - shapes.class_token}, reverse=True)
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
    """The number of heads that the user, the file and the model's name agree on, else the usual one for the width.

    A model of another width has no say: its tensors are refused by their shapes. The user may know better than the
    architecture that a file names, but not by the name of another model.
    """
    is_of_its_width = known is not None and known.width == shapes.width
    in_file = shapes.num_heads or (None if hints.num_heads else usual.num_heads)
    said = (hints.num_heads, in_file, known.num_heads if known and is_of_its_width else None)
    if len({number for number in said if number}) > 1:
        raise UserError(
            f"--num-heads, {where!r} and --model say {', '.join(str(number or 'nothing') for number in said)} heads; "
            "leave out --num-heads and --model where the file says it"
        )
    num_heads = next((number for number in said if number), HEADS_BY_WIDTH.get(shapes.width, 0))
    if not num_heads and not known:
        raise UserError(
            f"{where!r} does not say how many heads its attention of width {shapes.width} has; give --num-heads"
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


def assumed(config: ModelConfig, *, said: tuple[str, ...], hints: Hints) -> tuple[str, ...]:
    """Settings that neither the file nor the user gives, with the values taken: "gelu exact"."""
    names = [] if config.is_bit else ["gelu", "layer_norm_epsilon", "num_heads"]
    names += ["resnet_epsilons"] if config.resnet else []
    known = {*said, *(name for name in names if getattr(hints, name)), *(("num_heads",) if hints.model else ())}
    return tuple(
        f"{name} {config.size.num_heads if name == 'num_heads' else getattr(config, name)}"
        for name in names
        if name not in known
    )


def shapes_in_file(config: ModelConfig) -> Shapes:
    """Our names and shapes in a file of this model; without a head if it has no classes."""
    if config.num_classes:
        return shapes_of(config)
    return {name: shape for name, shape in shapes_of(replace(config, num_classes=1)).items() if name not in HEAD}


def bit_config(resnet: ResNetSize, *, num_classes: int, where: str, usual: Usual, hints: Hints) -> ModelConfig:
    """The configuration of a BiT ResNet; that of `hints.model` if it is given."""
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

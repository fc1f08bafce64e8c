"""Our own tensors in a bare safetensors or PyTorch file, without the config.json of a weights folder."""

import math

from pipeline.models.config import ModelConfig
from pipeline.models.conversion.layout import as_is, read_layout
from pipeline.models.conversion.sizes import (
    USUAL_LAYER_SCALE,
    Hints,
    TransformerShapes,
    Usual,
    assumed,
    bit_config,
    count,
    hybrid_of,
    resnet_of,
    shapes_in_file,
    transformer_config,
    units_of,
)
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.weights.folder import AXES, POSITION, Weights
from shards.errors import UserError
from shards.output.quantities import plural

MARKS = ("embed.patch.weight", "conv_root.weight")
_USUAL = Usual(gelu="tanh", layer_norm_epsilon=1e-6, resnet_epsilons="paper")


def open_plain(file: TensorFile, hints: Hints) -> Weights:
    """The weights in such a file. Raises UserError with the tensor that does not fit, and why."""
    config = _bit_config(file, hints) if "conv_root.weight" in file.shapes else _vit_config(file, hints)
    shapes = shapes_in_file(config)
    layout = {name: as_is(name) for name in shapes}
    tensor = read_layout(file, layout, shapes, advice=hints.advice())
    said = assumed(config, said=(), hints=hints)
    if not config.is_bit and config.position == "none":
        said = (*said, "position none (sincos2d and rope2d leave no tensor either)")
    if not config.is_bit and config.pooling == "average" and config.size.depth % 2 == 0:
        layers = plural(config.size.depth // 2, "layer")
        said = (*said, f"attention global (an axial model of {layers} has the same tensors)")
    return Weights(where=file.where, config=config, labels=(), shapes=shapes, tensor=tensor, assumed=said)


def _vit_config(file: TensorFile, hints: Hints) -> ModelConfig:
    width, inputs = file.shape("embed.patch.weight", 2)
    units = units_of(file.shapes, r"embed\.resnet\.stages\.(\d+)\.(\d+)\.", first=0)
    root = "embed.resnet.conv_root.weight"
    resnet = hybrid_of(units, root_channels=file.shape(root, 4)[0]) if root in file.shapes else None
    is_2d = all(name in file.shapes for name in AXES)
    num_positions = file.shape(AXES[0], 2)[0] ** 2 if is_2d else None
    if POSITION in file.shapes:
        num_positions = file.shape(POSITION, 3)[1]
    shapes = TransformerShapes(
        patch=math.isqrt(inputs // (resnet.width if resnet else 3)),
        depth=count(file.shapes, r"blocks\.(\d+)\."),
        width=width,
        mlp_width=file.shape("blocks.0.mlp.dense1.weight", 2)[0],
        num_heads=None,
        num_classes=file.shape("head.weight", 2)[0] if "head.weight" in file.shapes else 0,
        num_positions=num_positions,
        class_token="embed.class_token" in file.shapes,
        representation="representation.weight" in file.shapes,
        resnet=resnet,
        position="learned_2d" if is_2d else None,
        is_square=True,
        layer_scale=USUAL_LAYER_SCALE if "blocks.0.scale1.gamma" in file.shapes else 0.0,
        registers=file.shape("embed.registers", 3)[1] if "embed.registers" in file.shapes else 0,
        attention_pooling="pool.probe" in file.shapes,
        qk_norm="blocks.0.attention.q_norm.weight" in file.shapes,
    )
    return transformer_config(shapes, where=file.where, position_name=POSITION, usual=_USUAL, hints=hints)


def _bit_config(file: TensorFile, hints: Hints) -> ModelConfig:
    units = units_of(file.shapes, r"stages\.(\d+)\.(\d+)\.", first=0)
    is_basic = "stages.0.0.conv3.weight" not in file.shapes
    resnet = resnet_of(units, root_channels=file.shape("conv_root.weight", 4)[0], is_basic=is_basic)
    if resnet is None:
        raise UserError(f"{file.where!r} has no stages after its root; give the file of a BiT ResNet")
    num_classes = file.shape("head.weight", 2)[0] if "head.weight" in file.shapes else 0
    return bit_config(resnet, num_classes=num_classes, where=file.where, usual=_USUAL, hints=hints)

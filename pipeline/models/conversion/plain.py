"""Our own tensors in a bare safetensors or PyTorch file, without the config.json of a weights folder."""

import math
from dataclasses import replace

from pipeline.models.config import ModelConfig
from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.layout import OurView
from pipeline.models.conversion.sizes import Declared, Usual, bit_in, hybrid_resnet, transformer_in, weights_of
from pipeline.models.conversion.tensor_file import TensorFile
from pipeline.models.weights.folder import Assumption, Weights
from shards.output.quantities import plural

MARKS = ("embed.patch.weight", "conv_root.weight")


def open_plain(file: TensorFile, hints: Hints) -> Weights:
    """The weights in such a file. Raises UserError with the tensor that does not fit, and why."""
    view = OurView(file=file, table=())  # a name without a row is ours
    if view.has("conv_root.weight"):
        found = bit_in(view, usual=Usual(), hints=hints, is_basic=not view.has("stages.0.0.conv3.weight"))
    else:
        (width, num_inputs), resnet = file.shape("embed.patch.weight", 2), hybrid_resnet(view)
        patch = math.isqrt(num_inputs // (resnet.width if resnet else 3))
        declared = Declared(width=width, patch=patch, is_square=True)
        found = transformer_in(view, declared, usual=Usual(), hints=hints)
        found = replace(found, assumed=(*found.assumed, *_without_tensors(found.config)))
    return weights_of(file, (), found, advice=hints.advice())


def _without_tensors(config: ModelConfig) -> tuple[Assumption, ...]:
    """What other settings of the same tensors could be."""
    assumed = list[Assumption]()
    if config.position == "none":
        assumed.append(Assumption(field="position", value="none (sincos2d and rope2d leave no tensor either)"))
    if config.pooling == "average" and config.size.depth % 2 == 0:
        layers = plural(config.size.depth // 2, "layer")
        value = f"global (an axial model of {layers} has the same tensors)"
        assumed.append(Assumption(field="attention", value=value))
    return tuple(assumed)
